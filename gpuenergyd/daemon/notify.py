"""Telling systemd how we are: READY, STOPPING, WATCHDOG. Without systemd it does nothing."""

import os
import socket


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
