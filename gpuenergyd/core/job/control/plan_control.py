"""Changes a job's plan: asks the policy, leases and restores GPUs, and inserts blocks at full speed.

GPUs are leased before the first plan that changes clocks, and restored after a plan that sets none. Ranks learn of a
plan some iterations after it is sent; the guard and the proof blocks wait until then.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from gpuenergyd.core.job.control.experiments import Experiments, Terms
from gpuenergyd.core.job.control.faults import Faults
from gpuenergyd.core.job.description import JobRanks
from gpuenergyd.core.job.guard import GuardWindow
from gpuenergyd.core.job.issued_plans import ITERATIONS_AHEAD, PROOF_PLAN_ID
from gpuenergyd.core.job.measurements.knowledge import JobKnowledge
from gpuenergyd.core.job.measurements.rank_reports import RankReports
from gpuenergyd.core.job.messages import AskPolicy, Command, LeaseGpus, RecordIteration, RestoreGpus, SendPlan
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import TimeAccount
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan, full_speed_plan
from gpuenergyd.core.policy_api.policy import BaselineView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget

_SEEN_ITERATIONS = 3
"""Reported iterations after which an experiment is followed by full speed unless the policy has answered."""


@dataclass(slots=True)
class FullSpeedBlocks:
    """Blocks of full-speed iterations: how many a job has run, and whether it is in a relief block.

    A proof block of a few iterations between tuned ones keeps the baseline current, and is the middle of a bracket that
    measures the saving (`measurements.brackets`). The first blocks follow quickly, because a saving is reported only
    after several. Distances then grow until the blocks are a small share of all iterations. A relief block replaces a
    plan that is too slow for a new target, until the policy has answered.
    """

    rules: JobRules
    num_tuned_iterations: int = 0
    """Tuned iterations since the last proof block was sent, or since trials last started over."""
    num_proof_iterations: int = 0
    is_relieved: bool = False
    _distance: float = field(init=False)
    """Number of tuned iterations before the next proof block."""

    def __post_init__(self) -> None:
        self._distance = self.rules.first_proof_after

    @property
    def is_proof_due(self) -> bool:
        """Whether the next proof block may begin."""
        return self.rules.proof_iterations > 0 and self.num_tuned_iterations >= self._distance

    def begin_proof(self) -> None:
        """Count a proof block, and increase the distance to the next one."""
        rules = self.rules
        self.num_proof_iterations += rules.proof_iterations
        self.num_tuned_iterations = 0
        longest = max(rules.first_proof_after, rules.proof_iterations / rules.proof_budget_ratio)
        self._distance = min(longest, rules.proof_distance_growth * self._distance)

    def begin_relief(self) -> None:
        """Enter a relief block, which lasts until the policy answers or the job falls back."""
        self.is_relieved = True

    def end_relief(self) -> bool:
        """Leave a relief block; return whether there was one."""
        was_relieved, self.is_relieved = self.is_relieved, False
        return was_relieved

    def begin_anew(self) -> None:
        """Return to short distances between proof blocks."""
        self.num_tuned_iterations = 0
        self._distance = self.rules.first_proof_after


@dataclass(frozen=True, slots=True)
class PlanControlSnapshot:
    """All state of `PlanControl`; an open question to the policy is dropped."""

    has_lease: bool
    mixed_before: int
    blocks: FullSpeedBlocks
    guard: GuardWindow
    account: TimeAccount | None = None
    """None in a state saved by a daemon that had no time accounts."""
    experiment_ends_at: int | None = None
    """See `Experiments.ends_at`."""


class QuestionState(StrEnum):
    """Whether the policy has been asked, and whether its answer will still be used."""

    IDLE = "idle"
    ASKED = "asked"
    OUTDATED = "outdated"
    """Asked before a fall-back or before the target became faster; the answer will be discarded."""


@dataclass(slots=True)
class PolicyQuestion:
    """At most one open question to the policy, and the target of the last question."""

    state: QuestionState = QuestionState.IDLE
    target: PerformanceTarget | None = None
    """Target of the last question; kept after the answer."""

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited, including one that will be discarded."""
        return self.state is not QuestionState.IDLE

    def ask(self, target: PerformanceTarget) -> None:
        assert not self.is_open
        self.state, self.target = QuestionState.ASKED, target

    def outdate(self) -> None:
        """Discard the answer to the open question, if any, when it arrives."""
        if self.is_open:
            self.state = QuestionState.OUTDATED

    def accept_answer(self) -> bool:
        """Close the question; return whether its answer is to be used."""
        counts = self.state is not QuestionState.OUTDATED
        self.state = QuestionState.IDLE
        return counts


