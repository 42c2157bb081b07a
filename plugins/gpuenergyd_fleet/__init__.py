"""Plugin `fleet`: a power budget shared by several hosts, and grid events that apply to all of them."""

from gpuenergyd.cli.command_entry import CommandEntry

FLEET = CommandEntry("Operate a host", "gpuenergyd_fleet.command", "Share a power budget between hosts.")
