"""Exit status or signal of an ended process that is not a child of the daemon, if the kernel provides it."""

import errno
import fcntl
import os
import signal
import struct
from dataclasses import dataclass

_INFO = struct.Struct("=QQ11Ii")
"""`struct pidfd_info`: mask, cgroup, eleven ids, exit code."""
_WANTS_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""`PIDFD_GET_INFO`; since Linux 6.15 it returns the exit status of a process that its parent has waited for."""
_EXIT_CODE_FIELD = 49
"""Number of the exit code among the fields of /proc/PID/stat that follow the name."""
_AFTER_ANOTHER = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT}
"""Signals that launchers send to the other ranks once one has failed, or that libraries raise if a peer is lost."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of a process."""

    text: str
    """How it ended, as a predicate such as "was killed by SIGKILL"; empty if unknown."""
    is_failure: bool
    """Whether it was killed, or exited with a status other than 0."""
    is_cause: bool = False
    """Whether no other process's end can be the reason, because a signal such as SIGSEGV or SIGKILL ended it."""


def process_end(pid: int, pidfd: int) -> ProcessEnd:
    status = _zombie_status(pid)
    if status is None:
        status = _reaped_status(pidfd)
    if status is None:
        return ProcessEnd("", is_failure=False)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        is_cause = -code not in _AFTER_ANOTHER
        return ProcessEnd(f"was killed by {_signal_name(-code)}", is_failure=True, is_cause=is_cause)
    return ProcessEnd(f"exited with status {code}", is_failure=code != 0)


def _zombie_status(pid: int) -> int | None:
    """Return the wait status of a process that its parent has not waited for; None for any other process.

    A status of 0 also gives None, because the kernel shows 0 to processes without permission.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as stat:  # noqa: PTH123  as in process_identity
            fields = stat.read(1024).rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[_EXIT_CODE_FIELD]) or None if fields[0] == b"Z" else None


def _reaped_status(pidfd: int) -> int | None:
    """Return the wait status of a process that its parent has waited for; None if the kernel does not provide it."""
    request = bytearray(_INFO.pack(_WANTS_EXIT, *(0,) * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, request)
    except OSError as error:
        if error.errno not in {errno.ENOTTY, errno.EINVAL, errno.ESRCH, errno.EPERM}:
            raise
        return None
    mask, *_, status = _INFO.unpack(request)
    return status if mask & _WANTS_EXIT else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
