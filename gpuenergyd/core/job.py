"""The life of one job as a pure state machine: events in through one door, commands out.

Theory of operation. A job is joined by its ranks, warms up, and runs `baseline_iterations` un-tuned: all slowdown and
all saving is judged against those. Then, after each iteration that all ranks have reported and that the GPUs'
samples have been matched with, the policy is asked for a plan. A new plan gets the next epoch and an iteration from
which all ranks follow it, late enough that every rank has heard of it by then:

    iteration     i            i+1             i+2             i+3
    rank          runs   posts i, runs   posts i+1, gets P    follows P
    core                 observes i, asks policy, decides P

so a policy that answers with a new plan each time tries one plan per iteration. The guard is here and not in the
policy: while a tuned plan runs slower than owed, the job goes back to full speed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import assert_never

from gpuenergyd.core.messages import (
    AskPolicy,
    Command,
    ControlLost,
    EndJob,
    Event,
    GpuViewChanged,
    IterationObserved,
    JobPhase,
    LeaseGpus,
    ObserveIteration,
    PlanDecided,
    PolicyFailed,
    RankJoined,
    RankLost,
    RankReleased,
    RankReported,
    RecordPhase,
    RestoreGpus,
    SendPlan,
    TargetChanged,
)
from gpuenergyd.core.observation import IterationObservation
from gpuenergyd.core.pipeline import Instruction, Schedule, dependency_graph
from gpuenergyd.core.plan import BASELINE_PLAN_ID, ClockPlan, PlanPurpose, check_plan, untuned_plan
from gpuenergyd.core.policy import BaselineView, GpuView, JobView
from gpuenergyd.core.target import PerformanceTarget
from gpuenergyd.core.telemetry import RankIteration
from gpuenergyd.errors import GpuEnergyError, JobError

_ITERATIONS_AHEAD = 3
"""A plan decided after iteration i reaches every rank with the reply to report i+1, which is read during i+2."""


@dataclass(frozen=True, slots=True)
class JobRules:
    """How a job is run; the same for all policies."""

    warmup_iterations: int = 2
    baseline_iterations: int = 10
    guard_iterations: int = 6
    """Regular iterations of one tuned plan over which the guard judges."""
    guard_margin_ratio: float = 0.02
    """How much slower than owed the median of those may be before the guard takes over."""
    fallback_iterations: int = 10
    """Un-tuned iterations after a fault, before the policy is asked again."""
    max_faults: int = 3
    """After so many faults (guard trips, policy failures, lost control) the job stays at full speed."""
    max_profile_iterations: int = 120
    """A policy that is still profiling after so many iterations is not asked again."""
    pause_ratio: float = 3.0
    """An iteration this much longer than the baseline was interrupted (evaluation, checkpoint): not regular."""
    max_observations: int = 192


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
    num_iterations: int = 0
    num_faults: int = 0
    _orders: dict[int, tuple[Instruction, ...]] = field(default_factory=dict)
    _reports: dict[int, dict[int, RankIteration]] = field(default_factory=dict)
    _plan_of_epoch: dict[int, str] = field(default_factory=lambda: {0: BASELINE_PLAN_ID})
    _last_apply_at: int = 0
    _last_reported: int = -1
    _is_policy_asked: bool = False
    _has_lease: bool = False
    _retry_at_iteration: int | None = None
    _first_iteration: int | None = None
    _guarded_from: int = 0
    _disturbed_before: int = 0

    def __post_init__(self) -> None:
        self.target = self.description.target

    @property
    def is_ended(self) -> bool:
        """Whether the job is over."""
        return self.phase is JobPhase.ENDED

    @property
    def current_plan(self) -> ClockPlan:
        """The plan in force, or about to be."""
        return self.issued_plans[-1] if self.issued_plans else untuned_plan()

    def plan_by_id(self, plan_id: str | None) -> ClockPlan | None:
        """Return an issued plan."""
        return next((plan for plan in reversed(self.issued_plans) if plan.plan_id == plan_id), None)

    def purpose_of(self, plan_id: str | None) -> PlanPurpose | None:
        """Return what the iterations of a plan are for; None for iterations under mixed plans."""
        if plan_id == BASELINE_PLAN_ID:
            return PlanPurpose.BASELINE
        plan = self.plan_by_id(plan_id)
        return plan.purpose if plan else None

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
            case PlanDecided():
                return self._plan_decided(event.plan)
            case PolicyFailed():
                self._is_policy_asked = False
                return self._fall_back(f"policy {self.description.policy} failed: {event.reason}", is_fault=True)
            case GpuViewChanged():
                if event.pp_rank in self.gpus:
                    self.gpus[event.pp_rank] = event.gpu
                return ()
            case ControlLost():
                return self._fall_back(event.reason, is_fault=True)
            case TargetChanged():
                self.target = event.target
                return ()
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
        is_regular = (
            plan_id is not None
            and index >= self._first_iteration + self.rules.warmup_iterations
            and index >= self._disturbed_before
            and all(len(r.instructions) == len(self._orders[r.pp_rank]) for r in reports.values())
            and reports[0].next_begin_ns > 0
        )
        return (ObserveIteration(tuple(reports[r] for r in sorted(reports)), plan_id, is_regular),)

    def _iteration_observed(self, observation: IterationObservation) -> tuple[Command, ...]:
        if (
            self.baseline is not None
            and observation.iteration_time_s > self.rules.pause_ratio * self.baseline.iteration_time_s
        ):
            observation = replace(observation, is_regular=False)
        self._remember(observation)
        match self.phase:
            case JobPhase.WARMUP:
                return self._enter(JobPhase.BASELINE, "warm") if observation.is_regular else ()
            case JobPhase.BASELINE:
                return self._after_baseline_iteration()
            case JobPhase.PROFILING | JobPhase.TUNED:
                return self._guard() or self._ask()
            case JobPhase.FALLBACK:
                return self._after_fallback_iteration(observation)
            case JobPhase.JOINING | JobPhase.ENDED:
                return ()
            case _:
                assert_never(self.phase)

    def _remember(self, observation: IterationObservation) -> None:
        self.observations.append(observation)
        if len(self.observations) > self.rules.max_observations:
            oldest_dispensable = next(
                (
                    i
                    for i, known in enumerate(self.observations)
                    if self.purpose_of(known.plan_id) not in {PlanPurpose.PROFILE, PlanPurpose.BASELINE}
                ),
                0,
            )
            del self.observations[oldest_dispensable]

    def _after_baseline_iteration(self) -> tuple[Command, ...]:
        regular = [o for o in self.observations if o.is_regular and o.plan_id == BASELINE_PLAN_ID]
        if len(regular) < self.rules.baseline_iterations:
            return ()
        energies = [o.energy_j for o in regular if o.energy_j is not None]
        self.baseline = BaselineView(
            iteration_time_s=median(o.iteration_time_s for o in regular),
            energy_j=median(energies) if energies else None,
            num_iterations=len(regular),
        )
        return self._ask()

    def _after_fallback_iteration(self, observation: IterationObservation) -> tuple[Command, ...]:
        if self._retry_at_iteration is None or observation.iteration_index < self._retry_at_iteration:
            return ()
        return self._after_baseline_iteration() if self.baseline is None else self._ask()

    # --- plans ---

    def _ask(self) -> tuple[Command, ...]:
        view = self.view()
        if view is None or self._is_policy_asked:
            return ()
        num_profiled = sum(self.purpose_of(o.plan_id) is PlanPurpose.PROFILE for o in self.observations)
        if self.phase is JobPhase.PROFILING and num_profiled >= self.rules.max_profile_iterations:
            return self._fall_back(f"still profiling after {num_profiled} iterations", is_final=True)
        self._is_policy_asked = True
        return (AskPolicy(view),)

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
        )

    def _typical(self, figure: Callable[[IterationObservation], float | None]) -> float:
        known = [value for o in self.observations if o.is_regular and (value := figure(o)) is not None]
        return median(known) if known else 0.0

    def _plan_decided(self, plan: ClockPlan) -> tuple[Command, ...]:
        self._is_policy_asked = False
        assert self.schedule is not None
        if plan.plan_id == self.current_plan.plan_id and self.phase is not JobPhase.FALLBACK:
            return self._enter_for(plan)
        try:
            check_plan(plan, self.schedule, [self.gpus[r].supported_sm_clocks_mhz for r in range(len(self.gpus))])
        except GpuEnergyError as error:
            return self._fall_back(f"policy {self.description.policy} answered nonsense: {error}", is_fault=True)
        commands: tuple[Command, ...] = ()
        if plan.ranks and not self._has_lease:
            self._has_lease = True
            commands = (LeaseGpus(tuple(self.gpus[r].gpu_uuid for r in sorted(self.gpus))),)
        return (*commands, self._issue(plan), *self._enter_for(plan))

    def _issue(self, plan: ClockPlan) -> SendPlan:
        plan_epoch = max(self._plan_of_epoch) + 1
        self._plan_of_epoch[plan_epoch] = plan.plan_id
        self._last_apply_at = max(self._last_reported + _ITERATIONS_AHEAD, self._last_apply_at + 1)
        self.issued_plans.append(plan)
        return SendPlan(plan, plan_epoch, self._last_apply_at)

    def _enter_for(self, plan: ClockPlan) -> tuple[Command, ...]:
        match plan.purpose:
            case PlanPurpose.PROFILE:
                return self._enter(JobPhase.PROFILING, plan.reason)
            case PlanPurpose.TUNED | PlanPurpose.BASELINE:
                return self._enter(JobPhase.TUNED, plan.reason)
            case _:
                assert_never(plan.purpose)

    # --- safety ---

    def _guard(self) -> tuple[Command, ...]:
        plan = self.current_plan
        if plan.purpose is not PlanPurpose.TUNED or self.baseline is None:
            return ()
        recent = [
            o
            for o in self.observations
            if o.is_regular and o.plan_id == plan.plan_id and o.iteration_index >= self._guarded_from
        ][-self.rules.guard_iterations :]
        if len(recent) < self.rules.guard_iterations:
            return ()
        measured_s = median(o.iteration_time_s for o in recent)
        allowed_s = self.target.iteration_time_s(self.baseline.iteration_time_s) * (1 + self.rules.guard_margin_ratio)
        if measured_s <= allowed_s:
            return ()
        return self._fall_back(
            f"plan {plan.plan_id!r} takes {measured_s:.4g} s per iteration, {allowed_s:.4g} s are allowed",
            is_fault=True,
        )

    def _fall_back(self, reason: str, *, is_fault: bool = False, is_final: bool = False) -> tuple[Command, ...]:
        """Go back to full speed; after a fault the policy gets another chance, a limited number of times."""
        if self.schedule is None:
            return ()
        commands: tuple[Command, ...] = ()
        if self.current_plan.ranks:
            number = sum(p.purpose is PlanPurpose.BASELINE for p in self.issued_plans) + 1
            commands = (
                self._issue(untuned_plan(f"full-speed-{number}", reason=reason)),
                RestoreGpus(self._gpu_uuids(), reason),
            )
            # Clocks are back at once, the ranks hear of it later: what runs in between belongs to neither plan.
            self._disturbed_before = self._last_apply_at
        self._has_lease = False
        self.num_faults += is_fault
        if is_final or self.num_faults > self.rules.max_faults:
            self._retry_at_iteration = None
        else:
            self._retry_at_iteration = max(self._last_apply_at, self._last_reported) + self.rules.fallback_iterations
            self._guarded_from = self._retry_at_iteration
        return (*commands, *self._enter(JobPhase.FALLBACK, reason))

    def _end(self, reason: str) -> tuple[Command, ...]:
        restore = (RestoreGpus(self._gpu_uuids(), reason),) if self._has_lease else ()
        self._has_lease = False
        return (*restore, *self._enter(JobPhase.ENDED, reason), EndJob(reason))

    def _gpu_uuids(self) -> tuple[str, ...]:
        return tuple(self.gpus[r].gpu_uuid for r in sorted(self.gpus))

    def _enter(self, phase: JobPhase, reason: str) -> tuple[Command, ...]:
        if phase is self.phase:
            self.phase_reason = reason or self.phase_reason
            return ()
        self.phase, self.phase_reason = phase, reason
        return (RecordPhase(phase, reason),)
