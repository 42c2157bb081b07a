"""The life of one job as a pure state machine: events in through one door, commands out.

Theory of operation. A job is joined by its ranks, warms up, and runs `baseline_iterations` un-tuned: all slowdown and
all saving is judged against those. Then, after each iteration that all ranks have reported and that the GPUs'
samples have been matched with, the policy is asked for a plan. A new plan gets the next epoch and an iteration from
which all ranks follow it, late enough that every rank has heard of it by then:

    iteration     i            i+1             i+2             i+3
    rank          runs   posts i, runs   posts i+1, gets P    follows P
    core                 observes i, asks policy, decides P

so a policy that answers with a new plan each time tries one plan per iteration. Now and then a short block runs at
full speed between tuned iterations: it keeps the baseline honest and proves the saving. The guard is here and not in
the policy: when a tuned plan runs slower than owed, the job goes back to full speed and the baseline is measured
again. If that has moved, the job itself has changed: what it showed before is kept, brought to its new pace by the
policy. If it has not and plan after plan is slow, what was learned is held against full speed once more, and where that
does not help forgotten and learned anew. Each fault doubles the time until the next attempt, and a plan that holds for
long redeems the faults before it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import assert_never

from gpuenergyd.core.guard import Finding, GuardRules, judge, what_changed
from gpuenergyd.core.messages import (
    AskPolicy,
    Command,
    ControlLost,
    EndJob,
    Event,
    GpuViewChanged,
    IterationObserved,
    JobPhase,
    KeepModel,
    LeaseGpus,
    ModelRecalled,
    ObservedElsewhere,
    ObserveIteration,
    PlanDecided,
    PolicyFailed,
    ProfilingJudged,
    RankJoined,
    RankLost,
    RankReleased,
    RankReported,
    RecordNotice,
    RecordPhase,
    RestoreGpus,
    SendPlan,
    StragglerChanged,
    TargetChanged,
)
from gpuenergyd.core.model_memory import PROVEN_ITERATIONS, RememberedModel, model_of_run
from gpuenergyd.core.observation import IterationObservation
from gpuenergyd.core.pipeline import Instruction, Schedule, dependency_graph
from gpuenergyd.core.plan import (
    BASELINE_PLAN_ID,
    ClockPlan,
    PlanPurpose,
    check_plan,
    full_speed_plan,
    untuned_plan,
)
from gpuenergyd.core.policy import BaselineView, GpuView, JobView
from gpuenergyd.core.savings import MeasuredSaving, baseline_view, measured_saving
from gpuenergyd.core.schedules import stage_of_chunk
from gpuenergyd.core.slowdown_account import JobLength
from gpuenergyd.core.target import PerformanceTarget
from gpuenergyd.core.telemetry import RankIteration
from gpuenergyd.errors import GpuEnergyError, JobError

PROOF_PLAN_ID = "proof"
"""Full-speed blocks between tuned iterations."""
_ITERATIONS_AHEAD = 3
"""A plan decided after iteration i reaches every rank with the reply to report i+1, which is read during i+2."""
_EPOCHS_KEPT = 64
"""A rank that still follows an older plan than so many sends ago follows none that is known."""
_NS_PER_S = 1e9
_SAME_TIME_RATIO = 1e-3


@dataclass(frozen=True, slots=True)
class JobRules:
    """How a job is run; the same for all policies."""

    warmup_iterations: int = 2
    baseline_iterations: int = 10
    guard: GuardRules = field(default_factory=GuardRules)
    fallback_iterations: int = 5
    """Iterations at full speed after the first fault, before the policy is asked again; each further one doubles it."""
    relearn_after_slow_plans: int = 2
    """After so many slow plans in a row the profile is not believed any more, and measured again."""
    redeeming_iterations: int = 64
    """Iterations of one tuned plan without a fault that make up for all faults before it."""
    job_changed_ratio: float = 0.02
    """Instructions or iterations at full speed that moved by more than this: not the job that was profiled."""
    settled_ratio: float = 0.01
    """A changed job is planned for once its newest iterations at full speed differ by less than this, ..."""
    settling_iterations: int = 20
    """... or after so many of them."""
    proof_iterations: int = 4
    """Length of a full-speed block between tuned iterations, its first one not counted; 0: no such blocks."""
    first_proof_after: int = 8
    """Tuned iterations before the first block, which tells drift since the baseline from a plan that is too slow."""
    proof_budget_ratio: float = 0.01
    """Share of all iterations that later blocks may take."""
    max_faults: int = 6
    """After more faults (guard trips, policy failures, lost control) the job stays at full speed."""
    max_profile_iterations: int = 120
    """A policy that is still profiling after so many iterations may go on, from the beginning, after as many at full
    speed; each further time that doubles."""
    refused_profiling_iterations: int = 64
    """After so many iterations a job that was refused its profiling asks again."""
    relief_iterations: int = 3
    """Iterations under one profiling plan after which the job runs at full speed until the policy has answered."""
    pause_ratio: float = 0.05
    """A wait between steps that is longer than usual by this share of a step was a pause (evaluation, checkpoint)."""
    foreign_orders: int = 3
    """So many iterations in a row in another order than registered: clocks planned for that one are given back."""
    notice_every: int = 25
    """The same kind of disturbance is recorded once in so many iterations."""
    max_observations: int = 192


def part_rules(rules: JobRules) -> JobRules:
    """Return the rules for a part of a pipeline across hosts: who plans the whole decides how long it profiles."""
    return replace(rules, proof_iterations=0, max_profile_iterations=2**31)


@dataclass(frozen=True, slots=True)
class JobDescription:
    """What a job is, as its first rank declared it."""

    job_id: str
    job_name: str
    num_pp_ranks: int
    schedule_name: str
    num_microbatches: int
    num_chunks: int
    policy: str
    target: PerformanceTarget
    length: JobLength = field(default_factory=JobLength)


@dataclass(slots=True)
class Job:
    """One training run on one pipeline; owned by the event loop, decided here."""

    description: JobDescription
    rules: JobRules = field(default_factory=JobRules)
    phase: JobPhase = JobPhase.JOINING
    phase_reason: str = "waiting for ranks"
    target: PerformanceTarget = field(init=False)
    schedule: Schedule | None = None
    gpus: dict[int, GpuView] = field(default_factory=dict)
    baseline: BaselineView | None = None
    observations: list[IterationObservation] = field(default_factory=list)
    issued_plans: list[ClockPlan] = field(default_factory=list)
    remembered: RememberedModel | None = None
    """What an earlier run of this job showed, until it is forgotten."""
    last_notice: str | None = None
    """What was last noticed of the job that made it go on differently, and after how many of its iterations."""
    last_notice_at: int | None = None
    num_iterations: int = 0
    num_faults: int = 0
    _orders: dict[int, tuple[Instruction, ...]] = field(default_factory=dict)
    _reports: dict[int, dict[int, RankIteration]] = field(default_factory=dict)
    _plan_of_epoch: dict[int, str] = field(default_factory=lambda: {0: BASELINE_PLAN_ID})
    _last_apply_at: int = 0
    _last_reported: int = -1
    _is_policy_asked: bool = False
    _asked_target: PerformanceTarget | None = None
    _judged_by: PerformanceTarget | None = None
    """The target that the plan in force was made, or kept, for."""
    _owed_when_made: dict[str, float] = field(default_factory=dict)
    """The iteration time that each tuned plan was made for, in seconds."""
    _plans_for_straggler: set[str] = field(default_factory=set)
    _is_answer_outdated: bool = False
    _has_lease: bool = False
    _retry_at_iteration: int | None = None
    _first_iteration: int | None = None
    _guarded_from: int = 0
    _disturbed_before: int = 0
    _fell_back_at: int = 0
    _num_fallbacks: int = 0
    _num_tuned_seen: int = 0
    _num_slow_plans: int = 0
    _is_relieved: bool = False
    _generation: int = 0
    _num_proof_iterations: int = 0
    _kept_for_plan_id: str | None = None
    _num_foreign_orders: int = 0
    _is_profile_endless: bool = False
    _profiling_refusal: str | None = None
    _noticed_at: dict[str, int] = field(default_factory=dict)
    _gaps_ns: deque[int] = field(default_factory=lambda: deque(maxlen=32))

    def __post_init__(self) -> None:
        self.target = self.description.target

    @property
    def is_ended(self) -> bool:
        """Whether the job is over."""
        return self.phase is JobPhase.ENDED

    @property
    def is_given_up(self) -> bool:
        """Whether the job has fallen back to full speed for good."""
        return self.phase is JobPhase.FALLBACK and self._retry_at_iteration is None

    @property
    def retry_in_iterations(self) -> int | None:
        """Iterations until a job that has fallen back is planned for again, None while nothing is awaited."""
        if self.phase is not JobPhase.FALLBACK or self._retry_at_iteration is None:
            return None
        return max(0, self._retry_at_iteration - self._last_reported)

    @property
    def current_plan(self) -> ClockPlan:
        """The plan in force, or about to be."""
        return self.issued_plans[-1] if self.issued_plans else untuned_plan()

    def plan_by_id(self, plan_id: str | None) -> ClockPlan | None:
        """Return an issued plan."""
        return next((plan for plan in reversed(self.issued_plans) if plan.plan_id == plan_id), None)

    def plan_id_of(self, plan_epoch: int | None) -> str | None:
        """Return the plan that was sent under an epoch; None for an epoch that is not ours."""
        return self._plan_of_epoch.get(plan_epoch) if plan_epoch is not None else None

    def purpose_of(self, plan_id: str | None) -> PlanPurpose | None:
        """Return what the iterations of a plan are for; None for iterations under mixed plans."""
        if plan_id in {BASELINE_PLAN_ID, PROOF_PLAN_ID}:
            return PlanPurpose.BASELINE
        plan = self.plan_by_id(plan_id)
        return plan.purpose if plan else None

    def _purposes(self) -> dict[str | None, PlanPurpose]:
        """Return what `purpose_of` returns for every plan there was: for looking at many iterations at once."""
        known: dict[str | None, PlanPurpose] = {plan.plan_id: plan.purpose for plan in self.issued_plans}
        return {**known, BASELINE_PLAN_ID: PlanPurpose.BASELINE, PROOF_PLAN_ID: PlanPurpose.BASELINE}

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Take one event and return what shall be done, in order.

        Raises:
            JobError: the event contradicts what this job is; the job is unchanged.
        """
        if self.is_ended:
            return ()
        match event:
            case RankJoined():
                return self._rank_joined(event)
            case RankReported():
                return self._rank_reported(event.report)
            case IterationObserved():
                return self._iteration_observed(event.observation)
            case ObservedElsewhere():
                return self._observed_elsewhere(event)
            case PlanDecided():
                return self._plan_decided(event.plan)
            case PolicyFailed():
                if self._was_answer_awaited_before_fallback():
                    return ()
                return self._fall_back(f"policy {self.description.policy} failed: {event.reason}", is_fault=True)
            case GpuViewChanged():
                if event.pp_rank in self.gpus:
                    self.gpus[event.pp_rank] = event.gpu
                return ()
            case ModelRecalled():
                # Later than this the policy has begun to profile, or what was learned has been forgotten since.
                if self.phase in {JobPhase.JOINING, JobPhase.WARMUP, JobPhase.BASELINE}:
                    self.remembered = event.model
                return ()
            case ControlLost():
                return self._fall_back(event.reason, is_fault=True)
            case ProfilingJudged():
                return self._profiling_judged(event.refusal)
            case TargetChanged():
                # The plan in force was made for what was owed before; until the policy answers, that judges it.
                self.target = replace(event.target, straggler_time_s=self.target.straggler_time_s)
                return ()
            case StragglerChanged():
                return self._straggler_changed(event)
            case RankReleased():
                return self._end(f"rank {event.pp_rank} was released")
            case RankLost():
                return self._end(f"rank {event.pp_rank} was lost: {event.reason}")
            case _:
                assert_never(event)

    # --- joining ---

    def _rank_joined(self, event: RankJoined) -> tuple[Command, ...]:
        description = self.description
        if not 0 <= event.pp_rank < description.num_pp_ranks:
            raise JobError(f"rank {event.pp_rank}: job {description.job_name!r} has {description.num_pp_ranks} ranks")
        if event.pp_rank in self._orders:
            raise JobError(f"rank {event.pp_rank} of job {description.job_name!r} is already registered")
        orders = {**self._orders, event.pp_rank: event.order}
        schedule = None
        if len(orders) == description.num_pp_ranks:
            schedule = Schedule(
                name=description.schedule_name,
                num_microbatches=description.num_microbatches,
                orders=tuple(orders[r] for r in range(description.num_pp_ranks)),
                num_chunks=description.num_chunks,
                stage_of_chunk=stage_of_chunk(description.schedule_name, description.num_pp_ranks),
            )
            try:
                dependency_graph(schedule)
            except GpuEnergyError as error:
                raise JobError(f"the ranks' orders do not fit together: {error}") from None
        self._orders = orders
        self.gpus[event.pp_rank] = event.gpu
        if schedule is None:
            return ()
        self.schedule = schedule
        return self._enter(JobPhase.WARMUP, "all ranks joined")

    # --- iterations ---

    def _rank_reported(self, report: RankIteration) -> tuple[Command, ...]:
        if self.schedule is None:
            return ()
        index = report.iteration_index
        self._last_reported = max(self._last_reported, index)
        reports = self._reports.setdefault(index, {})
        reports[report.pp_rank] = report
        for stale in [i for i in self._reports if i < index - _ITERATIONS_AHEAD]:
            del self._reports[stale]
        if len(reports) < self.schedule.num_ranks:
            return ()
        del self._reports[index]
        self.num_iterations += 1
        if self._first_iteration is None:
            self._first_iteration = index
        epochs = {r.plan_epoch for r in reports.values()}
        plan_id = self._plan_of_epoch.get(epochs.pop()) if len(epochs) == 1 else None
        is_in_order = all(self._is_in_order(r) for r in reports.values())
        is_countable = (
            plan_id is not None
            and index >= self._first_iteration + self.rules.warmup_iterations
            and index >= self._disturbed_before
            and is_in_order
            and reports[0].next_begin_ns > 0
        )
        pause_s = self._pause_s(reports[0]) if is_countable else None
        observe = ObserveIteration(
            tuple(reports[r] for r in sorted(reports)), plan_id, is_regular=is_countable and pause_s is None
        )
        return (observe, *self._disturbance(index, is_in_order=is_in_order, pause_s=pause_s))

    def _observed_elsewhere(self, event: ObservedElsewhere) -> tuple[Command, ...]:
        if self.schedule is None:
            return ()
        observation = event.observation
        index = observation.iteration_index
        self._last_reported = max(self._last_reported, index)
        self.num_iterations += 1
        if self._first_iteration is None:
            self._first_iteration = index
        plan_id = self.plan_id_of(event.plan_epoch)
        is_regular = (
            plan_id is not None
            and observation.is_regular
            and index >= self._first_iteration + self.rules.warmup_iterations
            and index >= self._disturbed_before
        )
        return self._iteration_observed(replace(observation, plan_id=plan_id, is_regular=is_regular))

    def _is_in_order(self, report: RankIteration) -> bool:
        ran = sorted(report.instructions, key=lambda measured: measured.begin_ns)
        return tuple(measured.instruction for measured in ran) == self._orders[report.pp_rank]

    def _pause_s(self, rank_0: RankIteration) -> float | None:
        """Return how much longer than usual it took from this step to the next, None when that is chance."""
        gap_ns = rank_0.next_begin_ns - rank_0.end_ns
        usual_ns = median(self._gaps_ns) if self._gaps_ns else gap_ns
        self._gaps_ns.append(gap_ns)
        is_pause = gap_ns > usual_ns + self.rules.pause_ratio * (rank_0.end_ns - rank_0.begin_ns)
        return (gap_ns - usual_ns) / _NS_PER_S if is_pause else None

    def _disturbance(self, index: int, *, is_in_order: bool, pause_s: float | None) -> tuple[Command, ...]:
        """Say why an iteration counts for nothing, and give clocks back that were planned for another order."""
        self._num_foreign_orders = 0 if is_in_order else self._num_foreign_orders + 1
        if not is_in_order:
            is_planned_for = self.phase in {JobPhase.PROFILING, JobPhase.TUNED} and self.current_plan.ranks
            if is_planned_for and self._num_foreign_orders >= self.rules.foreign_orders:
                what = f"{self._num_foreign_orders} iterations in a row"
                return self._fall_back(f"{what} ran other instructions, or in another order, than were registered")
            what = f"iteration {index} ran other instructions, or in another order, than were registered"
            return self._notice_rarely("order", f"{what}: it is not planned for")
        if pause_s is not None:
            what = f"{pause_s:.3g} s passed between iterations {index} and {index + 1}"
            return self._notice_rarely("pause", f"{what} (evaluation, checkpoint, waiting for others): left alone")
        return ()

    def _notice_rarely(self, kind: str, reason: str) -> tuple[Command, ...]:
        before = self._noticed_at.get(kind)
        if before is not None and self.num_iterations - before < self.rules.notice_every:
            return ()
        self._noticed_at[kind] = self.num_iterations
        self._notice(reason)
        return (RecordNotice(reason),)

    def _iteration_observed(self, observation: IterationObservation) -> tuple[Command, ...]:
        self._remember(observation)
        match self.phase:
            case JobPhase.WARMUP:
                return self._enter(JobPhase.BASELINE, "warm") if observation.is_regular else ()
            case JobPhase.BASELINE:
                return self._after_baseline_iteration()
            case JobPhase.PROFILING:
                return self._relieve() or self._ask()
            case JobPhase.TUNED:
                return self._after_tuned_iteration(observation)
            case JobPhase.FALLBACK:
                return self._after_fallback_iteration(observation)
            case JobPhase.JOINING | JobPhase.ENDED:
                return ()
            case _:
                assert_never(self.phase)

    def _remember(self, observation: IterationObservation) -> None:
        if observation.plan_id in self._plans_for_straggler:
            observation = replace(observation, is_imposed=True)
        self.observations.append(observation)
        if len(self.observations) > self.rules.max_observations:
            del self.observations[self._most_dispensable()]

    def _most_dispensable(self) -> int:
        """Return which observation goes first: a tuned one, else one at full speed, and never one of the newer half.

        The newest are what the guard judges a plan by, however many at full speed came before.
        """
        purposes = self._purposes()
        older = [purposes.get(o.plan_id) for o in self.observations[: max(1, self.rules.max_observations // 2)]]
        needed = {PlanPurpose.PROFILE, PlanPurpose.BASELINE}
        tuned = (i for i, purpose in enumerate(older) if purpose not in needed)
        at_full_speed = (i for i, purpose in enumerate(older) if purpose is PlanPurpose.BASELINE)
        return next(tuned, next(at_full_speed, 0))

    def _full_speed(self, *, since: int = 0) -> list[IterationObservation]:
        """Return the regular full-speed iterations, the first of each block (clocks still rising) left out."""
        kept = []
        full_speed = {plan_id for plan_id, purpose in self._purposes().items() if purpose is PlanPurpose.BASELINE}
        plan_id_before = None
        for o in self.observations:
            is_first_of_block = o.plan_id not in {BASELINE_PLAN_ID, plan_id_before}
            plan_id_before = o.plan_id
            if o.is_regular and o.iteration_index >= since and not is_first_of_block and o.plan_id in full_speed:
                kept.append(o)
        return kept

    def saving(self) -> MeasuredSaving | None:
        """Return what the plans in force are measured to save, None before there is enough to say so."""
        purposes = self._purposes()
        own = [o for o in self.observations if o.is_regular and not o.is_imposed]
        tuned = [o for o in own if not o.waited_s and purposes.get(o.plan_id) is PlanPurpose.TUNED]
        return measured_saving([o for o in self._full_speed() if not o.is_imposed and not o.waited_s], tuned)

    def _after_baseline_iteration(self) -> tuple[Command, ...]:
        full_speed = self._full_speed()
        if len(full_speed) < self.rules.baseline_iterations:
            return ()
        self.baseline = baseline_view(full_speed)
        return self._ask()

    def _after_tuned_iteration(self, observation: IterationObservation) -> tuple[Command, ...]:
        if self.purpose_of(observation.plan_id) is PlanPurpose.BASELINE and (full_speed := self._full_speed()):
            self.baseline = baseline_view(full_speed)
        self._num_tuned_seen += self.purpose_of(observation.plan_id) is PlanPurpose.TUNED
        return self._guard() or (*self._keep_model(), *(self._prove() or self._ask()))

    def _keep_model(self) -> tuple[Command, ...]:
        """Keep what a plan was made from once it has run for a while; the guard has found nothing wrong with it."""
        plan = self.current_plan
        if plan.purpose is not PlanPurpose.TUNED or plan.plan_id == self._kept_for_plan_id:
            return ()
        if sum(o.is_regular and o.plan_id == plan.plan_id for o in self.observations) < PROVEN_ITERATIONS:
            return ()
        self._kept_for_plan_id = plan.plan_id
        profile = [o for o in self.observations if self.purpose_of(o.plan_id) is PlanPurpose.PROFILE]
        model = model_of_run(self.description.job_id, self._full_speed(), profile, plan)
        if model is None and self.remembered is not None:
            model = replace(self.remembered, figures=plan.figures, is_of_this_run=False)
        return (KeepModel(model),) if model is not None else ()

    def _after_fallback_iteration(self, observation: IterationObservation) -> tuple[Command, ...]:
        if self._retry_at_iteration is None or observation.iteration_index < self._retry_at_iteration:
            return ()
        if self.baseline is None:
            return self._after_baseline_iteration()
        full_speed = self._full_speed(since=self._fell_back_at)
        if not full_speed:
            return ()
        before = [o for o in self._full_speed() if o.iteration_index < self._fell_back_at]
        change = what_changed(before, full_speed, at_least_ratio=self.rules.job_changed_ratio)
        if change is not None and self._is_still_changing(full_speed):
            return ()
        self.baseline = baseline_view(full_speed if change is not None else self._full_speed())
        if change is not None:
            self.num_faults = 0
            self._begin_anew(self._model_until_now(before), lambda o: o.iteration_index >= self._fell_back_at)
            return (self._note(f"the job changed: {change}"), *self._ask())
        if self._is_profile_endless or self._num_slow_plans >= self.rules.relearn_after_slow_plans:
            # Full speed and the next planned iterations may tell what was wrong; only if they do not, profile again.
            is_told_twice = self._is_profile_endless or self.remembered is not None
            known = None if is_told_twice else self._model_until_now(before)
            reason = f"{self._num_slow_plans} plans in a row were slow: "
            reason += "profiling again" if known is None else "what was learned is held against full speed again"
            if self._is_profile_endless:
                reason = "profiling did not end: profiling again, from the beginning"
            forget = (KeepModel(None),) if self.remembered is not None else ()
            self._begin_anew(known, lambda o: self.purpose_of(o.plan_id) is PlanPurpose.BASELINE)
            return (*forget, self._note(reason), *self._ask())
        return self._ask()

    def _is_still_changing(self, full_speed: Sequence[IterationObservation]) -> bool:
        """Return whether the newest iterations at full speed differ from those before them; not for ever.

        What is planned while a GPU still grows hotter is too slow a moment later.
        """
        recent = full_speed[-self.rules.fallback_iterations :]
        if len(full_speed) > self.rules.settling_iterations or len(recent) < self.rules.fallback_iterations:
            return len(recent) < self.rules.fallback_iterations
        half = len(recent) // 2
        return what_changed(recent[:half], recent[-half:], at_least_ratio=self.rules.settled_ratio) is not None

    def _model_until_now(self, full_speed: Sequence[IterationObservation]) -> RememberedModel | None:
        """Return what this run has shown, marked so that a policy takes its shape and not its pace."""
        profile = [o for o in self.observations if self.purpose_of(o.plan_id) is PlanPurpose.PROFILE]
        tuned = [plan for plan in self.issued_plans if plan.purpose is PlanPurpose.TUNED]
        proven = next((plan for plan in tuned if plan.plan_id == self._kept_for_plan_id), None)
        plan = proven or (tuned[0] if tuned else None)
        if plan is None:
            return None
        model = model_of_run(self.description.job_id, full_speed, profile, plan) or self.remembered
        return None if model is None else replace(model, figures=plan.figures, is_of_this_run=True)

    def _begin_anew(self, known: RememberedModel | None, is_kept: Callable[[IterationObservation], bool]) -> None:
        """Forget what was learned of the job but for a model of it, so that the policy begins anew."""
        self.observations = [o for o in self.observations if is_kept(o)]
        self.issued_plans = [plan for plan in self.issued_plans if plan.purpose is PlanPurpose.BASELINE]
        self.remembered = known
        self._owed_when_made.clear()
        self._is_profile_endless = False
        self._generation += 1
        self._num_slow_plans = 0
        self._num_tuned_seen = 0

    # --- plans ---

    def _ask(self) -> tuple[Command, ...]:
        if self._is_policy_asked:
            return ()
        view = self.view()
        if view is None:
            return ()
        if self.phase is JobPhase.PROFILING:
            num_profiled = sum(self.purpose_of(o.plan_id) is PlanPurpose.PROFILE for o in self.observations)
            if num_profiled >= self.rules.max_profile_iterations:
                self._is_profile_endless = True
                reason = f"still profiling after {num_profiled} iterations"
                return self._fall_back(reason, is_fault=True, least_wait=num_profiled)
        self._is_policy_asked = True
        self._asked_target = view.target
        return (AskPolicy(view),)

    def forget_question(self) -> None:
        """Await no answer any more: whoever was asked is gone."""
        self._is_policy_asked = self._is_answer_outdated = False

    def view(self) -> JobView | None:
        """Return what a policy may know; None until there is a baseline."""
        if self.schedule is None or self.baseline is None:
            return None
        return JobView(
            job_id=self.description.job_id,
            schedule=self.schedule,
            gpus=tuple(self.gpus[r] for r in range(self.schedule.num_ranks)),
            target=self.target,
            baseline=self.baseline,
            observations=tuple(self.observations),
            issued_plans=tuple(self.issued_plans),
            communication_latency_s=self._typical(lambda o: o.communication_latency_s),
            launch_gap_s=self._typical(lambda o: o.launch_gap_s),
            generation=self._generation,
            remembered=self.remembered,
        )

    def _typical(self, figure: Callable[[IterationObservation], float | None]) -> float:
        known = [value for o in self.observations if o.is_regular and (value := figure(o)) is not None]
        return median(known) if known else 0.0

    def _was_answer_awaited_before_fallback(self) -> bool:
        """Note that the policy has answered; return whether the job has fallen back since it was asked."""
        is_outdated, self._is_answer_outdated = self._is_answer_outdated, False
        self._is_policy_asked = False
        return is_outdated

    def _plan_decided(self, plan: ClockPlan) -> tuple[Command, ...]:
        if self._was_answer_awaited_before_fallback():
            return ()
        assert self.schedule is not None
        if self._profiling_refusal is not None and plan.purpose is PlanPurpose.PROFILE:
            return self._refuse_profiling(self._profiling_refusal)
        if self._asked_target != self._judged_by:
            self._judged_by = self._asked_target
            self._guarded_from = max(self._guarded_from, self._last_reported + 1)
        is_relieved, self._is_relieved = self._is_relieved, False
        if plan.plan_id == self.current_plan.plan_id and self.phase is not JobPhase.FALLBACK:
            return (*((self._issue(plan),) if is_relieved else ()), *self._enter_for(plan))
        try:
            check_plan(plan, self.schedule, [self.gpus[r].supported_sm_clocks_mhz for r in range(len(self.gpus))])
        except GpuEnergyError as error:
            return self._fall_back(f"policy {self.description.policy} answered nonsense: {error}", is_fault=True)
        before: tuple[Command, ...] = ()
        after: tuple[Command, ...] = ()
        if plan.ranks and not self._has_lease:
            self._has_lease = True
            before = (LeaseGpus(self._gpu_uuids()),)
        self.issued_plans.append(plan)
        if self._asked_target is not None and self.baseline is not None:
            self._owed_when_made[plan.plan_id] = self._asked_target.iteration_time_s(self.baseline.iteration_time_s)
            if self._asked_target.is_forced:
                self._plans_for_straggler.add(plan.plan_id)
        send = self._issue(plan)
        if not plan.ranks and self._has_lease:
            after = (self._give_back(plan),)
        return (*before, send, *after, *self._enter_for(plan))

    def _profiling_judged(self, refusal: str | None) -> tuple[Command, ...]:
        """Stop profiling that may not go on; what is refused before it began is refused when the policy asks for it."""
        self._profiling_refusal = refusal
        return self._refuse_profiling(refusal) if refusal is not None and self.phase is JobPhase.PROFILING else ()

    def _refuse_profiling(self, reason: str) -> tuple[Command, ...]:
        return self._fall_back(reason, least_wait=self.rules.refused_profiling_iterations)

    def _issue(self, plan: ClockPlan, *, after: int = 1) -> SendPlan:
        """Send a plan under the next epoch, at the earliest `after` iterations after the one sent last."""
        plan_epoch = max(self._plan_of_epoch) + 1
        self._plan_of_epoch[plan_epoch] = plan.plan_id
        for forgotten in [epoch for epoch in self._plan_of_epoch if epoch <= plan_epoch - _EPOCHS_KEPT]:
            del self._plan_of_epoch[forgotten]
        self._last_apply_at = max(self._last_reported + _ITERATIONS_AHEAD, self._last_apply_at + after)
        return SendPlan(plan, plan_epoch, self._last_apply_at)

    def _relieve(self) -> tuple[Command, ...]:
        """Let the job run at full speed while a policy thinks for long: profiling clocks are for one iteration."""
        plan = self.current_plan
        if self._is_relieved or not self._is_policy_asked or plan.purpose is not PlanPurpose.PROFILE:
            return ()
        if sum(o.plan_id == plan.plan_id for o in self.observations) < self.rules.relief_iterations:
            return ()
        self._is_relieved = True
        return (self._issue(self._full_speed_block("the policy is still thinking")),)

    def _full_speed_block(self, reason: str) -> ClockPlan:
        """Return iterations at full speed between those of the plan in force."""
        assert self.schedule is not None
        clocks = [self.gpus[r].supported_sm_clocks_mhz for r in range(self.schedule.num_ranks)]
        return full_speed_plan(PROOF_PLAN_ID, self.schedule, clocks, reason=reason)

    def _prove(self) -> tuple[Command, ...]:
        """Run a short block at full speed when one is due: before it and after it, the tuned plan."""
        rules, plan = self.rules, self.current_plan
        if not rules.proof_iterations or plan.purpose is not PlanPurpose.TUNED or not self._has_lease:
            return ()
        if self._last_apply_at > self._last_reported or self.target.is_forced:
            return ()
        is_first = self._num_proof_iterations == 0
        budget = rules.proof_budget_ratio * self.num_iterations
        is_due = (
            self._num_tuned_seen >= rules.first_proof_after
            if is_first
            else self._num_proof_iterations + rules.proof_iterations <= budget
        )
        if not is_due:
            return ()
        self._num_proof_iterations += rules.proof_iterations
        block = self._full_speed_block("proof of savings")
        return (self._issue(block), self._issue(plan, after=rules.proof_iterations))

    def _enter_for(self, plan: ClockPlan) -> tuple[Command, ...]:
        match plan.purpose:
            case PlanPurpose.PROFILE:
                return self._enter(JobPhase.PROFILING, plan.reason)
            case PlanPurpose.BASELINE if self.phase is JobPhase.PROFILING and plan.ranks:
                return self._enter(JobPhase.PROFILING, plan.reason)
            case PlanPurpose.TUNED | PlanPurpose.BASELINE | PlanPurpose.WOULD_BE:
                return self._enter(JobPhase.TUNED, plan.reason)
            case _:
                assert_never(plan.purpose)

    # --- stragglers ---

    def _straggler_changed(self, event: StragglerChanged) -> tuple[Command, ...]:
        """Follow the pace of the slowest replica: ask for a plan at once, and until it comes be never too slow."""
        before_s, self.target = self._owed_s(), replace(self.target, straggler_time_s=event.straggler_time_s)
        owed_s = self._owed_s()
        self._notice(event.reason)
        if self.phase is not JobPhase.TUNED or before_s is None or owed_s is None:
            return ()
        hurry = self._hurry(owed_s) if owed_s < before_s else ()
        return (*hurry, *self._ask())

    def _owed_s(self) -> float | None:
        return None if self.baseline is None else self.target.iteration_time_s(self.baseline.iteration_time_s)

    def _hurry(self, owed_s: float) -> tuple[Command, ...]:
        """Go back to the newest plan that is fast enough, or to full speed: nobody waits for a policy to think."""
        self._is_answer_outdated = self._is_policy_asked
        plan = self.current_plan
        if plan.purpose is not PlanPurpose.TUNED or self._is_fast_enough(plan, owed_s):
            return ()
        fitting = (p for p in reversed(self.issued_plans) if p.purpose is PlanPurpose.TUNED)
        earlier = next((p for p in fitting if self._is_fast_enough(p, owed_s)), None)
        if earlier is None:
            self._is_relieved = True
            return (self._issue(self._full_speed_block("a straggler has recovered")),)
        self.issued_plans.append(earlier)
        self._judged_by = self.target
        send = self._issue(earlier)
        self._guarded_from = max(self._guarded_from, self._last_apply_at)
        return (send,)

    def _is_fast_enough(self, plan: ClockPlan, owed_s: float) -> bool:
        made_for_s = self._owed_when_made.get(plan.plan_id)
        return made_for_s is not None and made_for_s <= owed_s * (1 + _SAME_TIME_RATIO)

    # --- safety ---

    def _guard(self) -> tuple[Command, ...]:
        plan = self.current_plan
        if plan.purpose is not PlanPurpose.TUNED or self.baseline is None:
            return ()
        recent = [
            o
            for o in self.observations
            if o.is_regular and o.plan_id == plan.plan_id and o.iteration_index >= self._guarded_from
        ]
        verdict = judge(recent, plan, self.baseline, self._judged_by or self.target, self.rules.guard)
        if verdict is None:
            if len(recent) >= self.rules.redeeming_iterations:
                self.num_faults = self._num_slow_plans = 0
            return ()
        finding, line = verdict
        is_slow = finding is Finding.TOO_SLOW
        self._num_slow_plans += is_slow
        return self._fall_back(line, is_fault=is_slow)

    def _fall_back(self, reason: str, *, is_fault: bool = False, least_wait: int = 0) -> tuple[Command, ...]:
        """Go back to full speed; after a fault the policy gets another chance, a limited number of times.

        `least_wait` iterations are waited for that chance after a first fault, if that is more than usual.
        """
        if self.schedule is None:
            return ()
        commands: tuple[Command, ...] = ()
        if self.current_plan.ranks:
            self._num_fallbacks += 1
            plan = untuned_plan(f"full-speed-{self._num_fallbacks}", reason=reason)
            self.issued_plans.append(plan)
            commands = (self._issue(plan), self._give_back(plan))
        self._notice(reason)
        self._has_lease = False
        self._is_relieved = False
        self._is_answer_outdated = self._is_policy_asked
        self._fell_back_at = max(self._disturbed_before, self._last_reported + 1)
        self.num_faults += is_fault
        if self.num_faults > self.rules.max_faults:
            self._retry_at_iteration = None
        else:
            wait = max(self.rules.fallback_iterations, least_wait) * 2 ** max(0, self.num_faults - 1)
            self._guarded_from = max(self._last_apply_at, self._last_reported) + wait
            self._retry_at_iteration = self._guarded_from
        return (*commands, *self._enter(JobPhase.FALLBACK, reason))

    def _give_back(self, plan: ClockPlan) -> RestoreGpus:
        """Return the command that ends our control, for an un-tuned plan that has just been issued."""
        # Clocks are back at once, the ranks hear of it later: what runs in between belongs to neither plan.
        self._has_lease = False
        self._disturbed_before = max(self._last_apply_at, self._last_reported + _ITERATIONS_AHEAD)
        return RestoreGpus(self._gpu_uuids(), plan.reason)

    def _end(self, reason: str) -> tuple[Command, ...]:
        restore = (RestoreGpus(self._gpu_uuids(), reason),) if self._has_lease else ()
        self._has_lease = False
        return (*restore, *self._enter(JobPhase.ENDED, reason), EndJob(reason))

    def _note(self, reason: str) -> RecordPhase:
        """Return the command that records why the job goes on differently in the phase it is in."""
        self.phase_reason = reason
        self._notice(reason)
        return RecordPhase(self.phase, reason)

    def _notice(self, reason: str) -> None:
        self.last_notice, self.last_notice_at = reason, self.num_iterations

    def _gpu_uuids(self) -> tuple[str, ...]:
        return tuple(self.gpus[r].gpu_uuid for r in sorted(self.gpus))

    def _enter(self, phase: JobPhase, reason: str) -> tuple[Command, ...]:
        if phase is self.phase:
            self.phase_reason = reason or self.phase_reason
            return ()
        self.phase, self.phase_reason = phase, reason
        return (RecordPhase(phase, reason),)
