"""A captured training in virtual time: replays without Python calls, timed by the real recorder on a virtual device.

The pipeline is the demo's: the times and powers of its simulated works. Each rank's graph holds its instructions and
the event nodes of their begins and ends; its durations are set to those of the iteration before each replay, as if the
GPU had taken so long. The job hears only what the recorder reads; clocks are set by the client's own timetables.
"""

import queue
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuenergyd.client.clock_sender import ReplayTimetables
from gpuenergyd.client.plans import prepare
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.recorder import IterationTimes, RecordedIteration
from gpuenergyd.client.timing.replays import CapturedInstructions
from gpuenergyd.core.job.messages import RankReported
from gpuenergyd.core.measurement.telemetry import MeasuredInstruction, RankIteration
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, InstructionKind
from gpuenergyd.core.pipeline.plan import instruction_key
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.daemon.jobs.plan_delivery import change_row
from gpuenergyd.wire.messages import OrderRow, PlanSlice
from gpuenergyd_sim.driver.device_model import blocking_power_w
from gpuenergyd_sim.driver.device_parameters import device_parameters
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import ModelWork, Work
from tests.support.virtual_device import CalledRequest, VirtualDevice, VirtualGraph, VirtualNodeEvent, when_known
from tests.support.waiting import LIMIT_S

MODEL = device_parameters("a100-sxm")
SEND_DELAY_S = 0.001
"""From the begin of a replay to its timetable: the recorder looks every millisecond."""
_LIMIT_S = LIMIT_S


def waiting_power_w(sm_clock_mhz: int) -> float:
    """Return the power of the simulated A100 while it waits for a peer."""
    return blocking_power_w(MODEL, sm_clock_mhz)


def demo_work(num_stages: int) -> dict[tuple[int, InstructionKind], Work]:
    from gpuenergyd_sim.training.gpt_model import simulated_works  # noqa: PLC0415  imports torch

    return {
        (stage, InstructionKind(kind)): ModelWork(MODEL, work)
        for stage in range(num_stages)
        for kind, work in simulated_works(stage, num_stages).items()
    }


class ReplayedRank:
    """One rank's captured step on a device of its own."""

    def __init__(self, order: tuple[Instruction, ...], begin_ns: int, *, drift_ppm: float) -> None:
        self.device = VirtualDevice(drift_ppm=drift_ppm, host_ns=begin_ns)
        self._device_ms_per_ns = (1 + drift_ppm * 1e-6) / 1e6
        self.recorder = DeviceRecorder(self.device, len(order), sleep=self._sleep, mono_s=lambda: 0.0)
        self.timetables = ReplayTimetables()
        self.graph = VirtualGraph()
        self.captured = self._capture([(str(k), m, c) for k, m, c in map(instruction_key, order)])
        self._known: queue.Queue[IterationTimes | None] = queue.Queue()
        self._previous: RecordedIteration | None = None

    def _capture(self, keys: list[OrderRow]) -> CapturedInstructions:
        with self.device.capture(self.graph):
            self.recorder.begin_capture()
            for key in keys:
                self.device.work(1.0)
                slot = self.recorder.begin(key)
                self.device.work(1.0)
                self.recorder.end(slot)
            captured = self.recorder.end_capture()
        assert captured is not None
        assert captured.is_complete
        return captured

    def _sleep(self, time_s: float) -> None:
        """Let time pass, except while the program launches: it is ahead of the device."""
        with self.device.calls():
            self.device.sleep(time_s)

    def replay(self, true: RankIteration) -> IterationTimes | None:
        """Replay an iteration that takes these times; return what was read of the one before, None if it was lost."""
        with self.device.calls():
            self._launch(true)
        first = self._known.get(timeout=_LIMIT_S)
        if first is not None:
            assert self._known.get(timeout=_LIMIT_S) is None
        return first

    def _launch(self, true: RankIteration) -> None:
        previous, self._previous = self._previous, None
        self.recorder.begin_iteration(previous)
        if previous is not None:
            when_known(self.recorder, previous, self._known.put)
        self.recorder.call_when_reached(CalledRequest(lambda: self._known.put(None)))
        self.recorder.replay(self.captured)
        self._set_durations(true)
        self.device.replay(self.graph)
        self._previous = self.recorder.end_iteration()
        last_ns = max(measured.end_ns for measured in true.instructions)
        # What the program launches after the replay.
        self.device.work((true.next_begin_ns - last_ns) * self._device_ms_per_ns)

    def close(self) -> None:
        """End the recorder's thread."""
        self.recorder.close(_LIMIT_S)

    @property
    def num_calls_in_capture(self) -> int:
        """Calls of ours in captures, and nodes of ours in the graph that are no event records."""
        own = len(self.graph.nodes) - sum(isinstance(n, float | VirtualNodeEvent) for n in self.graph.nodes)
        return len(self.device.forbidden_calls) + own

    def _set_durations(self, true: RankIteration) -> None:
        at_ns, nodes = true.begin_ns, iter(range(len(self.graph.nodes)))
        for measured in true.instructions:
            for until_ns in (measured.begin_ns, measured.end_ns):
                self.graph.nodes[next(nodes)] = (until_ns - at_ns) * self._device_ms_per_ns
                next(nodes)
                at_ns = until_ns


