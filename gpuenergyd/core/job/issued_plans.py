"""The plans that a job has been given: under which epoch and from which iteration on, and which of them still count.

A job lives for weeks, and each new target may be a new plan, so what is kept of them is bounded. Needed are the newest,
because a late report may name one of their epochs; those of iterations that are still remembered, because a policy
takes an iteration whose plan it does not know for one at full speed; the one that was proven, or the first tuned one,
because what the job showed is passed on with it. Others go, oldest first; those that profiled go last, as a policy
finds in them what it has tried.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from gpuenergyd.core.job.messages import SendPlan
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, ClockPlan, PlanPurpose, baseline_plan

PROOF_PLAN_ID = "proof"
"""Full-speed blocks between tuned iterations."""
ITERATIONS_AHEAD = 3
"""A plan decided after iteration i reaches every rank with the reply to report i+1, which is read during i+2."""
_EPOCHS_KEPT = 64
"""A rank that still follows an older plan than so many sends ago follows none that is known."""
_NEWEST_KEPT = 2 * _EPOCHS_KEPT
"""Iterations of these may still be on their way, or wait for their energy to be known."""
MAX_PLANS_KEPT = 384
"""More than the newest and one for each of the iterations that a job remembers."""
_SAME_TIME_RATIO = 1e-3

Purposes: TypeAlias = Mapping[str | None, PlanPurpose]
"""What the iterations of each plan are for, by plan id."""


@dataclass(slots=True)
class IssuedPlans:
    """A job's plans, oldest first; the last is the one in force or about to be."""

    kept: list[ClockPlan] = field(default_factory=list)
    num_dropped: dict[PlanPurpose, int] = field(default_factory=dict)
    """Plans that are not kept any more, of those issued since the job was last begun anew."""
    proven_id: str | None = None
    """The plan whose iterations have last shown that what it was made from holds."""
    last_apply_at: int = 0
    """The iteration from which on the plan sent last is followed."""
    _id_of_epoch: dict[int, str] = field(default_factory=lambda: {0: BASELINE_PLAN_ID})
    _target_when_made_s: dict[str, float] = field(default_factory=dict)
    """The iteration time that each tuned plan was made for."""
    _for_straggler: set[str] = field(default_factory=set)

    @property
    def current(self) -> ClockPlan:
        """The plan in force, or about to be."""
        return self.kept[-1] if self.kept else baseline_plan()

    def by_id(self, plan_id: str | None) -> ClockPlan | None:
        """Return a plan that still counts."""
        return next((plan for plan in reversed(self.kept) if plan.plan_id == plan_id), None)

    def id_of(self, plan_epoch: int | None) -> str | None:
        """Return the plan that was sent under an epoch; None for an epoch that is not ours."""
        return self._id_of_epoch.get(plan_epoch) if plan_epoch is not None else None

    def purpose_of(self, plan_id: str | None) -> PlanPurpose | None:
        """Return what the iterations of a plan are for; None for iterations under mixed plans."""
        if plan_id in {BASELINE_PLAN_ID, PROOF_PLAN_ID}:
            return PlanPurpose.BASELINE
        plan = self.by_id(plan_id)
        return plan.purpose if plan else None

    def purposes(self) -> Purposes:
        """Return what `purpose_of` returns for every plan there is: for looking at many iterations at once."""
        known: dict[str | None, PlanPurpose] = {plan.plan_id: plan.purpose for plan in self.kept}
        return {**known, BASELINE_PLAN_ID: PlanPurpose.BASELINE, PROOF_PLAN_ID: PlanPurpose.BASELINE}

    def add(self, plan: ClockPlan, remembered_ids: Iterable[str | None]) -> None:
        """Take a plan that is about to be sent; `remembered_ids` are the plans of iterations that still count."""
        self.kept.append(plan)
        if len(self.kept) > MAX_PLANS_KEPT:
            self._drop_one(set(remembered_ids))

    def record_target(self, plan_id: str, target_s: float, *, is_forced: bool) -> None:
        """Note which iteration time a plan was made for, and whether a straggler asked for it."""
        self._target_when_made_s[plan_id] = target_s
        if is_forced:
            self._for_straggler.add(plan_id)

    def send(self, plan: ClockPlan, *, last_reported: int, after: int = 1) -> SendPlan:
        """Send a plan under the next epoch, at the earliest `after` iterations after the one sent last."""
        plan_epoch = max(self._id_of_epoch) + 1
        self._id_of_epoch[plan_epoch] = plan.plan_id
        for forgotten in [epoch for epoch in self._id_of_epoch if epoch <= plan_epoch - _EPOCHS_KEPT]:
            del self._id_of_epoch[forgotten]
        self.last_apply_at = max(last_reported + ITERATIONS_AHEAD, self.last_apply_at + after)
        return SendPlan(plan, plan_epoch, self.last_apply_at)

    def is_for_straggler(self, plan_id: str | None) -> bool:
        """Return whether a straggler set the pace that a plan was made for."""
        return plan_id in self._for_straggler

    def is_fast_enough(self, plan: ClockPlan, target_s: float) -> bool:
        """Return whether a plan was made for no more than this iteration time."""
        made_for_s = self._target_when_made_s.get(plan.plan_id)
        return made_for_s is not None and made_for_s <= target_s * (1 + _SAME_TIME_RATIO)

    def newest_fast_enough(self, target_s: float) -> ClockPlan | None:
        """Return the tuned plan made last that is fast enough, None when none is."""
        tuned = (plan for plan in reversed(self.kept) if plan.purpose is PlanPurpose.TUNED)
        return next((plan for plan in tuned if self.is_fast_enough(plan, target_s)), None)

    def proven_or_first_tuned(self) -> ClockPlan | None:
        """Return the plan that speaks for what the job showed: the later ones chase what has changed since."""
        tuned = [plan for plan in self.kept if plan.purpose is PlanPurpose.TUNED]
        first = tuned[0] if tuned else None
        return next((plan for plan in tuned if plan.plan_id == self.proven_id), first)

    def begin_anew(self) -> None:
        """Forget every plan that was made from what was learned of the job."""
        self.kept = [plan for plan in self.kept if plan.purpose is PlanPurpose.BASELINE]
        at_full_speed = self.num_dropped.get(PlanPurpose.BASELINE, 0)
        self.num_dropped = {PlanPurpose.BASELINE: at_full_speed} if at_full_speed else {}
        self._target_when_made_s.clear()
        self._for_straggler.clear()

    def _drop_one(self, remembered_ids: set[str | None]) -> None:
        """Drop the plan that is needed least: one that was issued again since, else as the head of this file says."""
        num_times = Counter(plan.plan_id for plan in self.kept)
        needed = {*remembered_ids, *(plan.plan_id for plan in self.kept[-_NEWEST_KEPT:])}
        if (speaking := self.proven_or_first_tuned()) is not None:
            needed.add(speaking.plan_id)
        free = [i for i, plan in enumerate(self.kept) if num_times[plan.plan_id] > 1 or plan.plan_id not in needed]
        if not free:
            return
        profiled_last = sorted(free, key=lambda i: self.kept[i].purpose is PlanPurpose.PROFILE)
        dropped = self.kept.pop(profiled_last[0])
        self.num_dropped[dropped.purpose] = self.num_dropped.get(dropped.purpose, 0) + 1
        if num_times[dropped.plan_id] == 1:
            self._target_when_made_s.pop(dropped.plan_id, None)
            self._for_straggler.discard(dropped.plan_id)
