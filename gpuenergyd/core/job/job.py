"""State machine of one job: handles one event at a time and returns commands; pure, without I/O and without a clock.

Theory of operation. A job is joined by its ranks, warms up, and runs `baseline_iterations` at full speed, the baseline
of every saving and slowdown. From then on, after each iteration that all ranks have reported and that was matched with
the GPUs' samples, the policy is asked for a plan. A new plan gets the next epoch, and a first iteration that is late
enough for every rank to have received it:

    iteration     i            i+1             i+2             i+3
    rank          runs   posts i, runs   posts i+1, gets P    follows P
    daemon               observes i, asks policy, decides P

A policy that answers with a new plan each time therefore tries one plan per iteration. Short blocks at full speed
between tuned iterations keep the baseline current and measure the saving. The guard is independent of the policy: if a
tuned plan is slower than the target, the job goes back to full speed and its baseline is measured again (`recovery`).
Each fault doubles the wait until the next attempt; a plan that holds for long clears the faults.

Longer than 400 lines, since the transitions of one machine are read together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from gpuenergyd.core.job.control.faults import Faults
from gpuenergyd.core.job.control.plan_control import PlanControl, phase_under
from gpuenergyd.core.job.control.recovery import recover
from gpuenergyd.core.job.description import JobDescription, JobRanks
from gpuenergyd.core.job.guard import Finding
from gpuenergyd.core.job.issued_plans import ITERATIONS_AHEAD
from gpuenergyd.core.job.measurements.knowledge import JobKnowledge
from gpuenergyd.core.job.measurements.rank_reports import RankReports, WholeIteration
from gpuenergyd.core.job.measurements.savings import SavingEstimate, baseline_view
from gpuenergyd.core.job.messages import (
    AskPolicy,
    Command,
    ControlLost,
    EndJob,
    Event,
    GpuViewChanged,
    IterationObserved,
    JobPhase,
    MergedIterationObserved,
    ObserveIteration,
    OperatorOrdered,
    OrdersRefused,
    PastJobsFound,
    PlanDecided,
    PolicyFailed,
    PowerCutChanged,
    PowerTargetChanged,
    ProfilingPermissionChanged,
    RankChangedMicrobatches,
    RankJoined,
    RankLost,
    RankReleased,
    RankReported,
    RecordIteration,
    RecordNotice,
    RecordPhase,
    ReplicaBlockBegins,
    StageMemoryChanged,
    StoreCurves,
    StoreOrderRefusal,
    StragglerChanged,
    TargetChanged,
)
from gpuenergyd.core.job.operator_orders import OperatorOrders, choices_of
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.snapshot import JobSnapshot
from gpuenergyd.core.job.story import Notices, Story
from gpuenergyd.core.job.time_account import TimeAccount
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.learned_curves import problem_of_curves
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, SavingAdvice, check_plan
from gpuenergyd.core.pipeline.reorder import OrderAdvice
from gpuenergyd.core.policy_api.policy import BaselineView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuEnergyError

_PAUSED = "paused by an operator"
_BEFORE_PROFILING = frozenset({JobPhase.JOINING, JobPhase.WARMUP, JobPhase.BASELINE})


@dataclass(slots=True)
class Job:
    """One training run on one pipeline; the only owner of its state, called from the event loop only."""

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
    """The policy's newest advice on the permitted slowdown; not part of the snapshot: it is given again."""
    orders: OperatorOrders = field(default_factory=OperatorOrders)
    """What operators have ordered; in the description already."""
    _as_registered: OperatorOrders = field(init=False)
    _profiling_refusal: str | None = None
    _before_end: tuple[JobPhase, str] | None = None
    _story: Story = field(default_factory=Story, compare=False)

    def __post_init__(self) -> None:
        self.target = self.description.target
        self._as_registered = choices_of(self.description)
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
        """Phase and its reason; of an ended job those before its end."""
        return self._before_end or (self.phase, self.phase_reason)

    @property
    def is_given_up(self) -> bool:
        """Whether the job stays at full speed after too many faults."""
        return self.phase is JobPhase.FALLBACK and self.faults.retry_at_iteration is None

    @property
    def retry_in_iterations(self) -> int | None:
        """Iterations until the policy is asked again after a fall-back; None without a fall-back or another attempt."""
        retry_at = self.faults.retry_at_iteration if self.phase is JobPhase.FALLBACK else None
        return None if retry_at is None else max(0, retry_at - self.reports.last_index)

    @property
    def num_iterations(self) -> int:
        """Whole iterations so far."""
        return self.reports.num_iterations

    @property
    def observations(self) -> Sequence[IterationObservation]:
        """The kept iterations, oldest first."""
        return self.knowledge.iterations.kept

    @property
    def current_plan(self) -> ClockPlan:
        """The plan in force, or the one that will be at its first iteration."""
        return self.knowledge.plans.current

    def figures_per_gpu(self) -> tuple[float | None, float | None]:
        """Return energy (J) and power (W) per GPU in the newest observed iteration; None where not measured."""
        newest = self.observations[-1] if self.observations else None
        if newest is None or newest.energy_j is None or newest.iteration_time_s <= 0:
            return None, None
        energy_j = newest.energy_j / self.description.num_ranks
        return energy_j, energy_j / newest.iteration_time_s

    def estimate(self) -> SavingEstimate | None:
        """Return the estimate of what the plans save, None before there is a baseline."""
        return None if self.baseline is None else self.knowledge.estimate(self.baseline)

    @property
    def follows_power_target(self) -> bool:
        """Whether iterations run under a plan that was made, or kept, for what the power budget asks of the job now."""
        made_for, plans = self.control.guard.target, self.knowledge.plans
        is_in_force = self.phase is JobPhase.TUNED and plans.last_apply_at <= self.reports.last_index
        return is_in_force and (made_for or self.description.target).power_time_s == self.target.power_time_s

    @property
    def account(self) -> TimeAccount | None:
        """What the daemon has cost the job's training; None for a member of a pipeline across hosts."""
        experiments = self.control.experiments
        return experiments.account if experiments.is_paying else None

    def story(self) -> tuple[str, ...]:
        """Return the newest events and their commands, one line each, for debugging."""
        return self._story.lines()

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Handle one event and return the commands to execute, in order.

        Raises:
            JobError: the event contradicts the job; its state is unchanged.
        """
        if not self.is_ended:
            commands = self._handle(event)
        else:  # iterations that were still being observed are recorded
            commands = (self._record(event),) if isinstance(event, IterationObserved) else ()
        self._story.add(event, commands)
        return commands

    def _handle(self, event: Event) -> tuple[Command, ...]:  # noqa: C901, PLR0911, PLR0912  one case per event
        match event:
            case RankJoined():
                is_complete = self.ranks.join(event.pp_rank, event.order, event.gpu, stage_rank=event.stage_rank)
                index = self.description.rank_index(event.pp_rank, event.stage_rank)
                self.knowledge.reordering.offers[index] = event.reorder
                return self._enter(JobPhase.WARMUP, "all ranks joined") if is_complete else ()
            case RankChangedMicrobatches():
                return self._microbatches_changed(event)
            case RankReported():
                return self._rank_reported(event.report)
            case IterationObserved():
                return self._iteration_observed(event)
            case MergedIterationObserved():
                return self._merged_iteration_observed(event)
            case PlanDecided():
                return self._plan_decided(event.plan)
            case PolicyFailed():
                reason = f"policy {self.description.policy} failed: {event.reason}"
                return self._fall_back(reason, is_fault=True) if self.control.question.accept_answer() else ()
            case GpuViewChanged():
                self.ranks.update_gpu(event.pp_rank, event.gpu, stage_rank=event.stage_rank)
                return ()
            case PastJobsFound():
                self.knowledge.past_jobs = event.jobs if self.phase in _BEFORE_PROFILING else ()
                return ()
            case ControlLost():
                return self._fall_back(event.reason, is_fault=True)
            case ProfilingPermissionChanged():
                return self._profiling_permission_changed(event.refusal)
            case TargetChanged():
                # The plan in force was made for the old target; the guard uses that one until the policy answers.
                self.target = replace(
                    event.target,
                    straggler_time_s=self.target.straggler_time_s,
                    power_time_s=self.target.power_time_s,
                )
                return ()
            case PowerTargetChanged():
                return self._power_target_changed(event)
            case PowerCutChanged():
                self.control.cut.change(is_cut=event.is_cut, last_reported=self.reports.last_index)
                return ()
            case OperatorOrdered():
                return self._operator_ordered(event)
            case StragglerChanged():
                return self._straggler_changed(event)
            case ReplicaBlockBegins():
                if self.phase is not JobPhase.TUNED or self.control.is_checking_full_speed:
                    return ()
                return self.control.join_block(event.apply_at_iteration, is_at_given_pace=self._is_at_given_pace)
            case StageMemoryChanged():
                index = self.description.rank_index(event.pp_rank, 0)
                self.knowledge.reordering.record_stage(index, event.memory)
                return ()
            case OrdersRefused():
                return self._orders_refused(event.reason, is_remembered=event.is_remembered)
            case RankReleased():
                return self._end(f"{self.description.rank_name(event.pp_rank, event.stage_rank)} {event.how}")
            case RankLost():
                name = self.description.rank_name(event.pp_rank, event.stage_rank)
                return self._end(f"{name} was lost: {event.reason}")
            case _:
                assert_never(event)

    def _microbatches_changed(self, event: RankChangedMicrobatches) -> tuple[Command, ...]:
        """Run at full speed from the first rank with another number of microbatches on; plan again once all have it."""
        before, is_first = self.description.num_microbatches, not self.ranks.changed_ranks
        reason = "the program runs other instructions in an iteration"
        if event.num_microbatches != before:
            reason = f"{before} -> {count_text(event.num_microbatches, 'microbatch')} per iteration"
        is_complete = self.ranks.change_microbatches(
            event.pp_rank, event.order, event.num_microbatches, stage_rank=event.stage_rank
        )
        if self.ranks.schedule is None:
            return ()
        stop: tuple[Command, ...] = ()
        if is_first:
            stop = self.control.fall_back(reason, self.faults)
            self.notices.add(reason, self.num_iterations)
        if is_complete:
            self.description = self.ranks.description
            self.reports.num_foreign_orders = 0
            self.knowledge.change_schedule(self.baseline, first_iteration=self.reports.last_index + 1)
            self.control.has_changed()
        if self.phase is JobPhase.WARMUP or self.is_given_up:
            return (*stop, RecordNotice(reason)) if is_first else stop
        return (*stop, *self._enter(JobPhase.BASELINE, f"{reason}: measuring full speed again"))

    # --- iterations ---

    def _rank_reported(self, report: RankIteration) -> tuple[Command, ...]:
        if self.ranks.schedule is None:
            return ()
        plans, counts_from = self.knowledge.plans, self.control.mixed_before
        index = self.description.rank_index(report.pp_rank, report.stage_rank)
        is_plain = not plans.orders_of(plans.id_of(report.plan_epoch))
        self.knowledge.reordering.record(index, report, is_plain=is_plain)
        refused = self._orders_refused(report.reorder_refusal) if report.reorder_refusal else ()
        whole = self.reports.add(
            report, self.ranks.orders, plans.id_of, counts_from=counts_from, plan_orders=plans.orders_of
        )
        if whole is None:
            return refused
        costs_s = [own.client_cost_s for own in whole.ranks if own.client_cost_s is not None]
        if costs_s and self.account is not None:  # the slowest rank makes all of them as slow
            self.account.add_client_cost(whole.iteration_index, max(costs_s))
        is_regular = whole.is_regular and not (
            self.knowledge.plans.is_settling(whole.iteration_index) or self.control.cut.touches(whole.iteration_index)
        )
        return (*refused, ObserveIteration(whole.ranks, whole.plan_id, is_regular), *self._disturbance(whole))

    def _orders_refused(self, reason: str, *, is_remembered: bool = False) -> tuple[Command, ...]:
        """Try no other order any more, nor in later runs of the job."""
        if not self.knowledge.reordering.bar(reason) or is_remembered:
            return ()
        self.notices.add(reason, self.num_iterations)
        return (RecordNotice(reason), StoreOrderRefusal(reason))

    def _disturbance(self, whole: WholeIteration) -> tuple[Command, ...]:
        """Record why an iteration does not count; fall back if the ranks run another order than the planned one."""
        if whole.disturbance is None:
            return ()
        is_planned_for = self.phase in {JobPhase.PROFILING, JobPhase.TUNED} and self.current_plan.ranks
        num_foreign = self.reports.num_foreign_orders
        if not whole.is_in_order and is_planned_for and num_foreign >= self.rules.foreign_orders:
            what = f"{count_text(num_foreign, 'iteration')} in a row"
            return self._fall_back(f"{what} ran other instructions, or in another order, than were registered")
        kind, reason = whole.disturbance
        is_new = self.notices.add_rarely(kind, reason, self.num_iterations, every=self.rules.notice_every)
        return (RecordNotice(reason),) if is_new else ()

    def _merged_iteration_observed(self, event: MergedIterationObserved) -> tuple[Command, ...]:
        if self.ranks.schedule is None:
            return ()
        observation, epoch = event.observation, event.plan_epoch
        delay = self.knowledge.plans.pop_delay(epoch, observation.iteration_index)
        if delay is not None:
            self.reports.record_run_ahead(delay - ITERATIONS_AHEAD)
        is_warm, plan_id = self.reports.count(observation.iteration_index), self.knowledge.plans.id_of(epoch)
        is_counted = plan_id is not None and is_warm and observation.iteration_index >= self.control.mixed_before
        is_regular = observation.is_regular and is_counted
        observation = replace(observation, plan_id=plan_id, is_regular=is_regular)
        return self._iteration_observed(
            IterationObserved(observation, least_other_overhead_s=event.least_other_overhead_s)
        )

    def _iteration_observed(self, event: IterationObserved) -> tuple[Command, ...]:
        if event.observation.iteration_index < self.knowledge.changed_at:
            event = replace(event, observation=replace(event.observation, is_regular=False))
        record = self._record(event)
        self.control.experiments.observe(record.observation, record.purpose, self.baseline, self._evaluated_for)
        ended = self.control.end_experiment(record.observation)
        return (record, *ended, *self._after_iteration(record.observation, record.purpose))

    def _record(self, event: IterationObserved) -> RecordIteration:
        observation, purpose = self.knowledge.add(
            event.observation,
            self.graph_under(event.observation.plan_id),
            is_forced=self.target.is_forced,
            permitted_ratio=self._permitted_ratio(),
            least_other_overhead_s=event.least_other_overhead_s,
        )
        return RecordIteration(observation, purpose, event.began_mono_ns, event.spans)

    def _permitted_ratio(self) -> float:
        return self.target.permitted_ratio(self.baseline.iteration_time_s) if self.baseline is not None else 0.0

    def graph_under(self, plan_id: str | None) -> DependencyGraph:
        """Return the dependency graph of the order that the ranks run under a plan."""
        return self.ranks.graph_in(self.knowledge.plans.orders_of(plan_id))

    def _after_iteration(self, observation: IterationObservation, purpose: PlanPurpose | None) -> tuple[Command, ...]:
        match self.phase:
            case JobPhase.WARMUP:
                return self._enter(JobPhase.BASELINE, "warm") if observation.is_regular else ()
            case JobPhase.BASELINE:
                return self._after_baseline_iteration()
            case JobPhase.PROFILING:
                return self._after_profiling_iteration(purpose)
            case JobPhase.TUNED:
                return self._after_tuned_iteration(purpose)
            case JobPhase.FALLBACK:
                return self._after_fallback_iteration(observation)
            case JobPhase.JOINING | JobPhase.PAUSED | JobPhase.ENDED:
                return ()
            case _:
                assert_never(self.phase)

    def _after_baseline_iteration(self) -> tuple[Command, ...]:
        full_speed = self.knowledge.full_speed()
        if len(full_speed) < self.rules.baseline_iterations or self.ranks.changed_ranks:
            return ()
        self.baseline = baseline_view(full_speed)
        return self._enter(JobPhase.PAUSED, _PAUSED) if self.is_paused else self._ask()

    def _after_profiling_iteration(self, purpose: PlanPurpose | None) -> tuple[Command, ...]:
        if self.control.experiments.is_waiting(self.target):
            self._measure_baseline(purpose)
        return self._ask()

    def _measure_baseline(self, purpose: PlanPurpose | None) -> None:
        if purpose is PlanPurpose.BASELINE and (full_speed := self.knowledge.full_speed()):
            self.baseline = baseline_view(full_speed)

    def _after_tuned_iteration(self, purpose: PlanPurpose | None) -> tuple[Command, ...]:
        self._measure_baseline(purpose)
        self.control.blocks.num_tuned_iterations += purpose is PlanPurpose.TUNED
        if stopped := self._guard() or self._stop_if_unpaid():
            return stopped
        if self.control.is_checking_full_speed:  # a new plan now would make the block's result unknown
            return ()
        return self.control.prove(is_at_given_pace=self._is_at_given_pace) or self._ask()

    def _after_fallback_iteration(self, observation: IterationObservation) -> tuple[Command, ...]:
        is_waiting = self.control.experiments.is_waiting(self.target)
        if is_waiting or not self.faults.is_retry_due(observation.iteration_index):
            return ()
        if self.baseline is None:
            return self._after_baseline_iteration()
        target = self.control.guard.target or self.target
        recovery = recover(self.knowledge, self.faults, self.rules, self.baseline, target)
        if recovery is None:
            return ()
        self.baseline = recovery.baseline
        if recovery.reason is None:
            return self._ask()
        self.control.has_changed()
        self.phase_reason = recovery.reason
        self.notices.add(recovery.reason, self.num_iterations)
        return (RecordPhase(self.phase, recovery.reason), *self._ask())

    # --- policy and target ---

    def view(self) -> JobView | None:
        """Return the view of this job for its policy; None until there is a baseline."""
        experiments = self.control.experiments
        affordable_s = None if self.baseline is None else experiments.affordable_s(self.baseline, self.target)
        return self.knowledge.view(self.ranks, self.target, self.baseline, affordable_s=affordable_s)

    def _ask(self) -> tuple[Command, ...]:
        if self.control.question.is_open or self.ranks.changed_ranks or (view := self.view()) is None:
            return ()
        if self.control.experiments.is_waiting(self.target) or self.control.is_checking_full_speed:
            return ()
        self.control.question.ask(view.target)
        return (AskPolicy(view),)

    def _plan_decided(self, plan: ClockPlan) -> tuple[Command, ...]:
        if not self.control.question.accept_answer():
            return ()
        self.advice = plan.advice or self.advice
        if plan.learned is None:
            return self._follow(plan)
        following = replace(plan, learned=None)
        if problem_of_curves(plan.learned) is not None:  # no GPU has them: of a broken sensor or policy
            return self._follow(following)
        self.knowledge.learned = plan.learned
        return (StoreCurves(plan.learned), *self._follow(following))

    def _follow(self, plan: ClockPlan) -> tuple[Command, ...]:
        """Follow a plan of the policy, unless it is refused."""
        assert self.ranks.schedule is not None
        is_slow = plan.purpose is PlanPurpose.PROFILE and not plan.orders  # other orders are tried at full speed
        if is_slow and (refusal := self._profiling_refusal) is not None:
            return self._fall_back(refusal, least_wait=self.rules.refused_profiling_iterations)
        is_kept = plan.plan_id == self.current_plan.plan_id and self.phase is not JobPhase.FALLBACK
        if not (is_kept and self._has_new_pace):  # the next answer says what a kept plan is compared with
            self.control.expect(self.control.question.target)
        was_relieved = self.control.blocks.end_relief()
        experiments = self.control.experiments
        if is_kept and not was_relieved and (experiments.ends_at is None or experiments.is_running):
            commands: tuple[Command, ...] = self._record_order_advice(plan.order_advice)
            return (*commands, *self._enter(phase_under(plan, self.phase), plan.reason), *self._ask_for_new_pace())
        try:
            ranks = self.ranks
            check_plan(
                plan,
                self.ranks.schedule,
                ranks.supported_sm_clocks_mhz,
                ranks.power_limit_ranges_w,
                ranks.power_profiles,
            )
        except GpuEnergyError as error:
            reason = f"policy {self.description.policy} returned an invalid plan: {error}"
            return self._fall_back(reason, is_fault=True)
        assert self.baseline is not None
        terms = experiments.terms(plan, self.baseline, self.target)
        if not terms.is_affordable:
            return self._wait_for(terms.cost_s)
        sent = self.control.send_on(plan, terms) if is_kept else self.control.follow(plan, self.baseline, terms)
        commands = (*self._record_order_advice(plan.order_advice), *sent)
        return (*commands, *self._enter(phase_under(plan, self.phase), plan.reason), *self._ask_for_new_pace())

    def _wait_for(self, cost_s: float) -> tuple[Command, ...]:
        """Wait until the account can pay an experiment: under the plan in force if it goes on, else at full speed."""
        experiments = self.control.experiments
        experiments.wait_for(cost_s, self.target)
        if self.phase is JobPhase.TUNED and experiments.ends_at is None:
            return ()
        reason = f"at full speed until the time account can pay the next experiment: {cost_s:.2g} s at most"
        return self._enter(self.phase if self.phase is JobPhase.TUNED else JobPhase.PROFILING, reason)

    def _record_order_advice(self, advice: OrderAdvice | None) -> tuple[Command, ...]:
        """Keep the policy's advice about the order, and record it as a notice where it is new."""
        before = self.knowledge.reordering.advice
        if advice is None or advice == before:
            return ()
        self.knowledge.reordering.advice = advice
        if before is not None and before.text == advice.text:
            return ()
        self.notices.add(advice.text, self.num_iterations)
        return (RecordNotice(advice.text, advice),)

    @property
    def _is_at_given_pace(self) -> bool:
        """Whether a straggler or a power budget sets the pace: iterations at full speed are pointless or too costly."""
        return self.target.is_forced or self.target.is_power_limited

    @property
    def _has_new_pace(self) -> bool:
        """Whether the straggler's pace, or that of the power budget, has changed since the last question."""
        asked_for, target = self.control.question.target, self.target
        return asked_for is not None and (asked_for.straggler_time_s, asked_for.power_time_s) != (
            target.straggler_time_s,
            target.power_time_s,
        )

    def _ask_for_new_pace(self) -> tuple[Command, ...]:
        """Ask again at once if the pace that others set has changed since the question that was answered."""
        return self._ask() if self._has_new_pace and self.phase is JobPhase.TUNED else ()

    def _profiling_permission_changed(self, refusal: str | None) -> tuple[Command, ...]:
        """Stop profiling that is no longer permitted; a later profiling plan is refused when the policy returns it."""
        self._profiling_refusal = refusal
        if refusal is None or self.phase is not JobPhase.PROFILING or self.current_plan.orders:
            return ()
        return self._fall_back(refusal, least_wait=self.rules.refused_profiling_iterations)

    def _straggler_changed(self, event: StragglerChanged) -> tuple[Command, ...]:
        """Follow the pace of the slowest replica: ask for a plan at once, and meet a shorter target until it comes."""
        self.notices.add(event.reason, self.num_iterations)
        return self._replace_target(replace(self.target, straggler_time_s=event.straggler_time_s))

    def _replace_target(self, target: PerformanceTarget) -> tuple[Command, ...]:
        """Ask for a plan for another target at once, and meet a shorter one until it comes."""
        before, self.target = self.target, target
        if self.phase is not JobPhase.TUNED or self.baseline is None:
            return ()
        target_s = self.target.iteration_time_s(self.baseline.iteration_time_s)
        is_shorter = target_s < before.iteration_time_s(self.baseline.iteration_time_s)
        return (*(self.control.speed_up(self.target, target_s) if is_shorter else ()), *self._ask())

    def _power_target_changed(self, event: PowerTargetChanged) -> tuple[Command, ...]:
        """Follow the host's power budget: ask for a plan at once; until it comes the backstop holds the power."""
        if (event.power_time_s is None) != (self.target.power_time_s is None):
            self.notices.add(event.reason, self.num_iterations)
        self.target = replace(self.target, power_time_s=event.power_time_s)
        return self._ask() if self.phase is JobPhase.TUNED and not self.control.is_checking_full_speed else ()

    # --- operators ---

    @property
    def is_paused(self) -> bool:
        """Whether an operator has paused the job, whose full speed may still be measured."""
        return bool(self.orders.is_paused)

    def choices(self) -> OperatorOrders:
        """Return policy, permitted slowdown, priority and pause that hold now."""
        return self.choices_under(self.orders)

    def choices_under(self, orders: OperatorOrders) -> OperatorOrders:
        """Return what would hold under orders of operators."""
        return self._as_registered.followed_by(orders)

    def _operator_ordered(self, event: OperatorOrdered) -> tuple[Command, ...]:
        """Follow an operator at once; without an order, what the job was registered with holds again."""
        was_paused, before = self.is_paused, self.description
        self.orders = event.orders
        self.description = self.ranks.description = event.orders.applied_to(before, self._as_registered)
        self.notices.add(event.reason, self.num_iterations)
        is_planned_anew = self.description.policy != before.policy
        registered, target = self.description.target, self.target
        if registered != before.target:
            target = replace(registered, straggler_time_s=target.straggler_time_s, power_time_s=target.power_time_s)
        if self.baseline is None and self.phase is not JobPhase.PAUSED:
            self.target = target
            return ()
        begun = self._begin_with_policy(event.reason) if is_planned_anew else ()
        if not (self.is_paused or was_paused or is_planned_anew):
            return self._replace_target(target) if target != self.target else ()
        self.target = target
        if self.is_paused:
            return (*begun, *(self._fall_back(event.reason) if self.phase is not JobPhase.PAUSED else ()))
        if self.phase is JobPhase.PAUSED:
            return (*begun, *self._resume(event.reason))
        return (*begun, *self._enter(JobPhase.PROFILING, event.reason), *self._ask()) if is_planned_anew else ()

    def _begin_with_policy(self, reason: str) -> tuple[Command, ...]:
        """Return to full speed, and drop what the policy before has measured: the new one begins with the baseline."""
        stop = self.control.fall_back(reason, self.faults)
        if (before := self.estimate()) is not None and before.saving is not None:
            self.knowledge.estimate_before = before
        purposes = self.knowledge.plans.purposes()
        self.knowledge.begin_anew(lambda o: purposes.get(o.plan_id) is PlanPurpose.BASELINE)
        self.knowledge.past_jobs, self.knowledge.curves_before, self.advice = (), None, ()
        self.faults.redeem()
        self.faults.begin_anew()
        self.control.has_changed()
        return stop

    def _resume(self, reason: str) -> tuple[Command, ...]:
        """Measure full speed again and plan; what was profiled before the pause still counts if full speed is equal."""
        self.faults.allow_retry(self.reports.last_index + 1)
        return self._enter(JobPhase.FALLBACK, reason)

    # --- safety ---

    def _guard(self) -> tuple[Command, ...]:
        if change := self.control.change_of_full_speed():
            return self._fall_back(change)
        verdict = self.control.evaluate(self.baseline, self.target, self.faults)
        if verdict is None:
            return ()
        finding, reason = verdict
        if finding is Finding.JOB_IS_FASTER and self.rules.proof_iterations:
            block = self.control.check_full_speed(reason, is_at_given_pace=self._is_at_given_pace)
            if block:
                self.notices.add(reason, self.num_iterations)
            return (*block, RecordNotice(reason)) if block else ()
        is_slow = finding in {Finding.TOO_SLOW, Finding.FULL_SPEED_IS_FASTER}
        if not is_slow and not self.control.may_return_to_full_speed():
            return ()
        is_fault = finding is Finding.TOO_SLOW
        if is_fault:
            self.faults.find_slow(self.current_plan.plan_id)
        return self._fall_back(reason, is_fault=is_fault)

    def _stop_if_unpaid(self) -> tuple[Command, ...]:
        """Go back to full speed if the account cannot pay the plan in force any longer; a power budget is an order."""
        experiments, plan = self.control.experiments, self.current_plan
        is_in_force = self.control.has_lease and experiments.ends_at is None and not self.target.is_power_limited
        if self.baseline is None or not is_in_force or not self._is_unpaid:
            return ()
        account = experiments.account
        spent = f"{account.cost_s:.2g} of {account.income_s:.2g} s are spent"
        experiments.wait_to_resume(plan, self.baseline, self.target)
        return self._fall_back(f"at full speed until the time account has recovered: {spent}")

    @property
    def _is_unpaid(self) -> bool:
        experiments, since = self.control.experiments, self.control.guard.since
        return self.baseline is not None and experiments.is_unpaid(
            self.current_plan, self.baseline, self._evaluated_for, since=since
        )

    @property
    def _evaluated_for(self) -> PerformanceTarget:
        """The target that the plan in force was made, or kept, for."""
        return self.control.guard.target or self.target

    def _fall_back(self, reason: str, *, is_fault: bool = False, least_wait: int = 0) -> tuple[Command, ...]:
        """Go back to full speed; the policy is asked again later, after faults a limited number of times."""
        if self.ranks.schedule is None:
            return ()
        stop = self.control.fall_back(reason, self.faults)
        self.notices.add(reason, self.num_iterations)
        retry_at = self.faults.fell_back(
            at_iteration=max(self.control.mixed_before, self.reports.last_index + 1),
            wait_from=max(self.knowledge.plans.last_apply_at, self.reports.last_index),
            is_fault=is_fault,
            least_wait=least_wait,
            reason=reason,
        )
        if retry_at is not None:
            self.control.guard.since = retry_at
        return (*stop, *self._enter(JobPhase.PAUSED if self.is_paused else JobPhase.FALLBACK, reason))

    def _end(self, reason: str) -> tuple[Command, ...]:
        self._before_end = self.last_activity
        self.control.experiments.account.leave(self.description.job_id)
        return (*self.control.release(reason), *self._enter(JobPhase.ENDED, reason), EndJob(reason))

    def _enter(self, phase: JobPhase, reason: str) -> tuple[Command, ...]:
        if phase is self.phase:
            self.phase_reason = reason or self.phase_reason
            return ()
        self.phase, self.phase_reason = phase, reason
        return (RecordPhase(phase, reason),)

    def snapshot(self) -> JobSnapshot:
        """Return all state; an open question to the policy is dropped."""
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
            profiling_refusal=self._profiling_refusal,
            orders_of_operators=self.orders,
            as_registered=self._as_registered,
        )

    def restore(self, snapshot: JobSnapshot) -> None:
        """Replace all state, under this job's own rules.

        Raises:
            JobError: the ranks' orders deadlock.
        """
        self.ranks.restore(snapshot.orders, snapshot.gpus)
        self.ranks.changed_ranks = dict(snapshot.changed_ranks)
        self.phase, self.phase_reason, self.target = snapshot.phase, snapshot.phase_reason, snapshot.target
        self.baseline, self._profiling_refusal = snapshot.baseline, snapshot.profiling_refusal
        self.reports.restore(snapshot.reports)
        self.knowledge.restore(snapshot.knowledge)
        self.control.restore(snapshot.control)
        self.faults = replace(snapshot.faults, rules=self.rules)
        self.notices = replace(snapshot.notices)
        self.orders = snapshot.orders_of_operators
        self._as_registered = snapshot.as_registered or self._as_registered
