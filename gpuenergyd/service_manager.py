"""What systemd hears from our processes and hands to them: READY, WATCHDOG, STOPPING; sockets it listens on.

The datagrams are those of sd_notify(3), the inherited sockets those of sd_listen_fds(3). Without systemd all of it
does nothing and finds nothing.
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
_ONLY_OURS = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"})


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
    """Return how often the service manager wants to hear from us: half its limit; None when it does not ask."""
    limit_us = os.environ.get("WATCHDOG_USEC", "")
    if not limit_us.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(limit_us) / 2e6


@dataclass(slots=True)
class Watchdog:
    """Tells the service manager that we live, no more often than it asks."""

    period_s: float | None = field(default_factory=watchdog_period_s)
    monotonic_s: Callable[[], float] = time.monotonic
    _fed_at_s: float = float("-inf")

    def feed(self) -> None:
        """Say so if it is time; call it often."""
        if self.period_s is not None and self.monotonic_s() - self._fed_at_s >= self.period_s:
            notify("WATCHDOG=1")
            self._fed_at_s = self.monotonic_s()


def child_environment() -> dict[str, str]:
    """Return the environment for a child: it is not the one that the service manager listens to."""
    return {name: value for name, value in os.environ.items() if name not in _ONLY_OURS}


def inherited_socket(path: Path | None, kind: socket.SocketKind) -> socket.socket | None:
    """Take a listening Unix socket that the service manager opened for us; the first of its kind without a path.

    It is ours to use and not to remove: the manager goes on listening when we are gone, so nobody is refused meanwhile.
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
    """Return the sockets not taken yet; the variables that name them are no child's business."""
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
