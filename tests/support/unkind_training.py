"""A virtual training on GPUs whose clocks cost something to set: stalls, a driver's queue, latencies with tails.

Time advances from event to event: requests become due, the driver sets one GPU of the host at a time, each call stalls
the work of its GPU, a clock takes effect after a latency drawn for its target and may be reported before it does.
"""

import heapq
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.switching import ObservedSwitch
from gpuenergyd_sim.virtual_training.training import VirtualTraining

_FIRST_LOOK_S = 0.001
_LOOK_FRACTION = 8
"""As the worker: readings every millisecond at first, then at this fraction of the time passed."""


@dataclass(frozen=True, slots=True)
class TargetLatencies:
    """Latency of a change by its target clock: a median for each, log-uniform between two, and rare long tails."""

    min_median_s: float
    max_median_s: float
    spread: float = 0.1
    """Standard deviation of the logarithm of a latency around its median."""
    tail_ratio: float = 0.0
    tail_min_s: float = 0.2
    tail_max_s: float = 0.4
    seed: int = 0

    def median_s(self, sm_clock_mhz: int) -> float:
        share = random.Random(f"{self.seed}/{sm_clock_mhz}").random()
        return float(self.min_median_s * (self.max_median_s / self.min_median_s) ** share)

    def draw_s(self, sm_clock_mhz: int, draws: random.Random) -> float:
        """Return the latency of one change to a clock."""
        if draws.random() < self.tail_ratio:
            return draws.uniform(self.tail_min_s, self.tail_max_s)
        return self.median_s(sm_clock_mhz) * math.exp(draws.gauss(0.0, self.spread))


@dataclass(frozen=True, slots=True)
class UnkindDriver:
    """What setting and reading clocks costs, on all GPUs of a host."""

    latencies: TargetLatencies
    call_s: float = 0.0
    """Time of a set call, in which the driver sets no other GPU."""
    stall_s: float = 0.0
    """Time for which a set call stops the work of its GPU."""
    reported_early_s: float = 0.0
    """How long before its effect a clock is reported."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """A clock change whose effect is watched for, and the looks before and after it is shown, from its return."""

    before_mhz: int
    clock_mhz: int
    returned_s: float
    low_s: float
    high_s: float


@dataclass(slots=True)
class _Gpu:
    """One GPU: its clock, the request that waits for the driver, and the instruction that it runs."""

    clock_mhz: int
    locked_mhz: int
    waiting: tuple[float, int] | None = None
    """Instant since which a request is due, and its clock."""
    request_number: int = 0
    call_number: int = 0
    watched: "_Watched | None" = None
    stalled_until_s: float = 0.0
    node: int | None = None
    left: float = 0.0
    at_s: float = 0.0
    version: int = 0
    """Number of the present forecast of the instruction's end."""