@dataclass(slots=True)
class PlanControl:
    """The current plan of one job, its lease, and the commands that change them."""

    rules: JobRules
    ranks: JobRanks
    reports: RankReports
    knowledge: JobKnowledge
    question: PolicyQuestion = field(default_factory=PolicyQuestion)
    guard: GuardWindow = field(default_factory=GuardWindow)
    blocks: FullSpeedBlocks = field(init=False)
    has_lease: bool = False
    mixed_before: int = 0
    """Iterations before this index may have run partly under a plan whose clocks were already restored."""
    block_at: int = 0
    """First iteration of the newest block at full speed."""
    experiments: Experiments = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = FullSpeedBlocks(self.rules)
        self.experiments = Experiments(self.rules, self.ranks, self.reports, self.knowledge)

    @property
    def current(self) -> ClockPlan:
        """The plan in force, or the newest plan sent if it has yet to begin."""
        return self.knowledge.plans.current

    def view(self, target: PerformanceTarget, baseline: BaselineView | None) -> JobView | None:
        """Return the job as its policy sees it; None until there is a baseline."""
        affordable_s = None if baseline is None else self.experiments.affordable_s(baseline, target)
        return self.knowledge.view(self.ranks, target, baseline, affordable_s=affordable_s)

    def ask(self, target: PerformanceTarget, baseline: BaselineView | None) -> tuple[Command, ...]:
        """Ask the policy for a plan, unless a question is open or the job waits for something else."""
        if self.question.is_open or self.ranks.changed_ranks or self.ranks.schedule is None or baseline is None:
            return ()
        if self.experiments.is_waiting(target) or self.is_checking_full_speed:
            return ()
        view = self.view(target, baseline)
        assert view is not None
        self.question.ask(target)
        return (AskPolicy(view),)

    def has_new_pace(self, target: PerformanceTarget) -> bool:
        """Return whether the straggler's pace, or that of the power budget, has changed since the last question."""
        asked_for = self.question.target
        return asked_for is not None and (asked_for.straggler_time_s, asked_for.power_time_s) != (
            target.straggler_time_s,
            target.power_time_s,
        )

    def evaluated_for(self, target: PerformanceTarget) -> PerformanceTarget:
        """Return the target for which the current plan was made or kept."""
        return self.guard.target or target

    def follow(self, plan: ClockPlan, baseline: BaselineView | None, terms: Terms) -> tuple[Command, ...]:
        """Send a policy's plan; lease the GPUs before the first clocks, restore them after a plan without any."""
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
        """Send a plan under given terms: until it is replaced, or for some iterations followed by full speed."""
        experiments = self.experiments
        not_before = 0
        if terms.num_iterations is not None:
            not_before = experiments.account.next_experiment(self.knowledge.job_id, self._next_apply_at)
        # If it is early enough, this plan replaces the full-speed block after the last experiment.
        is_replacing = experiments.ends_at is not None and self.rules.are_plans_queued
        send = self._send(plan, after=0 if is_replacing else 1, not_before=not_before)
        experiments.begun(terms, send.apply_at_iteration)
        if terms.num_iterations is None or experiments.is_open:
            return (send,)
        return (send, self._send(self._full_speed_block("until the next experiment"), after=terms.num_iterations))

    def observed(
        self, record: RecordIteration, baseline: BaselineView | None, target: PerformanceTarget
    ) -> tuple[Command, ...]:
        """Charge an iteration to the account; send full speed after an experiment if not sent along with its plan.

        Full speed is sent only after some iterations were seen, because the policy may replace the experiment first.
        """
        plan_id = self.current.plan_id
        self.experiments.observe(record.observation, record.purpose, baseline, self.evaluated_for(target))
        if not self.experiments.is_open or record.observation.plan_id != plan_id:
            return ()
        if sum(iteration.plan_id == plan_id for iteration in self.knowledge.iterations.kept) < _SEEN_ITERATIONS:
            return ()
        send = self._send(self._full_speed_block("until the next experiment"))
        self.experiments.ends_at, self.experiments.is_open = send.apply_at_iteration, False
        return (send,)

    def expect(self, target: PerformanceTarget | None) -> None:
        """Compare the next iterations with the target for which the policy has answered."""
        if target != self.guard.target:
            self.guard.expect(target, since=self.reports.last_index + 1)

    def fall_back(self, reason: str, faults: Faults) -> tuple[Command, ...]:
        """Send full speed and restore the GPUs at once; end a relief block and outdate an open question."""
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

    def prove(self, target: PerformanceTarget) -> tuple[Command, ...]:
        """Run a proof block if it is time for one, then resume the current plan."""
        if target.fills_time or not self._is_settled or not self.blocks.is_proof_due:
            return ()
        self.blocks.begin_proof()
        return self.proof_block("proof of savings")

    def join_block(self, apply_at_iteration: int, target: PerformanceTarget) -> tuple[Command, ...]:
        """Run a proof block in the same iterations as another replica, if possible.

        Replicas end each iteration together. Alone at full speed, this replica would measure the other replicas' slower
        plans as its full speed, and its own plan could become slower still.
        """
        if target.fills_time or not self._is_settled or apply_at_iteration < self._next_apply_at:
            return ()
        self.blocks.begin_proof()
        return self.proof_block("proof of savings, with another replica", not_before=apply_at_iteration)

    def has_changed(self) -> None:
        """Reset what depends on the job's former speed, because the job has changed and is planned again."""
        self.guard.num_faster_returns = self.guard.next_faster_return_at = 0
        self.blocks.begin_anew()

    @property
    def is_checking_full_speed(self) -> bool:
        """Whether a block that checks for a change of full speed is still running."""
        return self.guard.checked_from is not None

    # --- pace ---

    def speed_up(self, target: PerformanceTarget, target_s: float) -> tuple[Command, ...]:
        """Switch to the newest plan that meets a shorter target, or to full speed, without waiting for the policy."""
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
        """Replace all state, keeping this job's rules."""
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
        """Whether a tuned plan is in force on all ranks, and is not an experiment."""
        is_followed = self.knowledge.plans.last_apply_at <= self.reports.last_index
        is_lasting = self.experiments.ends_at is None
        return self.current.purpose is PlanPurpose.TUNED and self.has_lease and is_followed and is_lasting

    @property
    def _next_apply_at(self) -> int:
        """First iteration from which all ranks can follow a plan sent now."""
        return self.reports.last_index + ITERATIONS_AHEAD + self.reports.run_ahead

    def proof_block(self, reason: str, *, not_before: int | None = None) -> tuple[SendPlan, SendPlan]:
        """Return a block at full speed, followed by the current plan.

        With several replicas the block begins one iteration later, so that those that are further ahead can join.
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
        """Return the command that restores the GPUs after a full-speed plan was sent."""
        # Clocks rise at once, but ranks receive the plan later; iterations in between belong to neither plan.
        self.has_lease = False
        self.mixed_before = self.knowledge.plans.last_apply_at
        return RestoreGpus(self.ranks.gpu_uuids, plan.reason)
