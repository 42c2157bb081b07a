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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.faults import Faults, is_settled
from gpuenergyd.core.job.guard import Finding, judge, what_changed
from gpuenergyd.core.job.history import RememberedIterations
from gpuenergyd.core.job.issued_plans import PROOF_PLAN_ID, IssuedPlans
from gpuenergyd.core.job.messages import (
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
from gpuenergyd.core.job.rank_reports import RankReports, WholeIteration
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.savings import MeasuredSaving, baseline_view
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.pipeline.graph import Instruction, Schedule
from gpuenergyd.core.pipeline.plan import (
    ClockPlan,
    PlanPurpose,
    baseline_plan,
    check_plan,
    full_speed_plan,
)
from gpuenergyd.core.policy_api.policy import BaselineView, GpuView, JobView
from gpuenergyd.core.policy_api.previous_run import PROVEN_ITERATIONS, PreviousRun, summarize_run
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import GpuEnergyError, JobError


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
    plans: IssuedPlans = field(default_factory=IssuedPlans)
    iterations: RememberedIterations = field(init=False)
    reports: RankReports = field(init=False)
    faults: Faults = field(init=False)
    previous_run: PreviousRun | None = None
    """What an earlier run of this job showed, until it is forgotten."""
    last_notice: str | None = None
    """What was last noticed of the job that made it go on differently, and after how many of its iterations."""
    last_notice_at: int | None = None
    _orders: dict[int, tuple[Instruction, ...]] = field(default_factory=dict)
    _is_policy_asked: bool = False
    _asked_target: PerformanceTarget | None = None
    _judged_by: PerformanceTarget | None = None
    """The target that the plan in force was made, or kept, for."""
    _is_answer_outdated: bool = False
    _has_lease: bool = False
    _guarded_from: int = 0
    _disturbed_before: int = 0
    _num_tuned_seen: int = 0
    _is_relieved: bool = False
    _generation: int = 0
    _num_proof_iterations: int = 0
    _profiling_refusal: str | None = None
    _noticed_at: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.target = self.description.target
        self.iterations = RememberedIterations(self.rules.max_observations)
        self.reports = RankReports(self.rules)
        self.faults = Faults(self.rules)

    @property
    def is_ended(self) -> bool:
        """Whether the job is over."""
        return self.phase is JobPhase.ENDED

    @property
    def is_given_up(self) -> bool:
        """Whether the job has fallen back to full speed for good."""
        return self.phase is JobPhase.FALLBACK and self.faults.retry_at_iteration is None

    @property
    def retry_in_iterations(self) -> int | None:
        """Iterations until a job that has fallen back is planned for again, None while nothing is awaited."""
        if self.phase is not JobPhase.FALLBACK or self.faults.retry_at_iteration is None:
            return None
        return max(0, self.faults.retry_at_iteration - self.reports.last_index)

    @property
    def num_faults(self) -> int:
        """Faults that nothing has made up for."""
        return self.faults.num_faults

    @property
    def num_iterations(self) -> int:
        """Whole iterations so far."""
        return self.reports.num_iterations

    @property
    def observations(self) -> Sequence[IterationObservation]:
        """The iterations that are remembered, oldest first."""
        return self.iterations.kept

    @property
    def issued_plans(self) -> Sequence[ClockPlan]:
        """The plans that still count, oldest first."""
        return self.plans.kept

    @property
    def current_plan(self) -> ClockPlan:
        """The plan in force, or about to be."""
        return self.plans.current

    def plan_id_of(self, plan_epoch: int | None) -> str | None:
        """Return the plan that was sent under an epoch; None for an epoch that is not ours."""
        return self.plans.id_of(plan_epoch)

    def purpose_of(self, plan_id: str | None) -> PlanPurpose | None:
        """Return what the iterations of a plan are for; None for iterations under mixed plans."""
        return self.plans.purpose_of(plan_id)

    def saving(self) -> MeasuredSaving | None:
        """Return what the plans in force are measured to save, None before there is enough to say so."""
        return self.iterations.saving(self.plans.purposes())

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
                    self.previous_run = event.model
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
        schedule = description.schedule_of(orders) if len(orders) == description.num_pp_ranks else None
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
        whole = self.reports.take(report, self._orders, self.plans.id_of, counts_from=self._disturbed_before)
        if whole is None:
            return ()
        return (ObserveIteration(whole.ranks, whole.plan_id, whole.is_regular), *self._disturbance(whole))

    def _observed_elsewhere(self, event: ObservedElsewhere) -> tuple[Command, ...]:
        if self.schedule is None:
            return ()
        observation = event.observation
        index = observation.iteration_index
        is_warm = self.reports.count(index)
        plan_id = self.plans.id_of(event.plan_epoch)
        is_regular = plan_id is not None and observation.is_regular and is_warm and index >= self._disturbed_before
        return self._iteration_observed(replace(observation, plan_id=plan_id, is_regular=is_regular))

    def _disturbance(self, whole: WholeIteration) -> tuple[Command, ...]:
        """Say why an iteration counts for nothing, and give clocks back that were planned for another order."""
        index, num_foreign = whole.iteration_index, self.reports.num_foreign_orders
        if not whole.is_in_order:
            is_planned_for = self.phase in {JobPhase.PROFILING, JobPhase.TUNED} and self.current_plan.ranks
            if is_planned_for and num_foreign >= self.rules.foreign_orders:
                what = f"{num_foreign} iterations in a row"
                return self._fall_back(f"{what} ran other instructions, or in another order, than were registered")
            what = f"iteration {index} ran other instructions, or in another order, than were registered"
            return self._notice_rarely("order", f"{what}: it is not planned for")
        if whole.pause_s is not None:
            what = f"{whole.pause_s:.3g} s passed between iterations {index} and {index + 1}"
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
        if self.plans.is_for_straggler(observation.plan_id):
            observation = replace(observation, is_at_straggler_pace=True)
        self.iterations.add(observation, self.plans.purposes())
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

    def _full_speed(self, *, since: int = 0) -> list[IterationObservation]:
        return self.iterations.at_full_speed(self.plans.purposes(), since=since)

    def _profiled(self) -> list[IterationObservation]:
        return self.iterations.that_profiled(self.plans.purposes())

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
        if plan.purpose is not PlanPurpose.TUNED or plan.plan_id == self.plans.proven_id:
            return ()
        if len(self.iterations.regular_under(plan.plan_id)) < PROVEN_ITERATIONS:
            return ()
        self.plans.proven_id = plan.plan_id
        model = summarize_run(self.description.job_id, self._full_speed(), self._profiled(), plan)
        if model is None and self.previous_run is not None:
            model = replace(self.previous_run, figures=plan.figures, is_of_this_run=False)
        return (KeepModel(model),) if model is not None else ()

    def _after_fallback_iteration(self, observation: IterationObservation) -> tuple[Command, ...]:
        if not self.faults.is_retry_due(observation.iteration_index):
            return ()
        if self.baseline is None:
            return self._after_baseline_iteration()
        full_speed = self._full_speed(since=self.faults.fell_back_at)
        if not full_speed:
            return ()
        before = [o for o in self._full_speed() if o.iteration_index < self.faults.fell_back_at]
        change = what_changed(before, full_speed, at_least_ratio=self.rules.job_changed_ratio)
        if change is not None and not is_settled(full_speed, self.rules):
            return ()
        self.baseline = baseline_view(full_speed if change is not None else self._full_speed())
        if change is not None:
            self.faults.num_faults = 0
            self._begin_anew(self._model_until_now(before), lambda o: o.iteration_index >= self.faults.fell_back_at)
            return (self._note(f"the job changed: {change}"), *self._ask())
        if self.faults.is_model_in_doubt:
            # Full speed and the next planned iterations may tell what was wrong; only if they do not, profile again.
            is_told_twice = self.faults.is_profile_endless or self.previous_run is not None
            known = None if is_told_twice else self._model_until_now(before)
            reason = self.faults.why_learn_anew(is_profiling_again=known is None)
            forget = (KeepModel(None),) if self.previous_run is not None else ()
            self._begin_anew(known, lambda o: self.purpose_of(o.plan_id) is PlanPurpose.BASELINE)
            return (*forget, self._note(reason), *self._ask())
        return self._ask()

    def _model_until_now(self, full_speed: Sequence[IterationObservation]) -> PreviousRun | None:
        """Return what this run has shown, marked so that a policy takes its shape and not its pace."""
        plan = self.plans.proven_or_first_tuned()
        if plan is None:
            return None
        model = summarize_run(self.description.job_id, full_speed, self._profiled(), plan) or self.previous_run
        return None if model is None else replace(model, figures=plan.figures, is_of_this_run=True)

    def _begin_anew(self, known: PreviousRun | None, is_kept: Callable[[IterationObservation], bool]) -> None:
        """Forget what was learned of the job but for a model of it, so that the policy begins anew."""
        self.iterations.kept = [o for o in self.iterations.kept if is_kept(o)]
        self.plans.begin_anew()
        self.previous_run = known
        self.faults.begin_anew()
        self._generation += 1
        self._num_tuned_seen = 0

    # --- plans ---

    def _ask(self) -> tuple[Command, ...]:
        if self._is_policy_asked:
            return ()
        view = self.view()
        if view is None:
            return ()
        if self.phase is JobPhase.PROFILING:
            num_profiled = len(self._profiled())
            if num_profiled >= self.rules.max_profile_iterations:
                self.faults.is_profile_endless = True
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
            observations=tuple(self.iterations.kept),
            issued_plans=tuple(self.plans.kept),
            num_dropped_plans=dict(self.plans.num_dropped),
            communication_latency_s=self.iterations.typical(lambda o: o.communication_latency_s),
            launch_gap_s=self.iterations.typical(lambda o: o.launch_gap_s),
            generation=self._generation,
            previous_run=self.previous_run,
        )

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
            self._guarded_from = max(self._guarded_from, self.reports.last_index + 1)
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
        self._add(plan)
        if (asked := self._asked_target) is not None and self.baseline is not None:
            target_s = asked.iteration_time_s(self.baseline.iteration_time_s)
            self.plans.record_target(plan.plan_id, target_s, is_forced=asked.is_forced)
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

    def _add(self, plan: ClockPlan) -> None:
        self.plans.add(plan, (o.plan_id for o in self.iterations.kept))

    def _issue(self, plan: ClockPlan, *, after: int = 1) -> SendPlan:
        return self.plans.send(plan, last_reported=self.reports.last_index, after=after)

    def _relieve(self) -> tuple[Command, ...]:
        """Let the job run at full speed while a policy thinks for long: profiling clocks are for one iteration."""
        plan = self.current_plan
        if self._is_relieved or not self._is_policy_asked or plan.purpose is not PlanPurpose.PROFILE:
            return ()
        if sum(o.plan_id == plan.plan_id for o in self.iterations.kept) < self.rules.relief_iterations:
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
        if self.plans.last_apply_at > self.reports.last_index or self.target.is_forced:
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
            case PlanPurpose.TUNED | PlanPurpose.BASELINE | PlanPurpose.PREDICTED:
                return self._enter(JobPhase.TUNED, plan.reason)
            case _:
                assert_never(plan.purpose)

    # --- stragglers ---

    def _straggler_changed(self, event: StragglerChanged) -> tuple[Command, ...]:
        """Follow the pace of the slowest replica: ask for a plan at once, and until it comes be never too slow."""
        before_s, self.target = self._target_s(), replace(self.target, straggler_time_s=event.straggler_time_s)
        target_s = self._target_s()
        self._notice(event.reason)
        if self.phase is not JobPhase.TUNED or before_s is None or target_s is None:
            return ()
        hurry = self._hurry(target_s) if target_s < before_s else ()
        return (*hurry, *self._ask())

    def _target_s(self) -> float | None:
        return None if self.baseline is None else self.target.iteration_time_s(self.baseline.iteration_time_s)

    def _hurry(self, target_s: float) -> tuple[Command, ...]:
        """Go back to the newest plan that is fast enough, or to full speed: nobody waits for a policy to think."""
        self._is_answer_outdated = self._is_policy_asked
        plan = self.current_plan
        if plan.purpose is not PlanPurpose.TUNED or self.plans.is_fast_enough(plan, target_s):
            return ()
        earlier = self.plans.newest_fast_enough(target_s)
        if earlier is None:
            self._is_relieved = True
            return (self._issue(self._full_speed_block("a straggler has recovered")),)
        self._add(earlier)
        self._judged_by = self.target
        send = self._issue(earlier)
        self._guarded_from = max(self._guarded_from, self.plans.last_apply_at)
        return (send,)

    # --- safety ---

    def _guard(self) -> tuple[Command, ...]:
        plan = self.current_plan
        if plan.purpose is not PlanPurpose.TUNED or self.baseline is None:
            return ()
        recent = self.iterations.regular_under(plan.plan_id, since=self._guarded_from)
        verdict = judge(recent, plan, self.baseline, self._judged_by or self.target, self.rules.guard)
        if verdict is None:
            if len(recent) >= self.rules.redeeming_iterations:
                self.faults.redeem()
            return ()
        finding, line = verdict
        is_slow = finding is Finding.TOO_SLOW
        self.faults.num_slow_plans += is_slow
        return self._fall_back(line, is_fault=is_slow)

    def _fall_back(self, reason: str, *, is_fault: bool = False, least_wait: int = 0) -> tuple[Command, ...]:
        """Go back to full speed; the policy gets another chance, after faults a limited number of times."""
        if self.schedule is None:
            return ()
        commands: tuple[Command, ...] = ()
        if self.current_plan.ranks:
            self.faults.num_fallbacks += 1
            plan = baseline_plan(f"full-speed-{self.faults.num_fallbacks}", reason=reason)
            self._add(plan)
            commands = (self._issue(plan), self._give_back(plan))
        self._notice(reason)
        self._has_lease = False
        self._is_relieved = False
        self._is_answer_outdated = self._is_policy_asked
        retry_at = self.faults.fell_back(
            at_iteration=max(self._disturbed_before, self.reports.last_index + 1),
            wait_from=max(self.plans.last_apply_at, self.reports.last_index),
            is_fault=is_fault,
            least_wait=least_wait,
        )
        if retry_at is not None:
            self._guarded_from = retry_at
        return (*commands, *self._enter(JobPhase.FALLBACK, reason))

    def _give_back(self, plan: ClockPlan) -> RestoreGpus:
        """Return the command that ends our control, for an un-tuned plan that has just been issued."""
        # Clocks are back at once, the ranks hear of it later: what runs in between belongs to neither plan.
        self._has_lease = False
        self._disturbed_before = self.plans.last_apply_at
        return RestoreGpus(self._gpu_uuids(), plan.reason)

    def _end(self, reason: str) -> tuple[Command, ...]:
        restore = (RestoreGpus(self._gpu_uuids(), reason),) if self._has_lease else ()
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
