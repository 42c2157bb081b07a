"""The log rate limit: repeated warnings are counted instead of written."""

import logging
import socket
from pathlib import Path

import pytest

from gpuenergyd.client.connection import HttpConnection
from gpuenergyd.daemon.runtime.log_rate_limit import LogRateLimit
from tests.support.daemon_process import running_daemon
from tests.support.virtual_time import VirtualTime
from tests.support.waiting import LIMIT_S, wait_until


@pytest.mark.fault(51)
def test_repeated_warnings_are_counted_and_info_lines_always_pass() -> None:
    clock = VirtualTime()
    guard, log = LogRateLimit(monotonic_s=lambda: clock.mono_ns() / 1e9), logging.getLogger("gpuenergyd.flood")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(guard)
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.INFO)

    def complain(index: int) -> None:
        log.warning("record %d cannot be", index)

    for index in range(500):
        complain(index)
        log.info("job %d joined", index)
    clock.sleep(61.0)
    complain(500)
    log.removeHandler(handler)

    assert sum(line.startswith("job ") for line in lines) == 500
    assert sum(line.startswith("record ") for line in lines) == 21
    assert lines[-1] == "record 500 cannot be (480 similar messages were suppressed)"


@pytest.mark.fault(51)
def test_many_simultaneous_faults_do_not_flood_the_log(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        hostile = daemon.status()["clock_requests"]["num_hostile"]
        for _ in range(60):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as record:
                record.connect(str(daemon.clock_socket_path))
                record.send(b"\0" * 48)
            with socket.socket(socket.AF_UNIX) as noise:
                noise.settimeout(LIMIT_S)
                noise.connect(str(daemon.socket_path))
                noise.sendall(b"\x16\x03\x01\r\n\r\n")
                noise.recv(1)
            connection = HttpConnection(str(daemon.socket_path))
            connection.request("POST", "/v1/ranks", b"{" * 1000, limit_s=LIMIT_S)
            connection.close()
        wait_until(lambda: daemon.status()["clock_requests"]["num_hostile"] == hostile + 60)
        num_lines = len(daemon.log.splitlines())

    assert num_lines < 100
