"""Clients that exhaust connections, memory or descriptors: each is disconnected, and other clients are served."""

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with running_daemon(tmp_path_factory.mktemp("hostile-clients")) as daemon:
        yield daemon


def resident_bytes(daemon: DaemonProcess) -> int:
    return int(Path(f"/proc/{daemon.pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.fault(35)
def test_a_client_that_never_reads_is_disconnected_without_using_memory(daemon: DaemonProcess) -> None:
    daemon.status()
    before_bytes = resident_bytes(daemon)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(daemon.socket_path))
        deaf.setblocking(False)
        request = b"GET /v1/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
        is_refused = False

        def ask_on() -> bool:
            nonlocal is_refused
            try:
                deaf.send(request * 100)
            except BlockingIOError:
                is_refused = True  # the daemon reads no more; unanswered requests queue on the client's side
            except (BrokenPipeError, ConnectionResetError):
                return True
            return False

        wait_until(ask_on)
        used_bytes = resident_bytes(daemon) - before_bytes

    assert is_refused
    assert used_bytes < 32 * 2**20
    assert "does not read its responses" in daemon.log
    assert daemon.status()["worker"]["is_alive"]


@pytest.mark.fault(37)
def test_without_free_descriptors_the_daemon_pauses_accepting_and_recovers(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        num_open = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (num_open + 20, num_open + 20))
        crowd = []
        for path, kind in ((daemon.socket_path, socket.SOCK_STREAM), (daemon.clock_socket_path, socket.SOCK_SEQPACKET)):
            for _ in range(40):
                crowd.append(socket.socket(socket.AF_UNIX, kind))
                crowd[-1].connect(str(path))
        wait_until(lambda: "accepting no connections for" in daemon.log or "out of system resource" in daemon.log)
        lines_while_full = len(daemon.log.splitlines())
        for connection in crowd:
            connection.close()

        wait_until(lambda: bool(daemon.status()["worker"]["is_alive"]))

        assert lines_while_full < 60
        assert daemon.is_as_found()
