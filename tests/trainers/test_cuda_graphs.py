"""Graphs attached as a whole: before or after their capture, each replay is an iteration with one clock."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd_sim.driver.device_model import InstructionWork
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.stream import SimulatedStream
from gpuenergyd_sim.training.timers import SimulatedDevice, SimulatedGraph
from gpuenergyd_trainers.cuda_graphs import GraphHandle, attach
from tests.client.fake_daemon import FakeDaemon, plan_slice
from tests.support.waiting import LIMIT_S

WORK = InstructionWork(0.0, 0.01, 0.2)


class Program:
    """A program that captures its step in one graph and replays it."""

    def __init__(self, folder: Path, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.host = SimulatedHost.create(folder / "world", ["a100-sxm"])
        self.gpu_uuid = self.host.identities()[0].gpu_uuid
        self.host.attach_process(self.gpu_uuid, os.getpid())
        self.stream = SimulatedStream(self.host, self.gpu_uuid, max_launched=64)
        self.device = SimulatedDevice(self.stream)
        self.graph = SimulatedGraph(self.device, self.stream)

    def capture(self) -> None:
        with self.graph.capture():
            self.stream.launch(WORK)
            self.stream.launch(WORK)

    def attach(self) -> GraphHandle:
        return attach(
            self.graph,
            job="replays",
            run_key="r",
            gpu_uuid=self.gpu_uuid,
            socket_path=self.daemon.socket_path,
            device=self.device,
        )

    def replay(self, times: int) -> None:
        """Replay the step so often."""
        for _ in range(times):
            self.graph.replay()
            self.stream.synchronize()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    with FakeDaemon(tmp_path) as daemon:
        running = Program(tmp_path, daemon)
        yield running
        running.stream.close()
        running.host.close()


@pytest.mark.parametrize("is_captured_first", [True, False])
def test_each_replay_is_an_iteration_whether_captured_before_or_after(
    program: Program,
    is_captured_first: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    if is_captured_first:
        program.capture()
    handle = program.attach()
    if not is_captured_first:
        program.capture()
    program.replay(3)

    reports = [program.daemon.reports.get(timeout=LIMIT_S) for _ in range(2)]
    handle.detach()
    for report in reports:
        (row,) = report["instructions"]
        assert row[:3] == ["F", 0, 0]
        assert report["captured"] == "one clock"
        assert (report["end_mono_ns"] - report["begin_mono_ns"]) / 1e9 >= 2 * 0.9 * WORK.compute_time_s
    assert handle.num_errors == 0


def test_a_plan_sets_one_clock_at_the_begin_of_a_replay(program: Program) -> None:
    program.capture()
    handle = program.attach()
    program.daemon.plans = [plan_slice(3, 0, [("F", 0, 0, 0, 1200)])]
    program.replay(3)
    program.daemon.reports.get(timeout=LIMIT_S)
    while program.daemon.clock_requests.empty():
        program.replay(1)
        program.daemon.reports.get(timeout=LIMIT_S)

    request = program.daemon.clock_requests.get().request
    handle.detach()
    assert (request.sm_clock_mhz, request.later, request.plan_epoch) == (1200, (), 3)


def test_after_detaching_the_graph_is_replayed_alone(program: Program) -> None:
    program.capture()
    handle = program.attach()
    program.replay(1)
    handle.detach()
    program.replay(2)

    assert not handle.is_attached
    assert program.device.graphs.num_unknown_replays == 2


def test_a_second_attach_returns_the_handle_of_the_first_and_says_so_once(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    handle = program.attach()

    assert program.attach() is handle
    assert program.attach() is handle
    assert len([r for r in caplog.records if "is attached already" in r.getMessage()]) == 1
    handle.detach()
    again = program.attach()
    assert again is not handle
    assert again.is_attached
    again.detach()


def test_a_replay_that_raises_is_not_reported_and_the_error_passes_through(program: Program) -> None:
    handle = program.attach()

    def failing() -> None:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        program.device.graphs.replay(program.graph, failing)
    handle.detach()
    assert program.daemon.reports.empty()


def test_processes_of_one_host_replay_together_as_ranks_of_one_stage(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    handle = program.attach()
    registration = program.daemon.registrations.get(timeout=LIMIT_S)
    handle.detach()

    assert (registration["stage_rank"], registration["num_stage_ranks"]) == (2, 4)
    assert (registration["dp_rank"], registration["num_dp_ranks"], registration["pp_rank"]) == (0, 1, 0)


def test_processes_on_several_hosts_are_replicas(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    handle = program.attach()
    registration = program.daemon.registrations.get(timeout=LIMIT_S)
    handle.detach()

    assert (registration["dp_rank"], registration["num_dp_ranks"]) == (5, 8)
    assert registration["num_stage_ranks"] == 1


def test_without_a_device_the_graph_stays_as_it_is_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    handle = attach(object(), job="nowhere")

    assert not handle.is_attached
    handle.pause()
    handle.detach()
    assert [r.message for r in caplog.records if "the graph cannot be joined" in r.message]