@dataclass
class CapturedTraining(VirtualTraining):
    """A training whose ranks replay a captured step."""

    drift_ppm: float = 20.0
    time_error_max_ratio: float = field(default=0.0, init=False)
    """Largest error of a reported time, as a share of its iteration."""
    num_unread: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        begin_ns = self._ns(self.now_s)
        self.replayed = [ReplayedRank(order, begin_ns, drift_ppm=self.drift_ppm) for order in self.schedule.orders]
        self._true: dict[int, RankIteration] = {}

    def close(self) -> None:
        """End all threads."""
        for rank in self.replayed:
            rank.close()

    @property
    def num_calls_in_capture(self) -> int:
        return sum(rank.num_calls_in_capture for rank in self.replayed)

    def _run_pipeline(self) -> tuple[dict[Instruction, tuple[float, float]], float]:
        for r, begin_s in self._begins_s().items():
            # What the replay before has not come to is replaced.
            self.pending[r] = [p for p in self.pending[r] if p.asked_s is None or p.asked_s <= begin_s]
            if self.has_lease and self.changes[r]:
                self._ask_for_all(r, begin_s)
        planned, self.changes = self.changes, ((),) * self.schedule.num_ranks
        try:
            return super()._run_pipeline()
        finally:
            self.changes = planned

    def _ask_for_all(self, r: int, begin_s: float) -> None:
        plan = prepare(PlanSlice("plan", self.epoch, 0, tuple(map(change_row, self.changes[r]))), b"")
        sent_s = begin_s + SEND_DELAY_S
        clocks = self.replayed[r].timetables.clocks(plan, self._ns(begin_s))
        passed = [clock for clock in clocks if clock.at_mono_ns <= self._ns(sent_s)]
        self._ask(r, sent_s, (passed or clocks)[-1].sm_clock_mhz)
        for clock in clocks[len(passed) :]:
            self._ask(r, clock.at_mono_ns / 1e9, clock.sm_clock_mhz)

    def _hear(self, reports: list[RankIteration]) -> None:
        """Replay the iteration on each rank's device, and report what was read of the one before."""
        for true in reports:
            times = self.replayed[true.pp_rank].replay(true)
            before = self._true.get(true.pp_rank)
            self._true[true.pp_rank] = true
            if before is None:
                continue
            if times is None:
                self.num_unread += 1
                continue
            self.replayed[true.pp_rank].timetables.add_replay(before.plan_epoch, times)
            self.feed(RankReported(self._measured(before, times)))

    def _measured(self, true: RankIteration, times: IterationTimes) -> RankIteration:
        """Return the report of an iteration with the times that were read."""
        pairs = [(times.begin_mono_ns, true.begin_ns), (times.next_begin_mono_ns, true.next_begin_ns)]
        instructions = []
        for (*_, begin_ns, end_ns), own in zip(times.instructions, true.instructions, strict=True):
            pairs += [(begin_ns, own.begin_ns), (end_ns, own.end_ns)]
            instructions.append(MeasuredInstruction(own.instruction, begin_ns, end_ns))
        window_ns = true.next_begin_ns - true.begin_ns
        self.time_error_max_ratio = max(
            self.time_error_max_ratio, *(abs(found_ns - true_ns) / window_ns for found_ns, true_ns in pairs)
        )
        return replace(
            true,
            begin_ns=times.begin_mono_ns,
            end_ns=times.end_mono_ns,
            next_begin_ns=times.next_begin_mono_ns,
            instructions=tuple(instructions),
        )


@dataclass(frozen=True, slots=True)
class WholeReplay:
    """A replay of a whole pipeline as one instruction, with one clock for all ranks; powers are of a mean rank."""

    graph: DependencyGraph
    work: Mapping[tuple[int, InstructionKind], Work]

    def time_s(self, sm_clock_mhz: int) -> float:
        times_s = [self.work[i.pp_rank, i.kind].time_s(sm_clock_mhz) for i in self.graph.instructions]
        return timeline(self.graph, times_s).iteration_time_s

    def power_w(self, sm_clock_mhz: int) -> float:
        """Return the mean power of a rank in a replay."""
        works = [self.work[i.pp_rank, i.kind] for i in self.graph.instructions]
        in_all_s = self.graph.num_ranks * self.time_s(sm_clock_mhz)
        busy_s = sum(work.time_s(sm_clock_mhz) for work in works)
        work_j = sum(work.time_s(sm_clock_mhz) * work.power_w(sm_clock_mhz) for work in works)
        return (work_j + waiting_power_w(sm_clock_mhz) * (in_all_s - busy_s)) / in_all_s
