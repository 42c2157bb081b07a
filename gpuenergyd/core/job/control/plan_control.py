"""Changes of the plan in force: GPU leases around them, full-speed blocks between them, and the guard's window.

A lease precedes the first plan that changes clocks, and a restore follows a plan without clocks. Ranks learn of a plan
some iterations after it is sent; the guard and the proof blocks wait until then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from gpuenergyd.core.job.control.experiments import Experiments, Terms
from gpuenergyd.core.job.control.faults import Faults
from gpuenergyd.core.job.control.full_speed_blocks import FullSpeedBlocks
from gpuenergyd.core.job.control.policy_question import PolicyQuestion
from gpuenergyd.core.job.control.power_cut import PowerCut
from gpuenergyd.core.job.description import JobRanks
from gpuenergyd.core.job.guard import Finding, GuardWindow, evaluate, what_changed
from gpuenergyd.core.job.issued_plans import ITERATIONS_AHEAD, PROOF_PLAN_ID
from gpuenergyd.core.job.measurements.knowledge import JobKnowledge
from gpuenergyd.core.job.measurements.rank_reports import RankReports
from gpuenergyd.core.job.messages import Command, JobPhase, LeaseGpus, RestoreGpus, SendPlan
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import TimeAccount
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan, full_speed_plan
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget

_FASTER_CHECK_DISTANCE = 16
"""Iterations after a full-speed block, or a return to full speed, of a job that is faster than expected before there
may be a second one; each further one waits twice as long."""
_MAX_DOUBLINGS = 6
_SEEN_ITERATIONS = 3
"""Iterations of an experiment after which full speed follows unless the policy has answered."""


@dataclass(frozen=True, slots=True)
class PlanControlSnapshot:
    """All state of `PlanControl`; an open question to the policy is dropped."""

    has_lease: bool
    mixed_before: int
    blocks: FullSpeedBlocks
    guard: GuardWindow
    account: TimeAccount | None = None
    """None in the state of a daemon without time accounts."""
    experiment_ends_at: int | None = None
    """See `Experiments.ends_at`."""


@dataclass(slots=True)
class PlanControl:
    """The plan in force of one job, its lease, and the commands that change it."""

    rules: JobRules
    ranks: JobRanks
    reports: RankReports
    knowledge: JobKnowledge
    question: PolicyQuestion = field(default_factory=PolicyQuestion)
    guard: GuardWindow = field(default_factory=GuardWindow)
    blocks: FullSpeedBlocks = field(init=False)
    has_lease: bool = False
    mixed_before: int = 0
    """Iterations before this one may have run partly under a plan whose clocks were restored."""
    cut: PowerCut = field(default_factory=PowerCut)
    block_at: int = 0
    """The first iteration of the newest block at full speed."""
    experiments: Experiments = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = FullSpeedBlocks(self.rules)
        self.experiments = Experiments(self.rules, self.ranks, self.reports, self.knowledge)

    @property
    def current(self) -> ClockPlan:
        """The plan in force, or the one that will be at its first iteration."""
        return self.knowledge.plans.current

    def follow(self, plan: ClockPlan, baseline: BaselineView | None, terms: Terms) -> tuple[Command, ...]:
        """Send a plan of the policy; lease the GPUs before its first clocks, restore them after a plan without any."""
        lease: tuple[Command, ...] = ()
        if plan.ranks and not self.has_lease:
            self.has_lease = True
            lease = (LeaseGpus(self.ranks.gpu_uuids),)
        self.knowledge.add_plan(plan)
        self.guard.begin_plan()
        target = self.question.target
        if target is not None and baseline is not None:
            target_s = target.iteration_time_s(baseline.iteration_time_s)
            self.knowledge.plans.record_target(plan.plan_id, target_s, is_forced=target.is_forced)
        sent = self.send_on(plan, terms)
        restore = (self._restore(plan),) if not plan.ranks and self.has_lease else ()
        return (*lease, *sent, *restore)

    def send_on(self, plan: ClockPlan, terms: Terms) -> tuple[Command, ...]:
        """Send a plan, or the one in force again: until it is replaced, or with full speed after its iterations."""
        experiments = self.experiments
        not_before = 0
        if terms.num_iterations is not None:
            not_before = experiments.account.next_experiment(self.knowledge.job_id, self._next_apply_at)
        # Full speed after the last experiment is replaced by this plan if that is in time.
        is_replacing = experiments.ends_at is not None and self.rules.are_plans_queued
        send = self._send(plan, after=0 if is_replacing else 1, not_before=not_before)
        experiments.begun(terms, send.apply_at_iteration)
        if terms.num_iterations is None or experiments.is_open:
            return (send,)
        return (send, self._send(self._full_speed_block("until the next experiment"), after=terms.num_iterations))

    def end_experiment(self, observation: IterationObservation) -> tuple[Command, ...]:
        """Send full speed after an experiment, where it could not be sent together with it.

        Once the experiment was seen, the policy may replace it meanwhile.
        """
        plan_id = self.current.plan_id
        if not self.experiments.is_open or observation.plan_id != plan_id:
            return ()
        if sum(own.plan_id == plan_id for own in self.knowledge.iterations.kept) < _SEEN_ITERATIONS:
            return ()
        send = self._send(self._full_speed_block("until the next experiment"))
        self.experiments.ends_at, self.experiments.is_open = send.apply_at_iteration, False
        return (send,)

    def expect(self, target: PerformanceTarget | None) -> None:
        """Compare the next iterations with the target that the policy has answered for."""
        if target != self.guard.target:
            self.guard.expect(target, since=self.reports.last_index + 1)

    def fall_back(self, reason: str, faults: Faults) -> tuple[Command, ...]:
        """Send full speed and restore the GPUs at once; drop a relief block and the answer to an open question."""
        stop: tuple[Command, ...] = ()
        if self.current.ranks:
            faults.num_fallbacks += 1
            plan = baseline_plan(f"full-speed-{faults.num_fallbacks}", reason=reason)
            self.knowledge.add_plan(plan)
            stop = (self._send(plan), self._restore(plan))
        self.has_lease = False
        self.experiments.ends_at, self.experiments.is_open = None, False
        self.blocks.end_relief()
        self.question.outdate()
        return stop

    def release(self, reason: str) -> tuple[Command, ...]:
        """Restore the GPUs if they are leased, because the job has ended."""
        return (RestoreGpus(self.ranks.gpu_uuids, reason),) if self.has_lease else ()

    # --- full-speed blocks ---

    def prove(self, *, is_at_given_pace: bool) -> tuple[Command, ...]:
        """Run a proof block if one is due, and the plan in force again after it."""
        if is_at_given_pace or not self._is_settled or not self.blocks.is_proof_due:
            return ()
        self.blocks.begin_proof()
        return self._proof_block("proof of savings")

    def join_block(self, apply_at_iteration: int, *, is_at_given_pace: bool) -> tuple[Command, ...]:
        """Run at full speed in the same iterations as another replica, if that is possible; it counts as a proof block.

        Replicas end each iteration together. At full speed alone, this one would be as slow as the plans of the others,
        and would permit its own plan to be slower still.
        """
        if is_at_given_pace or not self._is_settled or apply_at_iteration < self._next_apply_at:
            return ()
        self.blocks.begin_proof()
        return self._proof_block("proof of savings, with another replica", not_before=apply_at_iteration)

    def check_full_speed(self, reason: str, *, is_at_given_pace: bool) -> tuple[Command, ...]:
        """Run a full-speed block and the plan in force again after it: the job is faster than expected.

        The block keeps the baseline current. Under one plan each further block waits twice as long. If a block is about
        to begin anyway, that one is taken.
        """
        guard, plans, last = self.guard, self.knowledge.plans, self.reports.last_index
        is_soon = last < self.block_at
        if last < guard.next_faster_check_at or is_at_given_pace or not self.has_lease:
            return ()
        if not is_soon and last < plans.last_apply_at:
            return ()
        self.question.outdate()  # the answer would be made for the full speed that is in doubt
        sent = () if is_soon else self._proof_block(reason)
        guard.checked_from = self.block_at
        guard.since = plans.last_apply_at
        guard.next_faster_check_at = guard.since + _FASTER_CHECK_DISTANCE * 2**guard.num_faster_checks
        guard.num_faster_checks += 1
        if sent:
            self.blocks.begin_proof()
        return sent

    def may_return_to_full_speed(self) -> bool:
        """Return whether the job may go back to full speed because it is faster than expected, and count that.

        Such a return does not count as a fault. On a noisy host it may be chance, so each further return waits twice as
        long, until the job changes.
        """
        guard, last = self.guard, self.reports.last_index
        if last < guard.next_faster_return_at:
            return False
        distance = _FASTER_CHECK_DISTANCE * 2 ** min(guard.num_faster_returns, _MAX_DOUBLINGS)
        guard.next_faster_return_at = last + distance
        guard.num_faster_returns += 1
        return True

    def has_changed(self) -> None:
        """Forget for how long the job was faster than expected: it has changed, and is planned anew."""
        self.guard.num_faster_returns = self.guard.next_faster_return_at = 0
        self.blocks.begin_anew()

    @property
    def is_checking_full_speed(self) -> bool:
        """Whether a block shows whether full speed has changed, and is not over yet."""
        return self.guard.checked_from is not None

    def change_of_full_speed(self) -> str | None:
        """Return how full speed has changed, once the block that checks it is over; None before, or unchanged.

        Across hosts a block begins later than at its first possible iteration.
        """
        since = self.guard.checked_from
        if since is None or self.reports.last_index < self.guard.since:
            return None
        full_speed = self.knowledge.full_speed()
        before = [o for o in full_speed if o.iteration_index < since]
        now = [o for o in full_speed if o.iteration_index >= since]
        if not now or self.knowledge.iterations.kept[-1] is now[-1]:
            return None
        self.guard.checked_from = None
        return what_changed(before, now, at_least_ratio=self.rules.job_changed_ratio)

    # --- pace ---

    def speed_up(self, target: PerformanceTarget, target_s: float) -> tuple[Command, ...]:
        """Return to the newest plan that meets a shorter target, or to full speed, without waiting for the policy."""
        self.question.outdate()
        plan = self.current
        if plan.purpose is not PlanPurpose.TUNED or self.knowledge.plans.is_fast_enough(plan, target_s):
            return ()
        earlier = self.knowledge.plans.newest_fast_enough(target_s)
        if earlier is None:
            self.blocks.begin_relief()
            self.experiments.ends_at = None
            return (self._send(self._full_speed_block("a straggler has recovered")),)
        self.knowledge.add_plan(earlier)
        self.guard.begin_plan()
        self.experiments.ends_at = None
        send = self._send(earlier)
        self.guard.expect(target, since=self.knowledge.plans.last_apply_at)
        return (send,)

    # --- guard ---

    def evaluate(
        self, baseline: BaselineView | None, target: PerformanceTarget, faults: Faults
    ) -> tuple[Finding, str] | None:
        """Return the guard's finding about the tuned plan in force; clear the faults once it has held for long.

        Under rules without a guard there is no finding.
        """
        if self.current.purpose is not PlanPurpose.TUNED or baseline is None:
            return None
        recent = self.knowledge.iterations.regular_under(self.current.plan_id, since=self.guard.since)
        finding = None
        if self.rules.is_guarding:
            finding = evaluate(
                recent,
                self.current,
                baseline,
                self.guard.target or target,
                self.rules.guard,
                before=self._under_plans_before(),
                at_full_speed=self.knowledge.full_speed(),
                is_prediction_outdated=self.guard.num_faster_checks > 0,
            )
        if finding is None and len(recent) >= self.rules.redeeming_iterations:
            faults.redeem()
        if finding is not None and finding[0] is Finding.TOO_SLOW:
            made_for_s = self.knowledge.plans.target_when_made_s(self.current.plan_id)
            is_same_target = self.guard.target == self.guard.plan_target
            if made_for_s is not None and is_same_target and self._meets(made_for_s, recent, baseline):
                full_speed = f"{baseline.iteration_time_s:.4g} s per iteration"
                why = f"full speed is faster, {full_speed}, than when plan {self.current.plan_id!r} was made"
                return Finding.FULL_SPEED_IS_FASTER, why
        return finding

    def _under_plans_before(self) -> list[IterationObservation]:
        """Return the newest regular iterations under the tuned plans before the one in force, for the same target."""
        plans, purposes = self.knowledge.plans, self.knowledge.plans.purposes()
        found: list[IterationObservation] = []
        target_s = plans.target_when_made_s(self.current.plan_id)
        for observation in reversed(self.knowledge.iterations.kept):
            plan_id = observation.plan_id
            if plan_id == self.current.plan_id and not found:
                continue
            is_alike = plan_id is not None and plans.target_when_made_s(plan_id) == target_s
            if (
                purposes.get(plan_id) is not PlanPurpose.TUNED
                or not is_alike
                or len(found) == max(self.rules.guard.windows)
            ):
                break
            if observation.is_regular:
                found.append(observation)
        return found[::-1]

    def _meets(self, target_s: float, recent: Sequence[IterationObservation], baseline: BaselineView) -> bool:
        """Return whether the plan in force is not too slow for a target."""
        target = PerformanceTarget(permitted_time_s=target_s)
        finding = evaluate(recent, self.current, baseline, target, self.rules.guard)
        return finding is None or finding[0] is not Finding.TOO_SLOW

    # --- from one daemon to the next ---

    def snapshot(self) -> PlanControlSnapshot:
        experiments = self.experiments
        return PlanControlSnapshot(
            self.has_lease,
            self.mixed_before,
            self.blocks,
            self.guard,
            experiments.account.copy() if experiments.is_paying else None,
            experiments.ends_at,
        )

    def restore(self, snapshot: PlanControlSnapshot) -> None:
        """Replace all state, under this job's rules."""
        self.has_lease, self.mixed_before = snapshot.has_lease, snapshot.mixed_before
        self.blocks = replace(snapshot.blocks, rules=self.rules)
        self.guard = replace(snapshot.guard)
        self.experiments.restore(snapshot.account, snapshot.experiment_ends_at)

    # --- inside ---

    def _send(
        self, plan: ClockPlan, *, after: int = 1, not_before: int = 0, num_iterations: int | None = None
    ) -> SendPlan:
        send = self.knowledge.plans.send(
            plan,
            last_reported=self.reports.last_index,
            run_ahead=self.reports.run_ahead,
            after=after,
            not_before=not_before,
            num_iterations=num_iterations,
        )
        self.experiments.sent(plan, send.apply_at_iteration)
        return send

    @property
    def _is_settled(self) -> bool:
        """Whether a tuned plan is in force and followed."""
        is_followed = self.knowledge.plans.last_apply_at <= self.reports.last_index
        is_lasting = self.experiments.ends_at is None
        return self.current.purpose is PlanPurpose.TUNED and self.has_lease and is_followed and is_lasting

    @property
    def _next_apply_at(self) -> int:
        """The first iteration from which all ranks can follow a plan that is sent now."""
        return self.reports.last_index + ITERATIONS_AHEAD + self.reports.run_ahead

    def _proof_block(self, reason: str, *, not_before: int | None = None) -> tuple[SendPlan, SendPlan]:
        """Return a block at full speed and the plan in force after it.

        Other replicas may have reported an iteration more, and are to join.
        """
        plan, num_iterations = self.current, self.rules.proof_iterations
        if not_before is None and self.ranks.description.num_dp_ranks > 1:
            not_before = self._next_apply_at + 1
        block = self._send(self._full_speed_block(reason), not_before=not_before or 0, num_iterations=num_iterations)
        self.block_at = block.apply_at_iteration
        return block, self._send(plan, after=num_iterations)

    def _full_speed_block(self, reason: str) -> ClockPlan:
        assert self.ranks.schedule is not None
        plan = self.current
        return full_speed_plan(
            PROOF_PLAN_ID,
            self.ranks.schedule,
            self.ranks.supported_sm_clocks_mhz,
            reason=reason,
            sets_clocks=plan.sets_clocks or not (plan.power_limits_w or plan.power_profiles),
        )

    def _restore(self, plan: ClockPlan) -> RestoreGpus:
        """Return the command that restores the GPUs, after a full-speed plan was sent."""
        # The clocks rise at once, the ranks receive the plan later: iterations in between belong to neither plan.
        self.has_lease = False
        self.mixed_before = self.knowledge.plans.last_apply_at
        return RestoreGpus(self.ranks.gpu_uuids, plan.reason)


def phase_under(plan: ClockPlan, phase: JobPhase) -> JobPhase:
    """Return the phase that a job enters with a plan; full-speed iterations belong to the profiling around them."""
    match plan.purpose:
        case PlanPurpose.PROFILE:
            return JobPhase.PROFILING
        case PlanPurpose.BASELINE if phase is JobPhase.PROFILING and plan.ranks:
            return JobPhase.PROFILING
        case PlanPurpose.TUNED | PlanPurpose.BASELINE | PlanPurpose.PREDICTED:
            return JobPhase.TUNED
        case _:
            assert_never(plan.purpose)
