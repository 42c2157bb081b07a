"""Plugin `fleet`: a power budget that hosts share, and grid events for all of them."""

from gpuenergyd.cli.command_entry import CommandEntry

FLEET = CommandEntry("Operate a host", "gpuenergyd_fleet.command", "Share a power budget between hosts.")
