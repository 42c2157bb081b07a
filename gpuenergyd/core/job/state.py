"""State of one job, the queries on it, and the actions shared by all transitions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpuenergyd.core.job.control.faults import Faults
from gpuenergyd.core.job.control.plan_control import PlanControl, PlanControlSnapshot
from gpuenergyd.core.job.description import JobDescription, JobRanks
from gpuenergyd.core.job.measurements.knowledge import JobKnowledge, KnowledgeSnapshot
from gpuenergyd.core.job.measurements.rank_reports import RankReports, RankReportsSnapshot
from gpuenergyd.core.job.measurements.savings import SavingEstimate
from gpuenergyd.core.job.messages import Command, JobPhase, RecordPhase
from gpuenergyd.core.job.operator_orders import OperatorOrders, choices_of
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.story import Notices
from gpuenergyd.core.job.time_account import TimeAccount
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.plan import ClockPlan, SavingAdvice
from gpuenergyd.core.policy_api.policy import BaselineView, GpuView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget

Commands = tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """All state of a `Job` except its description, its rules and its story."""

    phase: JobPhase
    phase_reason: str
    target: PerformanceTarget
    baseline: BaselineView | None
    profiling_refusal: str | None
    """Why trials are refused; None if they are not. Files of versions up to 0.3 have it under this name."""
    orders: dict[int, tuple[Instruction, ...]]
    gpus: dict[int, GpuView]
    """The GPU of each rank, by `JobDescription.rank_index`."""
    reports: RankReportsSnapshot
    knowledge: KnowledgeSnapshot
    control: PlanControlSnapshot
    faults: Faults
    notices: Notices
    changed_ranks: dict[int, tuple[int, tuple[Instruction, ...]]] = field(default_factory=dict)
    """See `JobRanks.changed_ranks`."""
    orders_of_operators: OperatorOrders = field(default_factory=OperatorOrders)
    as_registered: OperatorOrders | None = None
    """Options with which the job was registered; None if saved by a daemon that had no operators' orders."""


