"""systemd integration: readiness and watchdog notifications (sd_notify(3)), inherited sockets (sd_listen_fds(3)).

Without systemd, notifications are no-ops and no socket is inherited.
"""

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_FIRST_INHERITED_FD = 3
_SYSTEMD_VARIABLES = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}
)


def notify(state: str) -> None:
    """Send a state line such as `READY=1` to the service manager, if there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError:
            return


def watchdog_period_s() -> float | None:
    """Return half the watchdog limit of this process's unit; None without a watchdog."""
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    if not limit_us.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(limit_us) / 2e6


@dataclass(slots=True)
class Watchdog:
    """Sends WATCHDOG=1 to the service manager, at most once per period."""

    period_s: float | None = field(default_factory=watchdog_period_s)
    monotonic_s: Callable[[], float] = time.monotonic
    _sent_at_s: float = float("-inf")

    def feed(self) -> None:
        """Send a keep-alive if the period is over; call it often."""
        if self.period_s is not None and self.monotonic_s() - self._sent_at_s >= self.period_s:
            notify("WATCHDOG=1")
            self._sent_at_s = self.monotonic_s()


def child_environment() -> dict[str, str]:
    """Return the environment for a child process, without systemd's variables, which are meant for this process."""
    return {name: value for name, value in os.environ.items() if name not in _SYSTEMD_VARIABLES}


def inherited_socket(path: Path | None, kind: socket.SocketKind) -> socket.socket | None:
    """Return an inherited listening Unix socket with this path (any path if None) and kind; each is returned once.

    Do not remove its file: the service manager keeps listening on it across restarts, so that no client is refused.
    """
    for inherited in _inherited():
        if inherited.type != kind or (path is not None and inherited.getsockname() != str(path)):
            continue
        _inherited().remove(inherited)
        inherited.setblocking(False)
        return inherited
    return None


@functools.cache
def _inherited() -> list[socket.socket]:
    """Return the inherited sockets not yet in use, and remove systemd's variables from the environment."""
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    found: list[socket.socket] = []
    if pid != str(os.getpid()) or not count.isdigit():
        return found
    for fd in range(_FIRST_INHERITED_FD, _FIRST_INHERITED_FD + int(count)):
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)
            found.append(socket.socket(fileno=fd))
    return found