@dataclass
class UnkindTraining(VirtualTraining):
    """A virtual training whose clock changes go through an `UnkindDriver`; all ranks begin a step together."""

    driver: UnkindDriver = field(default_factory=lambda: UnkindDriver(TargetLatencies(0.006, 0.006, 0.0)))
    host_of_rank: Mapping[int, int] = field(default_factory=dict)
    """Hosts other than the first."""

    def __post_init__(self) -> None:
        assert self.after_last_s is None, "all ranks begin together"
        assert self.ceiling_of is None, "not simulated"
        ranks = range(self.schedule.num_ranks)
        self._draws = random.Random(self.seed + 1)
        self._gpus = {r: _Gpu(self.clocks_mhz[0], self.clocks_mhz[0]) for r in ranks}
        self._events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self._num_events = 0
        self._busy_until_s: dict[int, float] = {}
        self.num_calls = 0
        super().__post_init__()
        for gpu in self._gpus.values():
            gpu.at_s = self.now_s

    @cached_property
    def _successors(self) -> list[list[int]]:
        following: list[list[int]] = [[] for _ in self.graph.instructions]
        for v, before in enumerate(self.graph.predecessors):
            for u, _ in before:
                following[u].append(v)
        return following

    def restore(self) -> None:
        """Restore all clocks at once; requests that are still to come are forgotten."""
        self.has_lease = False
        self._events = [event for event in self._events if event[2] in {"start", "end"}]
        heapq.heapify(self._events)
        for r, gpu in self._gpus.items():
            gpu.waiting = None
            gpu.watched = None
            gpu.call_number += 1
            gpu.clock_mhz = gpu.locked_mhz = self.clocks_mhz[0]
            self.clocks[r].record(self._ns(self.now_s), gpu.clock_mhz)

    def _run_pipeline(self) -> tuple[dict[Instruction, tuple[float, float]], float]:
        begins_s = self._begins_s()
        self._starts_s: dict[int, float] = {}
        self._ends_s: dict[int, float] = {}
        self._num_missing = [len(before) for before in self.graph.predecessors]
        self._requests = {
            change.instruction: [c for c in own if c.instruction == change.instruction]
            for own in self.changes
            for change in own
        }
        for v, missing in enumerate(self._num_missing):
            if not missing:
                r = self.graph.instructions[v].pp_rank
                self._push(begins_s[r], "start", v)
        while len(self._ends_s) < len(self.graph.instructions):
            self._next_event()
        self._free_s = {r: gpu.at_s for r, gpu in self._gpus.items()}
        spans = {
            instruction: (self._starts_s[v], self._ends_s[v]) for v, instruction in enumerate(self.graph.instructions)
        }
        return spans, max(self._ends_s.values())

    def _wait_until(self, r: int, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self._next_event()
        self._advance(r, until_s)

    def _push(self, at_s: float, what: str, *numbers: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, what, numbers))

    def _next_event(self) -> None:
        at_s, _, what, numbers = heapq.heappop(self._events)
        match what, numbers:
            case "start", (v,):
                self._start(v, at_s)
            case "end", (r, version):
                if self._gpus[r].version == version:
                    self._end(r, at_s)
            case "due", (r, clock_mhz, request_number):
                if self._gpus[r].request_number == request_number:
                    self._gpus[r].waiting = at_s, clock_mhz
                    self._call_next(self.host_of_rank.get(r, 0), at_s)
            case "returned", (host,):
                self._call_next(host, at_s)
            case "resumed", (r,):
                self._advance(r, at_s)
                self._forecast(r)
            case "effective", (r, clock_mhz, number):
                self._apply_clock(r, clock_mhz, number, at_s)
            case "shown", (r, number):
                watched = self._gpus[r].watched
                if watched is not None and self._gpus[r].call_number == number:
                    self._observe(r, watched, at_s, is_seen=True)

    def _start(self, v: int, at_s: float) -> None:
        instruction = self.graph.instructions[v]
        r = instruction.pp_rank
        gpu = self._gpus[r]
        requests = self._requests.get(instruction, ()) if self.has_lease else ()
        gpu.request_number += bool(requests)  # they replace delayed ones of an earlier instruction
        for change in requests:
            self._push(at_s + change.offset_s, "due", r, change.sm_clock_mhz, gpu.request_number)
        self._advance(r, at_s)
        self._starts_s[v] = at_s
        gpu.node = v
        gpu.left = 1.0 + (self.random.gauss(0, self.noise_ratio) if self.noise_ratio else 0.0)
        self._forecast(r)

    def _end(self, r: int, at_s: float) -> None:
        self._advance(r, at_s)
        gpu = self._gpus[r]
        v, gpu.node = gpu.node, None
        assert v is not None
        self._ends_s[v] = at_s
        begins_s = self._begins_s()
        for w in self._successors[v]:
            self._num_missing[w] -= 1
            if not self._num_missing[w]:
                ready_s = max(self._ends_s[u] + latency_s for u, latency_s in self.graph.predecessors[w])
                self._push(max(ready_s, begins_s[self.graph.instructions[w].pp_rank]), "start", w)

    def _time_s(self, r: int, v: int) -> float:
        instruction, clock_mhz = self.graph.instructions[v], self._gpus[r].clock_mhz
        work = self.work[r, instruction.kind] if self.work_of is None else self.work_of(instruction)
        time_s = work.time_s(clock_mhz) * self.slowdown_of(r, self.iteration_index)
        if self.slow_factor_when_tuned != 1.0 and self._plan_id_is_tuned() and clock_mhz < self.clocks_mhz[0]:
            time_s *= self.slow_factor_when_tuned
        return time_s

    def _advance(self, r: int, until_s: float) -> None:
        """Let a GPU work, stall or wait until an instant, at its present clock."""
        gpu = self._gpus[r]
        if until_s <= gpu.at_s:
            return
        waiting_w = self.waiting_power_w(gpu.clock_mhz)
        if gpu.node is None:
            self._spend(r, waiting_w, gpu.at_s, until_s)
            self._read_clock(r, None, gpu.clock_mhz, gpu.at_s, until_s)
        else:
            works_from_s = min(max(gpu.at_s, gpu.stalled_until_s), until_s)
            self._spend(r, waiting_w, gpu.at_s, works_from_s)
            instruction = self.graph.instructions[gpu.node]
            work = self.work[r, instruction.kind] if self.work_of is None else self.work_of(instruction)
            self._spend(r, work.power_w(gpu.clock_mhz), works_from_s, until_s)
            self._read_clock(r, work, gpu.clock_mhz, gpu.at_s, until_s)
            gpu.left -= (until_s - works_from_s) / self._time_s(r, gpu.node)
        gpu.at_s = until_s

    def _forecast(self, r: int) -> None:
        """Forecast the end of a GPU's instruction at its present clock."""
        gpu = self._gpus[r]
        gpu.version += 1
        if gpu.node is not None and gpu.stalled_until_s <= gpu.at_s:
            self._push(gpu.at_s + max(0.0, gpu.left) * self._time_s(r, gpu.node), "end", r, gpu.version)

    def _call_next(self, host: int, at_s: float) -> None:
        """Let the driver of a host begin its next call: raises first, then what is due longest, as the worker does."""
        if self._busy_until_s.get(host, 0.0) > at_s:
            return
        while True:
            waiting = [
                (gpu.waiting[1] <= gpu.locked_mhz, gpu.waiting[0], r)
                for r, gpu in self._gpus.items()
                if gpu.waiting is not None and self.host_of_rank.get(r, 0) == host
            ]
            if not waiting:
                return
            r = min(waiting)[2]
            gpu = self._gpus[r]
            assert gpu.waiting is not None
            clock_mhz, gpu.waiting = gpu.waiting[1], None
            if clock_mhz != gpu.locked_mhz:
                self._call(r, clock_mhz, at_s)
                if self.driver.call_s:
                    self._busy_until_s[host] = at_s + self.driver.call_s
                    self._push(at_s + self.driver.call_s, "returned", host)
                    return

    def _call(self, r: int, clock_mhz: int, at_s: float) -> None:
        gpu, driver = self._gpus[r], self.driver
        self.num_calls += 1
        self.clocks[r].record_call(self._ns(at_s))
        gpu.call_number += 1
        before_mhz, gpu.locked_mhz = gpu.locked_mhz, clock_mhz
        if driver.stall_s:
            self._advance(r, at_s)
            gpu.stalled_until_s = at_s + driver.stall_s
            self._forecast(r)
            self._push(gpu.stalled_until_s, "resumed", r)
        if gpu.watched is not None:
            self._observe(r, gpu.watched, at_s, is_seen=False)
        settle_s = driver.latencies.draw_s(clock_mhz, self._draws)
        returned_s = at_s + driver.call_s
        low_s, high_s = 0.0, _FIRST_LOOK_S
        while high_s < settle_s - driver.reported_early_s:
            low_s, high_s = high_s, high_s + max(_FIRST_LOOK_S, high_s / _LOOK_FRACTION)
        gpu.watched = _Watched(before_mhz, clock_mhz, returned_s, low_s, high_s)
        self._push(returned_s + settle_s, "effective", r, clock_mhz, gpu.call_number)
        self._push(returned_s + high_s, "shown", r, gpu.call_number)

    def _observe(self, r: int, change: "_Watched", at_s: float, *, is_seen: bool) -> None:
        """Take a clock change for what readings of the clock show, and tell the job of its latency, as the daemon."""
        self._gpus[r].watched = None
        if is_seen:
            self.clocks[r].record(self._ns(change.returned_s + (change.low_s + change.high_s) / 2), change.clock_mhz)
        elif at_s < change.returned_s + _FIRST_LOOK_S:
            self.clocks[r].record(self._ns(change.returned_s), change.clock_mhz)
        if self.assumed_latency_s is None:
            return
        low_s = change.low_s if is_seen else max(0.0, at_s - change.returned_s)
        high_s = change.high_s if is_seen else None
        if self.calibrations[r].observe(
            ObservedSwitch(change.before_mhz, change.clock_mhz, 0.0, self.driver.call_s, low_s, high_s)
        ):
            self.report_gpus()

    def _apply_clock(self, r: int, clock_mhz: int, number: int, at_s: float) -> None:
        gpu = self._gpus[r]
        if number != gpu.call_number:
            return  # a later call has replaced it
        self._advance(r, at_s)
        gpu.clock_mhz = clock_mhz
        self._forecast(r)