@dataclass(slots=True)
class JobState:
    """All state of one job, changed by its transitions only."""

    description: JobDescription
    rules: JobRules = field(default_factory=JobRules)
    phase: JobPhase = JobPhase.JOINING
    phase_reason: str = "waiting for ranks"
    target: PerformanceTarget = field(init=False)
    baseline: BaselineView | None = None
    ranks: JobRanks = field(init=False)
    reports: RankReports = field(init=False)
    knowledge: JobKnowledge = field(init=False)
    control: PlanControl = field(init=False)
    faults: Faults = field(init=False)
    notices: Notices = field(default_factory=Notices)
    advice: tuple[SavingAdvice, ...] = ()
    """The policy's newest advice on the permitted slowdown; not in the snapshot, because the policy repeats it."""
    orders: OperatorOrders = field(default_factory=OperatorOrders)
    """Operators' orders; the description already includes them."""
    as_registered: OperatorOrders = field(init=False)
    """Choices of the program, which apply unless an operator has changed them."""
    before_end: tuple[JobPhase, str] | None = None
    """Phase and reason just before the job ended."""

    def __post_init__(self) -> None:
        self.target = self.description.target
        self.as_registered = choices_of(self.description)
        self.ranks = JobRanks(self.description)
        self.reports = RankReports(self.rules, self.description.num_stage_ranks)
        self.knowledge = JobKnowledge(self.description.job_id, self.rules.max_observations)
        self.control = PlanControl(self.rules, self.ranks, self.reports, self.knowledge)
        self.faults = Faults(self.rules)

    @property
    def is_ended(self) -> bool:
        return self.phase is JobPhase.ENDED

    @property
    def last_activity(self) -> tuple[JobPhase, str]:
        """Phase and reason; for an ended job, those before its end."""
        return self.before_end or (self.phase, self.phase_reason)

    @property
    def is_given_up(self) -> bool:
        """Whether the job stays at full speed after too many faults."""
        return self.phase is JobPhase.FALLBACK and self.faults.retry_at_iteration is None

    @property
    def retry_in_iterations(self) -> int | None:
        """Iterations until the policy is asked again after a fall-back; None if it is not going to be."""
        retry_at = self.faults.retry_at_iteration if self.phase is JobPhase.FALLBACK else None
        return None if retry_at is None else max(0, retry_at - self.reports.last_index)

    @property
    def num_iterations(self) -> int:
        """Number of complete iterations."""
        return self.reports.num_iterations

    @property
    def observations(self) -> Sequence[IterationObservation]:
        """The kept iterations, oldest first."""
        return self.knowledge.iterations.kept

    @property
    def current_plan(self) -> ClockPlan:
        """The plan in force, or the newest plan sent if it has yet to begin."""
        return self.knowledge.plans.current

    def figures_per_gpu(self) -> tuple[float | None, float | None]:
        """Return energy (J) and power (W) per GPU in the newest observed iteration; None where not measured."""
        newest = self.observations[-1] if self.observations else None
        if newest is None or newest.energy_j is None or newest.iteration_time_s <= 0:
            return None, None
        energy_j = newest.energy_j / self.description.num_ranks
        return energy_j, energy_j / newest.iteration_time_s

    def estimate(self) -> SavingEstimate | None:
        """Return the estimated saving of the plans; None before there is a baseline."""
        return None if self.baseline is None else self.knowledge.estimate(self.baseline)

    @property
    def follows_power_target(self) -> bool:
        """Whether iterations run under a plan made or kept for the present power budget of the job."""
        made_for, plans = self.control.guard.target, self.knowledge.plans
        is_in_force = self.phase is JobPhase.TUNED and plans.last_apply_at <= self.reports.last_index
        return is_in_force and (made_for or self.description.target).power_time_s == self.target.power_time_s

    @property
    def account(self) -> TimeAccount | None:
        """Time that the daemon has cost the job's training; None for a member of a pipeline across hosts."""
        return self.control.experiments.account if self.rules.is_guarding else None

    @property
    def is_paused(self) -> bool:
        """Whether an operator has paused the job; its full speed may still be measured."""
        return bool(self.orders.is_paused)

    def choices(self) -> OperatorOrders:
        """Return the policy, permitted slowdown, priority and pause now in effect."""
        return self.choices_under(self.orders)

    def choices_under(self, orders: OperatorOrders) -> OperatorOrders:
        """Return the choices that would be in effect under these orders."""
        return self.as_registered.followed_by(orders)

    def graph_under(self, plan_id: str | None) -> DependencyGraph:
        """Return the dependency graph for the instruction order under a plan."""
        return self.ranks.graph_in(self.knowledge.plans.orders_of(plan_id))

    def view(self) -> JobView | None:
        """Return the job as its policy sees it; None until there is a baseline."""
        return self.control.view(self.target, self.baseline)

    # --- what transitions do ---

    def enter(self, phase: JobPhase, reason: str) -> Commands:
        """Enter a phase, or change the reason of the present one."""
        if phase is self.phase:
            self.phase_reason = reason or self.phase_reason
            return ()
        self.phase, self.phase_reason = phase, reason
        return (RecordPhase(phase, reason),)

    def ask(self) -> Commands:
        """Ask the policy for a plan, unless a question is open or the job waits for something else."""
        return self.control.ask(self.target, self.baseline)

    def notice(self, reason: str) -> None:
        """Show an event to the user."""
        self.notices.add(reason, self.num_iterations)

    def fall_back(self, reason: str, *, is_fault: bool = False, least_wait: int = 0) -> Commands:
        """Return to full speed; the policy is asked again later, a limited number of times after faults."""
        if self.ranks.schedule is None:
            return ()
        stop = self.control.fall_back(reason, self.faults)
        self.notice(reason)
        retry_at = self.faults.fell_back(
            at_iteration=max(self.control.mixed_before, self.reports.last_index + 1),
            wait_from=max(self.knowledge.plans.last_apply_at, self.reports.last_index),
            is_fault=is_fault,
            least_wait=least_wait,
            reason=reason,
        )
        if retry_at is not None:
            self.control.guard.since = retry_at
        return (*stop, *self.enter(JobPhase.PAUSED if self.is_paused else JobPhase.FALLBACK, reason))

    # --- from one daemon to the next ---

    def snapshot(self) -> JobSnapshot:
        """Return all state except an open question to the policy."""
        return JobSnapshot(
            phase=self.phase,
            phase_reason=self.phase_reason,
            target=self.target,
            baseline=self.baseline,
            orders=dict(self.ranks.orders),
            changed_ranks=dict(self.ranks.changed_ranks),
            gpus=dict(self.ranks.own_gpus),
            reports=self.reports.snapshot(),
            knowledge=self.knowledge.snapshot(),
            control=self.control.snapshot(),
            faults=replace(self.faults),
            notices=replace(self.notices),
            profiling_refusal=self.control.experiments.refusal,
            orders_of_operators=self.orders,
            as_registered=self.as_registered,
        )

    def restore(self, snapshot: JobSnapshot) -> None:
        """Replace all state, keeping this job's rules; raise JobError if the ranks' orders deadlock."""
        self.ranks.restore(snapshot.orders, snapshot.gpus)
        self.ranks.changed_ranks = dict(snapshot.changed_ranks)
        self.phase, self.phase_reason, self.target = snapshot.phase, snapshot.phase_reason, snapshot.target
        self.baseline = snapshot.baseline
        self.reports.restore(snapshot.reports)
        self.knowledge.restore(snapshot.knowledge)
        self.control.restore(snapshot.control)
        self.control.experiments.refusal = snapshot.profiling_refusal
        self.faults = replace(snapshot.faults, rules=self.rules)
        self.notices = replace(snapshot.notices)
        self.orders = snapshot.orders_of_operators
        self.as_registered = snapshot.as_registered or self.as_registered
