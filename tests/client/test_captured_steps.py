"""A rank whose step is captured in a graph: one timetable per replay, times from event nodes, nothing else."""

import os
import queue
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.client.rank import RankClient, RankDescription
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd_sim.driver.device_model import InstructionWork
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.stream import SimulatedStream
from gpuenergyd_sim.training.timers import SimulatedDevice, SimulatedGraph
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank
from tests.client.fake_daemon import FakeDaemon, plan_slice
from tests.support.waiting import LIMIT_S

ORDER = (("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0))
WORK_S = 0.012
CORRECTION_NS = 500_000
"""By which an anchor may shift the end of an iteration."""


class CapturedProgram:
    """A program on a simulated GPU that captures its step, or runs it."""

    def __init__(self, folder: Path, daemon: FakeDaemon, *, expected_order: Any = ORDER) -> None:
        self.daemon = daemon
        self.host = SimulatedHost.create(folder / "world", ["a100-sxm"])
        gpu_uuid = self.host.identities()[0].gpu_uuid
        self.host.attach_process(gpu_uuid, os.getpid())
        self.stream = SimulatedStream(self.host, gpu_uuid, max_launched=64)
        self.device = SimulatedDevice(self.stream)
        self.graph = SimulatedGraph(self.device, self.stream)
        description = RankDescription(
            job_name="captured", run_key="r", gpu_uuid=gpu_uuid, schedule_name="1f1b", num_microbatches=2,
            allow_reorder=True, reorder_refusal="",
        )  # fmt: skip
        self.recorder = DeviceRecorder(self.device, 9)
        self.client = RankClient(description, socket_path=daemon.socket_path, timer=self.recorder)
        self.rank = OrderedRank(self.client, expected_order=expected_order, log_name="rank 0")

    def step(self, order: Any = ORDER) -> None:
        self.rank.begin_step()
        for key in order:
            slot = self.client.begin_instruction(*key)
            self.stream.launch(InstructionWork(0.0, WORK_S, 0.2))
            self.client.end_instruction(slot)
        self.rank.end_step()

    def capture(self, order: Any = ORDER) -> None:
        """Capture the step in the graph."""
        with self.graph.capture():
            self.step(order)

    def replay(self) -> None:
        self.graph.replay()
        self.stream.synchronize()

    def report(self) -> dict[str, Any]:
        """Replay until the daemon has a report; return it."""
        give_up_s = time.monotonic() + LIMIT_S
        while time.monotonic() < give_up_s:
            self.replay()
            with suppress(queue.Empty):  # a replay that a busy host has read too late is not reported
                report: dict[str, Any] = self.daemon.reports.get(timeout=0.2)
                return report
        raise TimeoutError

    def close(self) -> None:
        self.rank.leave()
        self.stream.close()
        self.host.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as running:
        yield running


@pytest.fixture
def program(tmp_path: Path, daemon: FakeDaemon) -> Iterator[CapturedProgram]:
    running = CapturedProgram(tmp_path, daemon)
    yield running
    running.close()


def start_replaying(program: CapturedProgram) -> None:
    """Capture the step and replay until one replay was reported; the first is a start, the second has no end yet."""
    program.capture()
    program.replay()
    program.replay()
    program.report()


def test_each_replay_is_an_iteration_with_the_times_of_its_instructions(program: CapturedProgram) -> None:
    start_replaying(program)
    report = program.report()

    assert report["captured"] == "timetable"
    rows = [tuple(row[:3]) for row in report["instructions"]]
    assert rows == list(ORDER)
    for *_, begin_ns, end_ns in report["instructions"]:
        assert report["begin_mono_ns"] <= begin_ns < end_ns <= report["end_mono_ns"] + CORRECTION_NS
        assert (end_ns - begin_ns) / 1e9 >= 0.9 * WORK_S


def test_a_replay_sends_one_request_with_all_clocks_of_the_plan(program: CapturedProgram, daemon: FakeDaemon) -> None:
    start_replaying(program)
    changes = [("F", 0, 0, 0, 1410), ("F", 1, 0, 0, 1200), ("F", 1, 0, 8_000_000, 1305), ("B", 1, 0, 1_000_000, 1410)]
    daemon.plans = [plan_slice(7, 0, changes)]
    request: ClockRequest | None = None
    while request is None or not request.later:  # on a busy machine a request may be late for all of them
        program.report()
        if not daemon.clock_requests.empty():
            request = daemon.clock_requests.get().request

    assert request.plan_epoch == 7
    instants_ns = [clock.at_mono_ns for clock in request.later]
    assert instants_ns == sorted(instants_ns)
    assert 0 < instants_ns[-1] - request.sent_mono_ns < 1e9
    assert [request.sm_clock_mhz, *(clock.sm_clock_mhz for clock in request.later)][-2:] == [1305, 1410]


def test_an_order_that_is_not_known_is_learned_from_replays(tmp_path: Path, daemon: FakeDaemon) -> None:
    program = CapturedProgram(tmp_path, daemon, expected_order=None)
    program.capture()
    for _ in range(3):
        program.replay()

    assert program.rank.order == ORDER
    assert daemon.registrations.get(timeout=LIMIT_S)["order"] == [list(key) for key in ORDER]
    program.close()


def test_steps_before_the_capture_and_after_it_are_iterations_too(program: CapturedProgram) -> None:
    for _ in range(2):
        program.step()
        program.stream.synchronize()
    program.capture()
    report = program.report()
    assert (report["captured"], len(report["instructions"])) == ("", len(ORDER))
    program.replay()
    assert program.daemon.reports.get(timeout=LIMIT_S)["captured"] == "timetable"
    assert program.client.total_errors == 0


def test_a_step_in_which_a_graph_is_captured_is_no_iteration_and_ends_nothing(program: CapturedProgram) -> None:
    other = SimulatedGraph(program.device, program.stream)
    program.step()
    program.rank.begin_step()
    slot = program.client.begin_instruction(*ORDER[0])
    with other.capture():
        program.stream.launch(InstructionWork(0.0, WORK_S, 0.2))
        hidden = program.client.begin_instruction(*ORDER[1])
        program.client.end_instruction(hidden)
    program.client.end_instruction(slot)
    program.rank.end_step()
    for _ in range(3):
        program.step()

    assert program.rank.is_active
    program.stream.synchronize()
    report = program.daemon.reports.get(timeout=LIMIT_S)
    assert len(report["instructions"]) == len(ORDER)


def test_a_microbatch_captured_before_attaching_is_an_instruction_like_any_other(program: CapturedProgram) -> None:
    forward = SimulatedGraph(program.device, program.stream)
    with forward.capture():
        program.stream.launch(InstructionWork(0.0, WORK_S, 0.2))
    for _ in range(3):
        program.rank.begin_step()
        for key in ORDER:
            slot = program.client.begin_instruction(*key)
            forward.replay()
            program.client.end_instruction(slot)
        program.rank.end_step()

    program.stream.synchronize()
    report = program.daemon.reports.get(timeout=LIMIT_S)
    assert (report["captured"], len(report["instructions"])) == ("", len(ORDER))


def test_a_graph_with_two_steps_is_replayed_alone_with_one_warning(
    program: CapturedProgram, caplog: pytest.LogCaptureFixture
) -> None:
    with program.graph.capture():
        program.step()
        program.step()
    program.replay()
    program.replay()

    assert program.client.iteration_index == -1
    assert [r.message for r in caplog.records if "more than one training step" in r.message]


def test_a_capture_that_raises_is_forgotten(program: CapturedProgram) -> None:
    with program.graph.capture():  # the program handles its error
        program.rank.begin_step()
        program.client.begin_instruction(*ORDER[0])
        program.rank.fail_step()
    start_replaying(program)

    assert program.report()["captured"] == "timetable"


def test_a_recaptured_graph_is_followed_as_it_is_now(program: CapturedProgram) -> None:
    start_replaying(program)
    program.capture()
    program.replay()
    reports = [program.report() for _ in range(2)]

    assert [len(report["instructions"]) for report in reports] == [len(ORDER)] * 2


def test_after_leaving_the_graph_is_replayed_alone(program: CapturedProgram) -> None:
    start_replaying(program)
    program.rank.leave()
    index = program.client.iteration_index
    program.replay()

    assert program.client.iteration_index == index


def test_a_rank_that_sees_only_replays_of_earlier_captures_says_so_at_its_end(
    tmp_path: Path, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    program = CapturedProgram(tmp_path, daemon)
    with program.graph.capture():
        program.stream.launch(InstructionWork(0.0, WORK_S, 0.2))
    program.replay()
    program.close()

    assert [r.message for r in caplog.records if "cuda_graphs.attach(graph)" in r.message]


def test_replays_take_no_plan_with_another_order_and_go_on_in_theirs(
    program: CapturedProgram, daemon: FakeDaemon
) -> None:
    start_replaying(program)
    split = [(kind, m, 0) for m in range(2) for kind in ("F", "I", "W")]
    daemon.plans = [{**plan_slice(7, 0, [("F", 0, 0, 0, 1410)]), "order": split}]
    reports = [program.report() for _ in range(4)]

    assert program.rank.is_active
    assert [len(report["instructions"]) for report in reports] == [len(ORDER)] * 4
    assert all(report["plan_epoch"] != 7 for report in reports)
    assert reports[-1]["reorder_refusal"] == "steps are replays of a captured graph"
