"""Plugin `idle`: what GPUs do hour by hour, and lower clocks while programs hold them without work."""

from gpuenergyd.cli.command_entry import CommandEntry

IDLE = CommandEntry("Monitor", "gpuenergyd_idle.command", "Show idle GPUs and what lower clocks save on them.")
