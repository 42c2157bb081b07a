"""Looks for the daemon's socket every few seconds, so that a program without a daemon loses only microseconds.

A daemon is assumed to run if its socket exists. A socket on which nobody listens was left by a killed daemon. It is
ignored until another socket replaces it, or for 30 s, after which a daemon may listen on it again.
"""

import stat
from pathlib import Path
from time import monotonic_ns

from gpuenergyd.client.environment import find_socket_path
from gpuenergyd.log_lines import safe_logger

_LOOK_EVERY_NS = 2_000_000_000
_ASKED_EVERY_NS = 100_000_000
_MOST_LEFT_OUT = 15
"""Few, since the next iterations may take longer than those before."""
_TRY_AGAIN_AFTER_NS = 30_000_000_000

logger = safe_logger("gpuenergyd.client")


class DaemonLookout:
    """Tells the training thread whether a daemon runs; never waits."""

    def __init__(self, socket_path: str | None) -> None:
        self._socket_path = socket_path
        self._next_look_ns = self._asked_ns = 0
        self.num_to_leave_out = 0
        """How often a program that asks often need not ask before it does so again."""
        self._is_there = self._is_absence_reported = False
        self._refused: tuple[int, int] | None = None
        self._refused_until_ns = 0

    def sees_daemon(self) -> bool:
        """Return whether a daemon was running at the last look."""
        if self._is_there:
            return True
        now_ns = monotonic_ns()
        if now_ns < self._next_look_ns:
            is_often = now_ns - self._asked_ns < _ASKED_EVERY_NS
            more = 2 * self.num_to_leave_out + 1 if is_often else self.num_to_leave_out // 2
            self.num_to_leave_out = min(more, _MOST_LEFT_OUT)
            self._asked_ns = now_ns
            return False
        self._asked_ns, self.num_to_leave_out = now_ns, 0
        self._next_look_ns = now_ns + _LOOK_EVERY_NS
        path = find_socket_path(self._socket_path)
        found = _identity(path)
        self._is_there = found is not None and (found != self._refused or now_ns >= self._refused_until_ns)
        if not self._is_there and not self._is_absence_reported:
            self._is_absence_reported = True
            if found is None:  # a refusal was logged already
                logger.warning("gpuenergyd: no daemon at %s; training continues at full speed", path)
        return self._is_there

    def record_refusal(self) -> None:
        """Look for another daemon, since nobody listens on this socket."""
        self._refused = _identity(find_socket_path(self._socket_path))
        self._refused_until_ns = monotonic_ns() + _TRY_AGAIN_AFTER_NS
        self._is_there, self._is_absence_reported = False, True


def _identity(path: str) -> tuple[int, int] | None:
    """Return inode and change time, which distinguish this socket from a later one; None if there is no socket."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return (status.st_ino, status.st_ctime_ns) if stat.S_ISSOCK(status.st_mode) else None
