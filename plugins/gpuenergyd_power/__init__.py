"""Plugin `power`: the power budget of a host, and a limit on how fast its power changes."""

from gpuenergyd.cli.command_entry import CommandEntry

BUDGET = CommandEntry(
    "Operate a host", "gpuenergyd_power.command", "Show, set and clear the power budget of this host."
)
