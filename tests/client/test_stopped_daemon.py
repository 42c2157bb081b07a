"""Training continues while the daemon is stopped (SIGSTOP), and reports follow later."""

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.wire.messages import OrderRow
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon, plan_slice
from tests.support.daemon_process import running_daemon, training
from tests.support.waiting import wait_until

ORDER: tuple[OrderRow, ...] = (("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0))
NUM_STEPS = 400


def be_the_daemon(folder: Path, pipe: Connection) -> None:
    with FakeDaemon(folder) as daemon:
        daemon.plans = [plan_slice(1, 0, [(kind, m, c, 0, 1200) for kind, m, c in ORDER])]
        pipe.send("ready")
        num_dropped, newest_index = 0, -1
        while pipe.recv() == "what was reported?":
            while not daemon.reports.empty():
                report = daemon.reports.get()
                num_dropped += report["num_records_dropped"]
                newest_index = max(newest_index, report["iteration_index"])
            pipe.send((num_dropped, newest_index))


@contextmanager
def daemon_elsewhere(folder: Path) -> Iterator[tuple[int, Connection]]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=be_the_daemon, args=(folder, theirs))
    process.start()
    assert process.pid is not None
    try:
        assert ours.poll(WAIT_LIMIT_S)
        ours.recv()
        yield process.pid, ours
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()


def state_of(pid: int) -> str:
    """Return the kernel's letter for what a process does: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


@pytest.fixture
def blocking_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every socket call of the training thread, which is this one, that could wait for a peer."""
    seen: list[str] = []
    training_thread = threading.get_ident()

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(socket.socket, name)

        def call(connected: socket.socket, *args: Any) -> Any:
            if threading.get_ident() == training_thread and connected.getblocking():
                seen.append(name)
            return original(connected, *args)

        return call

    class Watched(socket.socket):
        pass

    for name in ("connect", "recv", "recv_into", "send", "sendall"):
        setattr(Watched, name, watched(name))
    monkeypatch.setattr(socket, "socket", Watched)
    return seen


def step(client: RankClient, *, in_the_middle: Callable[[], None] = lambda: None) -> tuple[OrderRow, ...]:
    client.begin_iteration()
    for position, (kind, microbatch_index, chunk_index) in enumerate(ORDER):
        slot = client.begin_instruction(kind, microbatch_index, chunk_index)
        if position == len(ORDER) // 2:
            in_the_middle()
        client.end_instruction(slot)
    return client.end_iteration()


def step_and_ask(client: RankClient, pipe: Connection) -> tuple[int, int]:
    """Run a step; return how many records all reports so far say were dropped, and the newest reported iteration."""
    step(client)
    pipe.send("what was reported?")
    assert pipe.poll(WAIT_LIMIT_S)
    output: tuple[int, int] = pipe.recv()
    return output


@pytest.mark.kill
def test_steps_continue_without_waiting_while_the_daemon_is_stopped(tmp_path: Path, blocking_calls: list[str]) -> None:
    socket_path = str(tmp_path / "daemon.sock")
    with daemon_elsewhere(tmp_path) as (pid, pipe):
        rank = RankDescription(job_name="gpt", run_key="r", gpu_uuid="GPU-1", schedule_name="gpipe", num_microbatches=2)
        client = RankClient(rank, order=ORDER, socket_path=socket_path)
        while client.plan_epoch != 1:
            step(client)
        blocking_calls.clear()
        orders = [step(client, in_the_middle=lambda: os.kill(pid, signal.SIGSTOP))]
        orders += [step(client) for _ in range(NUM_STEPS)]
        state_after = state_of(pid)
        waited_in = list(blocking_calls)

        last_stopped_index = client.iteration_index
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: step_and_ask(client, pipe)[1] > last_stopped_index)
        num_dropped, _ = step_and_ask(client, pipe)
        client.release()

    assert state_after == "T"
    assert orders == [ORDER] * (1 + NUM_STEPS)
    assert waited_in == []
    assert client.total_errors == 0
    assert num_dropped > 0


@pytest.mark.kill
def test_a_tuned_pipeline_finishes_while_the_daemon_is_stopped(tmp_path: Path) -> None:
    arguments = ("--policy", "uniform")
    with running_daemon(tmp_path, kind=WorldKind.KIND) as daemon, training(daemon, arguments=arguments) as run:
        wait_until(daemon.is_lowered)

        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert run.finish() == 0
            state_after = state_of(daemon.pid)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        wait_until(lambda: daemon.job() is None)

        assert state_after == "T"
        assert daemon.is_as_found()
