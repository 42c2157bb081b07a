"""systemd notifications: ready once the socket is served, watchdog while running, stopping at the end."""

import os
import socket
from pathlib import Path

import pytest

from gpuenergyd.service_manager import notify, watchdog_period_s
from tests.support.daemon_process import DaemonProcess
from tests.support.waiting import LIMIT_S


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """Return the socket that a service manager would listen on."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.settimeout(LIMIT_S)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    return listener


def test_ready_watchdog_and_stopping_are_notified_in_this_order(
    manager: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    daemon = DaemonProcess(tmp_path / "daemon")
    daemon.process = daemon.launch()

    first = manager.recv(100)
    is_served = daemon.is_ready()
    alive = [manager.recv(100) for _ in range(3)]
    assert daemon.stop() == 0
    rest = [manager.recv(100)]
    while rest[-1] == b"WATCHDOG=1":
        rest.append(manager.recv(100))
    manager.close()

    assert first == b"READY=1"
    assert is_served
    assert alive == [b"WATCHDOG=1"] * 3
    assert rest[-1] == b"STOPPING=1"


def test_an_abstract_notify_socket_works(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0gpuenergyd-test-{os.getpid()}")
        listener.settimeout(LIMIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@gpuenergyd-test-{os.getpid()}")

        notify("READY=1")

        assert listener.recv(100) == b"READY=1"


def test_without_a_service_manager_notifications_are_no_ops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")


@pytest.mark.parametrize(
    ("limit_us", "pid", "period_s"),
    [(None, None, None), ("2000000", None, 1.0), ("2000000", "1", None), ("often", None, None)],
)
def test_the_watchdog_period_is_half_the_limit_for_this_process_only(
    monkeypatch: pytest.MonkeyPatch, limit_us: str | None, pid: str | None, period_s: float | None
) -> None:
    for name, value in (("WATCHDOG_USEC", limit_us), ("WATCHDOG_PID", pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)

    assert watchdog_period_s() == period_s
