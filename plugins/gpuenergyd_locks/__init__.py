"""Plugin `locks`: administrators lock a GPU's clock or limit its power; the daemon holds the lease."""

from gpuenergyd.cli.command_entry import CommandEntry

_TASK = "Operate a host"
LOCK = CommandEntry(_TASK, "gpuenergyd_locks.command", "Lock a GPU's SM clock.")
LIMIT = CommandEntry(_TASK, "gpuenergyd_locks.command", "Limit a GPU's power.")
