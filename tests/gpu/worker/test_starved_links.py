"""Both ends of the link on a starved host: what arrived meanwhile is read before the other counts as dead."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link import client
from gpuenergyd.gpu.link.codec import encode
from gpuenergyd.gpu.link.messages import Message, Ping, Samples, WorkerCounters
from gpuenergyd.gpu.worker import daemon_connection
from gpuenergyd.gpu.worker.daemon_connection import DaemonConnection
from gpuenergyd.silence import Silence
from tests.support.worker_link import WorkerLink
from tests.support.worker_site import Received

COUNTERS = WorkerCounters(*(0 for _ in WorkerCounters.__dataclass_fields__))


class Clock:
    """The time that the silences of a test see, on a host where no process waits for a CPU."""

    now_s = 0.0

    def silence(self, pid: int | None) -> Silence:
        return Silence(pid, 6.0, lambda: self.now_s, lambda _: 0.0)


@pytest.mark.fault(61)
def test_a_reply_that_arrived_behind_many_samples_while_the_daemon_could_not_run_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, received = Clock(), Received()
    monkeypatch.setattr(client, "Silence", clock.silence)

    async def pass_time(_: set[asyncio.Future[Message]], *, timeout: float) -> None:  # noqa: ASYNC109  of asyncio.wait
        clock.now_s += timeout

    monkeypatch.setattr(asyncio, "wait", pass_time)

    async def scenario() -> tuple[WorkerCounters, str]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            link = WorkerLink(ours, received)
            for _ in range(20):
                theirs.send(encode(Samples(())))
            theirs.send(encode(COUNTERS, 1))
            counters = await link.ping()
            with pytest.raises(GpuError) as dead:
                await link.ping()
            await link.close()
            return counters, str(dead.value)

    counters, dead = asyncio.run(scenario())

    assert counters == COUNTERS
    assert dead == "the GPU worker did not reply to Ping within 5 s"
    assert not received.lost


@pytest.mark.fault(61)
def test_a_message_that_arrived_while_the_worker_could_not_run_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(daemon_connection, "Silence", clock.silence)
    worker = DaemonConnection(
        tmp_path / "link",
        {os.getuid()},
        on_message=lambda _id, _message, _fds: None,
        on_lost=lambda: None,
        silence_limit_s=10.0,
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
        daemon.connect(str(tmp_path / "link"))
        worker.serve(1.0)
        daemon.send(encode(Ping(), 1))
        clock.now_s += 20.0
        worker.serve(1.0)
        was_connected = worker.is_connected
        clock.now_s += 10.5
        worker.serve(0.0)
        is_connected = worker.is_connected
    worker.close()
    for open_until_the_process_ends in (worker._listener, worker._wake_in, worker._wake_out, worker._selector):
        open_until_the_process_ends.close()

    assert was_connected
    assert not is_connected
    assert "no heartbeat from the daemon for 10 s" in capfd.readouterr().err
