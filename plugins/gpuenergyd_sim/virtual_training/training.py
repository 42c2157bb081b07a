"""A training run in virtual time: the real job state machine and a real policy control a pipeline that is computed.

Nothing waits, and nothing is random unless requested: a hundred iterations take no longer than the policy's computing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

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
from gpuenergyd.core.measurement.telemetry import MeasuredInstruction, RankIteration
from gpuenergyd.core.pipeline.graph import Instruction, Schedule, dependency_graph
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.reorder import RankMemory, ReorderOffer
from gpuenergyd.core.policy_api.policy import ClockPolicy, GpuView, JobView, Lever
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_sim.virtual_training.gpus import Pending, VirtualGpus
from gpuenergyd_sim.virtual_training.work import Work


@dataclass
class VirtualTraining(VirtualGpus):
    """Runs a job iteration by iteration; `history` holds (iteration time, energy, plan id) of each."""

    policy: ClockPolicy
    max_slowdown_ratio: float = 0.0
    noise_ratio: float = 0.0
    communication_latency_s: float = 0.001
    step_overhead_s: float = 0.02
    after_last_s: tuple[float, ...] | None = None
    """For each rank, time from its last instruction to its next step; None if all begin together after the overhead."""
    rules: JobRules = field(default_factory=JobRules)
    slowdown_of: Callable[[int, int], float] = lambda _rank, _iteration: 1.0
    """Factor on a rank's times in an iteration, for drift, throttling or a neighbour's load."""
    work_of: Callable[[Instruction], Work] | None = None
    """Work of each instruction, used instead of `work` if the chunks of a rank differ."""
    slow_factor_when_tuned: float = 1.0
    """Factor on times below the top clock under a tuned plan, for a pipeline slower than its profile shows."""

    thinking_iterations: int = 0
    """Number of iterations between a request to the policy and its answer."""

    num_dp_ranks: int = 1
    """Number of processes of a training loop without a pipeline."""
    num_stage_ranks: int = 1
    """Number of equal ranks, with equal GPUs, of each stage; `history` holds the energy of one of them."""

    levers: frozenset[Lever] = frozenset({Lever.CLOCKS})
    """The GPU settings that plans may change."""

    foreign_power_profiles: tuple[int, ...] = ()
    """Power profiles that another program has requested; call `report_gpus` after a change."""
    reorder: ReorderOffer = field(default_factory=ReorderOffer)
    """What the ranks report when they join about running instructions in other orders."""
    memory_of: Callable[[int, Schedule], RankMemory | None] = lambda _rank, _schedule: None
    """The memory that a rank reports after an iteration under a schedule; None if it reports none."""

    waits_in_last_instruction: bool = False
    """Whether the wait for other replicas makes the last backward longer, or is time after it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = self.schedule.num_ranks
        self._answer_at: tuple[int, JobView] | None = None
        self.has_replicas = False
        self.on_block: Callable[[int], None] | None = None
        """Called with the index of the first iteration of a block at full speed."""
        self.least_overhead_s: float | None = None
        self.running = self.schedule
        """The schedule of the present iteration, whose order of instructions may come from a plan."""
        self._schedule_of: dict[int, Schedule] = {}
        self.graph = dependency_graph(self.schedule, communication_latency_s=self.communication_latency_s)
        self.commands: list[Command] = []
        self.policy_failure: str | None = None
        """The last error that the policy raised; None if it raised none."""
        self.history: list[tuple[float, float, str | None]] = []
        self._after_rank_0_s = dict.fromkeys(range(ranks), 0.0)
        self.slices: list[tuple[int, int, str, tuple[tuple[ClockChange, ...], ...]]] = []
        self._spans: dict[Instruction, tuple[float, float]] = {}
        self._energy_before_j = sum(self.total_j.values())
        self._unheard: list[RankIteration] = []
        self._observed: tuple[RankIteration, ...] = ()
        self.epoch = 0
        self.has_lease = False
        self.changes: tuple[tuple[ClockChange, ...], ...] = ((),) * ranks
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
        """The job's estimator of how fast the replica is."""
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

    def report_gpus(self) -> None:
        """Tell the job the present properties of its GPUs, which are of one model."""
        for r in self.calibrations:
            for k in range(self.num_stage_ranks):
                self.feed(GpuViewChanged(r, self._gpu(r), k))

    def feed(self, event: Event) -> None:
        """Give the job an event and execute the commands that it returns, as the daemon does."""
        queue = list(self.job.handle(event))
        while queue:
            command = queue.pop(0)
            self.commands.append(command)
            match command:
                case ObserveIteration():
                    observation, spans = observe_iteration(
                        ranks=command.ranks,
                        graph=self.job.graph_under(command.plan_id),
                        clocks={r: stage_clocks([clocks] * self.num_stage_ranks) for r, clocks in self.clocks.items()},
                        counters={
                            r: stage_energy([energy] * self.num_stage_ranks) for r, energy in self.counters.items()
                        },
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
            self.policy_failure = repr(error)
            return PolicyFailed(self.policy_failure)

    def restore(self) -> None:
        """Restore all GPUs and end the lease; without one the worker refuses clock requests."""
        self.has_lease = False
        self.power_limits.clear()
        self.profiles.clear()
        for r in self.pending:
            self.pending[r] = [Pending(self.now_s, self.clocks_mhz[0])]

    def change_schedule(self, schedule: Schedule) -> None:
        """Continue with another number of microbatches: the ranks report their last iteration, and register again."""
        self._hear([])
        self._observed = ()
        self.schedule = schedule
        self.graph = dependency_graph(schedule, communication_latency_s=self.communication_latency_s)
        self.slices, self.epoch, self.changes = [], 0, ((),) * schedule.num_ranks
        for r, order in enumerate(schedule.orders):
            for k in range(self.num_stage_ranks):
                self.feed(RankChangedMicrobatches(r, order, schedule.num_microbatches, k))

    def run(self, num_iterations: int) -> None:
        """Train for this number of iterations."""
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
        self._begin_iteration_of_gpus()
        self._spans, end_s = self._run_pipeline()
        return end_s

    def _follow(self, schedule: Schedule) -> None:
        """Run the next iteration under this schedule."""
        if schedule.orders != self.running.orders:
            self.running = schedule
            self.graph = dependency_graph(schedule, communication_latency_s=self.communication_latency_s)

    def finish_iteration(self, end_s: float) -> None:
        """End the iteration at `end_s`, when all replicas have finished it, and report it."""
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
            self._wait_until(r, nexts_s[r])
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
        self.history.append((nexts_s[0] - begins_s[0], energy_j - self._energy_before_j, self._plan_id()))
        self._energy_before_j = energy_j
        self.now_s = nexts_s[0]
        self._after_rank_0_s = {r: next_s - self.now_s for r, next_s in nexts_s.items()}
        self.iteration_index += 1
        self._hear(reports)

    def _hear(self, reports: list[RankIteration]) -> None:
        """Report the previous iteration: its energy is known only once the counters were read after its end."""
        for report in self._unheard:
            for k in range(self.num_stage_ranks):
                self.feed(RankReported(replace(report, stage_rank=k)))
        self._unheard = reports

    def _plan_id(self) -> str | None:
        return next((plan_id for _, epoch, plan_id, _ in self.slices if epoch == self.epoch), None)

    def _begins_s(self) -> dict[int, float]:
        """Return the time at which each rank begins this iteration."""
        return {r: self.now_s + after_s for r, after_s in self._after_rank_0_s.items()}

    def _run_pipeline(self) -> tuple[dict[Instruction, tuple[float, float]], float]:
        spans: dict[Instruction, tuple[float, float]] = {}
        begins_s = self._begins_s()
        self._free_s = dict(begins_s)
        changes = [
            {change.instruction: [c for c in changes if c.instruction == change.instruction] for change in changes}
            for changes in self.changes
        ]
        for v in self.graph.topological_order:
            instruction = self.graph.instructions[v]
            r = instruction.pp_rank
            before_s = [spans[self.graph.instructions[u]][1] + lat for u, lat in self.graph.predecessors[v]]
            ready_s = max([begins_s[r], *before_s])
            self._wait_until(r, ready_s)
            for change in changes[r].get(instruction, ()) if self.has_lease else ():
                self._ask(r, ready_s + change.offset_s, change.sm_clock_mhz)
            spans[instruction] = (ready_s, self._work_from(r, instruction, ready_s))
            self._free_s[r] = spans[instruction][1]
        return spans, max(end for _, end in spans.values())

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
            until_s = min(at_s + left * time_s, self._next_change_s(r))
            self._spend(r, work.power_w(clock) * lower, at_s, until_s)
            self._read_clock(r, work, clock, at_s, until_s)
            left -= (until_s - at_s) / time_s
            at_s = until_s
            if left <= 1e-9:
                return at_s

    def _plan_id_is_tuned(self) -> bool:
        return (self._plan_id() or "").startswith("tuned")
