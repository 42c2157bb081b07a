"""A training run in virtual time: the real job state machine and a real policy, around a pipeline that is arithmetic.

Nothing waits and nothing is random unless asked for, so a run of a hundred iterations takes as long as the policy does.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from gpuenergyd.core.distributed.pace import PaceEstimator
from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    AskPolicy,
    Command,
    Event,
    GpuViewChanged,
    IterationObserved,
    LeaseGpus,
    ObserveIteration,
    PlanDecided,
    PolicyFailed,
    RankChangedMicrobatches,
    RankJoined,
    RankReported,
    RestoreGpus,
    SendPlan,
)
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.iteration_observation import observe_iteration
from gpuenergyd.core.measurement.stages import stage_clocks, stage_energy
from gpuenergyd.core.measurement.telemetry import (
    ClockHistory,
    EnergyCounter,
    MeasuredInstruction,
    RankIteration,
)
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, dependency_graph
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.reorder import RankMemory, ReorderOffer
from gpuenergyd.core.pipeline.switching import ObservedSwitch, SwitchCalibration, constant_latency
from gpuenergyd.core.policy_api.policy import ClockPolicy, GpuView, JobView, Lever
from gpuenergyd.core.policy_api.target import PerformanceTarget

CLOCKS_MHZ = tuple(range(1410, 209, -15))


class Work(Protocol):
    """What one kind of instruction is on one rank, whatever it really depends on."""

    def time_s(self, sm_clock_mhz: int) -> float:
        """Return how long it takes at a clock."""
        ...

    def power_w(self, sm_clock_mhz: int) -> float:
        """Return what it draws at a clock."""
        ...


def a100_power_w(active_w_per_mhz: float, sm_clock_mhz: int) -> float:
    """Return the power of an A100-SXM (published GPT-3 tables): 34.6 W static, knee at 1104 MHz, 1.213 V ratio."""
    voltage = 1 + 0.213 * max(0.0, sm_clock_mhz - 1104) / (1410 - 1104)
    return 34.6 + active_w_per_mhz * sm_clock_mhz * voltage**2


@dataclass(frozen=True, slots=True)
class A100Work:
    """Time parts at the maximum clock; watts per MHz of SMs that are busy all the time."""

    memory_time_s: float
    compute_time_s: float
    power_w_per_mhz: float

    def time_s(self, sm_clock_mhz: int) -> float:
        """Return how long it takes at a clock."""
        return self.memory_time_s + self.compute_time_s * CLOCKS_MHZ[0] / sm_clock_mhz

    def power_w(self, sm_clock_mhz: int) -> float:
        """Return what it draws at a clock."""
        active_ratio = self.compute_time_s * CLOCKS_MHZ[0] / sm_clock_mhz / self.time_s(sm_clock_mhz)
        return a100_power_w(active_ratio * self.power_w_per_mhz, sm_clock_mhz)


def a100_waiting_power_w(sm_clock_mhz: int) -> float:
    """Return the power while waiting for a peer: the published 83.64 W at the top, falling with the clock (assumed)."""
    return a100_power_w(0.0236, sm_clock_mhz)


def a100_stages(weights: Sequence[float], *, scale: float = 1.0) -> dict[tuple[int, InstructionKind], Work]:
    """Return the work of stages: 50 ms forward and 93 ms backward at the top clock, times weight and scale."""
    return {
        (rank, kind): A100Work(memory_s * weight * scale, compute_s * weight * scale, watts)
        for rank, weight in enumerate(weights)
        for kind, memory_s, compute_s, watts in (
            (InstructionKind.F, 0.0120, 0.0382, 0.25),
            (InstructionKind.B, 0.0270, 0.0660, 0.27),
        )
    }


_LOOK_EVERY_S = 0.001


@dataclass(frozen=True, slots=True)
class _Pending:
    """A clock on its way; restores are asked for by nobody."""

    effective_s: float
    clock: int
    asked_s: float | None = None


@dataclass
class VirtualTraining:
    """Runs a job iteration by iteration; `history` holds (iteration time, energy, plan id) of each."""

    schedule: Schedule
    work: Mapping[tuple[int, InstructionKind], Work]
    policy: ClockPolicy
    max_slowdown_ratio: float = 0.0
    switch_latency_s: float = 0.006
    lower_latency_s: float | None = None
    """The same for reductions; None: as raises."""
    assumed_latency_s: float | None = None
    """What a policy is told of latency until enough changes were seen; None: the truth, from the start."""
    latency_spread_ratio: float = 0.0
    noise_ratio: float = 0.0
    communication_latency_s: float = 0.001
    step_overhead_s: float = 0.02
    after_last_s: tuple[float, ...] | None = None
    """By rank, from its last instruction to its next step; None: all begin together, an overhead after the last."""
    rules: JobRules = field(default_factory=JobRules)
    seed: int = 0
    waiting_power_w: Callable[[int], float] = a100_waiting_power_w
    clocks_mhz: tuple[int, ...] = CLOCKS_MHZ
    model_name: str = "A100 (virtual)"
    energy_noise_ratio: float = 0.0
    """Relative error of the energy that a counter shows for one iteration."""
    counter_period_s: float = 0.0
    """Counters show only the energy of the last instant of this grid; 0: exact at every boundary."""
    slowdown_of: Callable[[int, int], float] = lambda _rank, _iteration: 1.0
    """What else makes a rank slower, by rank and iteration: drift, throttling, a neighbour."""
    ceiling_of: Callable[[int, int], int] | None = None
    """The clock that a rank's GPU does not exceed in an iteration, whatever it is asked for: hot, or short of power."""
    work_of: Callable[[Instruction], Work] | None = None
    """What single instructions are, where the chunks of a rank differ; then `work` is not asked."""
    slow_factor_when_tuned: float = 1.0
    """A pipeline that lies: everything takes this much longer below the top clock than its first iterations showed."""

    thinking_iterations: int = 0
    """How many iterations the policy takes to answer."""

    num_dp_ranks: int = 1
    """How many processes a plain loop has."""
    num_stage_ranks: int = 1
    """How many equal ranks, with equal GPUs, each stage has; `history` holds the energy of one of them."""

    levers: frozenset[Lever] = frozenset({Lever.CLOCKS})
    """What plans may set."""

    power_limit_range_w: tuple[float, float] | None = None
    """Of each GPU: a power limit lowers the clock to the highest one at which every kind of instruction fits."""
    power_profiles: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """By workload power profile that each GPU offers: what it multiplies times and powers of work with."""
    foreign_power_profiles: tuple[int, ...] = ()
    """Those that another program has requested; `report_gpus` tells the job of a change."""
    reorder: ReorderOffer = field(default_factory=ReorderOffer)
    """What the ranks say about other orders of instructions when they join."""
    memory_of: Callable[[int, Schedule], RankMemory | None] = lambda _rank, _schedule: None
    """What a rank reports of its memory after an iteration in an order."""

    waits_in_last_instruction: bool = False
    """Whether waiting for other replicas shows as a long last backward, or as time after it."""

    def __post_init__(self) -> None:
        self._answer_at: tuple[int, JobView] | None = None
        ranks = self.schedule.num_ranks
        self.random = random.Random(self.seed)
        self.has_replicas = False
        self.on_block: Callable[[int], None] | None = None
        """Called with the first iteration of a block at full speed."""
        self.least_overhead_s: float | None = None
        self.running = self.schedule
        """The schedule of the present iteration, whose orders a plan may bring."""
        self._schedule_of: dict[int, Schedule] = {}
        self.graph = dependency_graph(self.schedule, communication_latency_s=self.communication_latency_s)
        self.commands: list[Command] = []
        self.history: list[tuple[float, float, str | None]] = []
        self.now_s = 100.0
        self.iteration_index = 0
        self._after_rank_0_s = dict.fromkeys(range(ranks), 0.0)
        self.clocks = {r: ClockHistory(self.clocks_mhz[0]) for r in range(ranks)}
        self.counters = {r: EnergyCounter() for r in range(ranks)}
        self.total_j = dict.fromkeys(range(ranks), 1000.0)
        self.pending: dict[int, list[_Pending]] = {r: [] for r in range(ranks)}
        prior = constant_latency(self.switch_latency_s if self.assumed_latency_s is None else self.assumed_latency_s)
        self.calibrations = dict.fromkeys(range(ranks), SwitchCalibration(self.clocks_mhz[0], prior))
        self.clock_now = dict.fromkeys(range(ranks), self.clocks_mhz[0])
        self.ceilings = dict.fromkeys(range(ranks), self.clocks_mhz[0])
        self.slices: list[tuple[int, int, str, tuple[tuple[ClockChange, ...], ...]]] = []
        self.power_limits: list[tuple[int, dict[int, float]]] = []
        self.profiles: list[tuple[int, dict[int, int]]] = []
        self._spans: dict[Instruction, tuple[float, float]] = {}
        self._last_total_j = dict(self.total_j)
        self._error_j = dict.fromkeys(range(ranks), 0.0)
        self._iteration_error = dict.fromkeys(range(ranks), 0.0)
        self._unheard: list[RankIteration] = []
        self._observed: tuple[RankIteration, ...] = ()
        self.epoch = 0
        self.has_lease = False
        self.changes: tuple[tuple[ClockChange, ...], ...] = ((),) * ranks
        for r in range(ranks):
            self.counters[r].record(self._ns(self.now_s), self.total_j[r])
        self.job = Job(
            JobDescription(
                job_id="job-1",
                job_name="virtual",
                num_pp_ranks=ranks,
                schedule_name=self.schedule.name,
                num_microbatches=self.schedule.num_microbatches,
                num_chunks=self.schedule.num_chunks,
                policy="under-test",
                target=PerformanceTarget(max_slowdown_ratio=self.max_slowdown_ratio),
                num_dp_ranks=self.num_dp_ranks,
                num_stage_ranks=self.num_stage_ranks,
            ),
            self.rules,
        )
        for r, order in enumerate(self.schedule.orders):
            for k in range(self.num_stage_ranks):
                self.feed(RankJoined(r, order, self._gpu(r), k, self.reorder))

    @property
    def pace(self) -> PaceEstimator:
        """The gauge of the replica's own pace."""
        return self.job.knowledge.pace

    def _gpu(self, r: int) -> GpuView:
        latency = self.calibrations[r].latency
        return GpuView(
            f"GPU-{r}",
            self.model_name,
            self.clocks_mhz,
            latency.raise_s,
            switching=latency,
            power_limit_range_w=self.power_limit_range_w,
            power_profiles=tuple(sorted(self.power_profiles)),
            foreign_power_profiles=self.foreign_power_profiles,
        )

    def feed(self, event: Event) -> None:
        """Give the job an event and carry out what it commands, as the daemon's shell would."""
        queue = list(self.job.handle(event))
        while queue:
            command = queue.pop(0)
            self.commands.append(command)
            match command:
                case ObserveIteration():
                    observation, spans = observe_iteration(
                        ranks=command.ranks,
                        graph=self.job.graph_under(command.plan_id),
                        clocks={r: stage_clocks([own] * self.num_stage_ranks) for r, own in self.clocks.items()},
                        counters={r: stage_energy([own] * self.num_stage_ranks) for r, own in self.counters.items()},
                        plan_id=command.plan_id,
                        is_regular=command.is_regular,
                        has_replicas=self.has_replicas,
                        previous=self._observed,
                    )
                    self._observed = command.ranks
                    event = IterationObserved(observation, 0, spans, self.least_overhead_s)
                    queue += self.job.handle(event)
                case AskPolicy():
                    if self.thinking_iterations:
                        self._answer_at = self.iteration_index + self.thinking_iterations, command.view
                    else:
                        queue += self.job.handle(self._answer(command.view))
                case SendPlan(plan=plan):
                    if command.num_iterations is not None and self.on_block is not None:
                        self.on_block(command.apply_at_iteration)
                    changes = tuple(plan.changes_of(r) for r in range(self.schedule.num_ranks))
                    self.slices.append((command.apply_at_iteration, command.plan_epoch, plan.plan_id, changes))
                    self.power_limits.append((command.apply_at_iteration, dict(plan.power_limits_w)))
                    self.profiles.append((command.apply_at_iteration, dict(plan.power_profiles)))
                    self._schedule_of[command.plan_epoch] = plan.schedule(self.schedule)
                case RestoreGpus():
                    self.restore()
                case LeaseGpus():
                    self.has_lease = True
                case _:
                    pass

    def _answer(self, view: JobView) -> Event:
        view = replace(
            view,
            can_set_clocks=Lever.CLOCKS in self.levers,
            can_set_power_limits=Lever.POWER_LIMITS in self.levers,
            can_set_power_profiles=Lever.POWER_PROFILES in self.levers,
        )
        try:
            return PlanDecided(self.policy.next_plan(view))
        except Exception as error:  # noqa: BLE001  what the policy host does
            return PolicyFailed(repr(error))

    def restore(self) -> None:
        """Restore all clocks; without a lease the worker refuses clock requests."""
        self.has_lease = False
        self.power_limits.clear()
        self.profiles.clear()
        for r in self.pending:
            self.pending[r] = [_Pending(self.now_s, self.clocks_mhz[0])]

    def change_schedule(self, schedule: Schedule) -> None:
        """Train on with another number of microbatches: the ranks report their last iteration, and register again."""
        self._hear([])
        self._observed = ()
        self.schedule = schedule
        self.graph = dependency_graph(schedule, communication_latency_s=self.communication_latency_s)
        self.slices, self.epoch, self.changes = [], 0, ((),) * schedule.num_ranks
        for r, order in enumerate(schedule.orders):
            for k in range(self.num_stage_ranks):
                self.feed(RankChangedMicrobatches(r, order, schedule.num_microbatches, k))

    def run(self, num_iterations: int) -> None:
        """Train for so many iterations."""
        for _ in range(num_iterations):
            self.finish_iteration(self.begin_iteration())

    def begin_iteration(self) -> float:
        """Run the pipeline once; return when its last instruction ends, in seconds of virtual time."""
        index = self.iteration_index
        if self._answer_at is not None and self._answer_at[0] <= index:
            view, self._answer_at = self._answer_at[1], None
            self.feed(self._answer(view))
        for apply_at, epoch, _, changes in self.slices:
            if apply_at <= index:
                self.epoch, self.changes = epoch, changes
        self._follow(self._schedule_of.get(self.epoch, self.schedule))
        for r in self._iteration_error:
            self._iteration_error[r] = self.random.gauss(0, self.energy_noise_ratio) if self.energy_noise_ratio else 0.0
        if self.ceiling_of is not None or self.power_limit_range_w is not None:
            for r, before in self.ceilings.items():
                self.ceilings[r] = self._ceiling_mhz(r, index)
                if min(before, self.clock_now[r]) != min(self.ceilings[r], self.clock_now[r]):
                    self.clocks[r].record(self._ns(self.now_s), min(self.ceilings[r], self.clock_now[r]))
        self._spans, end_s = self._run_pipeline()
        return end_s

    def _ceiling_mhz(self, r: int, index: int) -> int:
        """Return the clock that a rank's GPU does not exceed, by its state and its power limit."""
        ceiling = self.clocks_mhz[0] if self.ceiling_of is None else self.ceiling_of(r, index)
        limits = [limits_w for apply_at, limits_w in self.power_limits if apply_at <= index]
        limit_w = limits[-1].get(r) if limits else None
        if limit_w is None:
            return ceiling
        own = [work for (rank, _), work in self.work.items() if rank == r]
        fitting = [mhz for mhz in self.clocks_mhz if max(work.power_w(mhz) for work in own) <= limit_w]
        return min(ceiling, fitting[0] if fitting else self.clocks_mhz[-1])

    def _profile_factors(self, r: int) -> tuple[float, float]:
        """Return what the power profile of a rank's GPU multiplies times and powers with."""
        profiles = [own for apply_at, own in self.profiles if apply_at <= self.iteration_index]
        return self.power_profiles.get(profiles[-1].get(r, -1), (1.0, 1.0)) if profiles else (1.0, 1.0)

    def _follow(self, schedule: Schedule) -> None:
        """Run the next iteration in this order."""
        if schedule.orders != self.running.orders:
            self.running = schedule
            self.graph = dependency_graph(schedule, communication_latency_s=self.communication_latency_s)

    def finish_iteration(self, end_s: float) -> None:
        """End the iteration once all replicas have come as far, at `end_s`, and report it."""
        index, spans, begins_s = self.iteration_index, self._spans, self._begins_s()
        if self.waits_in_last_instruction:
            last = max(spans, key=lambda instruction: spans[instruction][1])
            spans[last] = (spans[last][0], max(end_s, spans[last][1]))
        reports = []
        ends_s = dict.fromkeys(begins_s, end_s)
        nexts_s = dict.fromkeys(begins_s, end_s + self.step_overhead_s)
        if self.after_last_s is not None:
            ends_s = dict(self._free_s)
            nexts_s = {r: ends_s[r] + own_s for r, own_s in enumerate(self.after_last_s)}
        for r, order in enumerate(self.running.orders):
            self._wait_until(r, nexts_s[r], spans)
            if not self.counter_period_s:
                self.counters[r].record(self._ns(nexts_s[r]), self._shown_j(r, self.total_j[r]))
            reports.append(
                RankIteration(
                    pp_rank=r,
                    iteration_index=index,
                    plan_epoch=self.epoch,
                    begin_ns=self._ns(begins_s[r]),
                    end_ns=self._ns(ends_s[r]),
                    next_begin_ns=self._ns(nexts_s[r]),
                    instructions=tuple(
                        MeasuredInstruction(i, self._ns(spans[i][0]), self._ns(spans[i][1])) for i in order
                    ),
                    memory=self.memory_of(r, self.running),
                )
            )
        energy_j = sum(self.total_j.values())
        self.history.append(
            (nexts_s[0] - begins_s[0], energy_j - getattr(self, "_energy_before_j", 4000.0), self._plan_id())
        )
        self._energy_before_j = energy_j
        self.now_s = nexts_s[0]
        self._after_rank_0_s = {r: next_s - self.now_s for r, next_s in nexts_s.items()}
        self.iteration_index += 1
        self._hear(reports)

    def _hear(self, reports: list[RankIteration]) -> None:
        """Report the iteration before: only while the next one runs have the counters moved past its end."""
        for report in self._unheard:
            for k in range(self.num_stage_ranks):
                self.feed(RankReported(replace(report, stage_rank=k)))
        self._unheard = reports

    def _plan_id(self) -> str | None:
        return next((plan_id for _, epoch, plan_id, _ in self.slices if epoch == self.epoch), None)

    def _begins_s(self) -> dict[int, float]:
        """Return when each rank begins this iteration."""
        return {r: self.now_s + after_s for r, after_s in self._after_rank_0_s.items()}

    def _run_pipeline(self) -> tuple[dict[Instruction, tuple[float, float]], float]:
        spans: dict[Instruction, tuple[float, float]] = {}
        begins_s = self._begins_s()
        self._free_s = dict(begins_s)
        changes = [
            {change.instruction: [c for c in own if c.instruction == change.instruction] for change in own}
            for own in self.changes
        ]
        for v in self.graph.topological_order:
            instruction = self.graph.instructions[v]
            r = instruction.pp_rank
            before_s = [spans[self.graph.instructions[u]][1] + lat for u, lat in self.graph.predecessors[v]]
            ready_s = max([begins_s[r], *before_s])
            self._wait_until(r, ready_s, spans)
            for change in changes[r].get(instruction, ()) if self.has_lease else ():
                self._ask(r, ready_s + change.offset_s, change.sm_clock_mhz)
            spans[instruction] = (ready_s, self._work_from(r, instruction, ready_s))
            self._free_s[r] = spans[instruction][1]
        return spans, max(end for _, end in spans.values())

    def _ask(self, r: int, asked_s: float, clock: int) -> None:
        own = self.pending[r]
        before = own[-1].clock if own else self.clock_now[r]
        latency_s = self.switch_latency_s
        if clock <= before and self.lower_latency_s is not None:
            latency_s = self.lower_latency_s
        latency_s *= 1 + self.random.uniform(-1, 1) * self.latency_spread_ratio
        # One driver: what was called for last is what holds in the end.
        effective_s = max([asked_s + latency_s, *(p.effective_s for p in own if p.clock != clock)])
        own.append(_Pending(effective_s, clock, asked_s))
        if clock != before:
            self.clocks[r].record_call(self._ns(asked_s))
        own.sort(key=lambda p: p.effective_s)

    def _learn_latency(self, r: int, change: "_Pending") -> None:
        """Take the effect of a clock change for the daemon's looks every millisecond, and tell the job of it."""
        if self.assumed_latency_s is None or change.asked_s is None:
            return
        settle_s = change.effective_s - change.asked_s
        looks = math.ceil(settle_s / _LOOK_EVERY_S)
        low_s, high_s = max(0, looks - 1) * _LOOK_EVERY_S, looks * _LOOK_EVERY_S
        switch = ObservedSwitch(self.clock_now[r], change.clock, 0.0, 0.0, low_s, high_s)
        if self.calibrations[r].observe(switch):
            self.report_gpus()

    def report_gpus(self) -> None:
        """Tell the job what is known of its GPUs, which are of one model."""
        for r in self.calibrations:
            for k in range(self.num_stage_ranks):
                self.feed(GpuViewChanged(r, self._gpu(r), k))

    def _work_from(self, r: int, instruction: Instruction, start_s: float) -> float:
        work = self.work[r, instruction.kind] if self.work_of is None else self.work_of(instruction)
        left = 1.0 + (self.random.gauss(0, self.noise_ratio) if self.noise_ratio else 0.0)
        at_s = start_s
        slower, lower = self._profile_factors(r)
        while True:
            clock = self._clock_at(r, at_s)
            time_s = work.time_s(clock) * self.slowdown_of(r, self.iteration_index) * slower
            if self.slow_factor_when_tuned != 1.0 and self._plan_id_is_tuned() and clock < self.clocks_mhz[0]:
                time_s *= self.slow_factor_when_tuned
            until_s = min(at_s + left * time_s, self.pending[r][0].effective_s if self.pending[r] else float("inf"))
            self._spend(r, work.power_w(clock) * lower, at_s, until_s)
            left -= (until_s - at_s) / time_s
            at_s = until_s
            if left <= 1e-9:
                return at_s

    def _spend(self, r: int, power_w: float, from_s: float, until_s: float) -> None:
        """Add energy, showing the counter's value at each instant of its grid that is passed."""
        if self.counter_period_s:
            edge = math.floor(from_s / self.counter_period_s) + 1
            while edge * self.counter_period_s <= until_s:
                at_s = edge * self.counter_period_s
                self.counters[r].record(self._ns(at_s), self._shown_j(r, self.total_j[r] + power_w * (at_s - from_s)))
                edge += 1
        self.total_j[r] += power_w * (until_s - from_s)

    def _shown_j(self, r: int, total_j: float) -> float:
        """Return what the counter says: its error is a random walk, so that each window's is independent."""
        if self.energy_noise_ratio:
            since_j = total_j - self._last_total_j[r]
            self._error_j[r] += since_j * self._iteration_error[r]
        self._last_total_j[r] = total_j
        return total_j + self._error_j[r]

    def _plan_id_is_tuned(self) -> bool:
        return (self._plan_id() or "").startswith("tuned")

    def _wait_until(self, r: int, until_s: float, _spans: object) -> None:
        at_s = self._free_s[r]
        while at_s < until_s:
            clock = self._clock_at(r, at_s)
            next_s = min(until_s, self.pending[r][0].effective_s if self.pending[r] else float("inf"))
            self._spend(r, self.waiting_power_w(clock), at_s, next_s)
            at_s = next_s
        self._free_s[r] = max(self._free_s[r], until_s)

    def _clock_at(self, r: int, at_s: float) -> int:
        while self.pending[r] and self.pending[r][0].effective_s <= at_s:
            change = self.pending[r].pop(0)
            if change.clock != self.clock_now[r]:
                self.clocks[r].record(self._ns(change.effective_s), min(change.clock, self.ceilings[r]))
                self._learn_latency(r, change)
            self.clock_now[r] = change.clock
        return min(self.clock_now[r], self.ceilings[r])

    @staticmethod
    def _ns(seconds: float) -> int:
        return round(seconds * 1e9)
