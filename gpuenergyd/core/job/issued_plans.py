"""A job's plans: the epoch under which each plan was sent, the purpose of its iterations, and which plans are kept.

A job runs for weeks and each new target may need a new plan, so the number of kept plans is bounded. Always kept are:

- the newest plans, because a late report may name one of their epochs;
- the plans of kept iterations, because a policy takes an iteration of an unknown plan for full speed;
- the newest tuned plan in the registered order, because a job may have to return to that order at any time.

Of the others the oldest is dropped first, but trials last, because they show a policy what it has tried.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from gpuenergyd.core.job.messages import SendPlan
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, TRIALS, ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.pipeline.reorder import Orders

PROOF_PLAN_ID = "proof"
"""Plan id of full-speed blocks between tuned iterations."""
ITERATIONS_AHEAD = 3
"""A plan decided after iteration i reaches every rank with the reply to report i+1, which is read during i+2.

This holds for programs that wait for their GPU; other programs have launched later iterations by then."""
_EPOCHS_KEPT = 64
"""Number of epochs remembered; a rank that follows an older one is treated as following no plan."""
_NEWEST_KEPT = 2 * _EPOCHS_KEPT
"""Number of plans whose iterations may still be unreported, or wait for the GPUs' energy counters."""
MAX_PLANS_KEPT = 384
"""More than `_NEWEST_KEPT` plus one plan for each iteration that a job keeps."""
_BASELINE_PLAN = baseline_plan()
_SAME_TIME_RATIO = 1e-3
SETTLING_ITERATIONS = 2
"""Number of iterations excluded after a change of power limit or profile: the change is made during the iteration, and
GPUs take up to half a second to follow a limit (measured on a V100)."""

Purposes: TypeAlias = Mapping[str | None, PlanPurpose]
"""The purpose of each plan's iterations, by plan id."""


@dataclass(frozen=True, slots=True)
class IssuedPlansSnapshot:
    """All state of `IssuedPlans`."""

    kept: tuple[ClockPlan, ...]
    num_dropped: dict[PlanPurpose, int]
    last_apply_at: int
    id_of_epoch: dict[int, str]
    target_when_made_s: dict[str, float]
    for_straggler: frozenset[str]
    settling_from: tuple[int, ...] = ()
    power_limits_w: tuple[tuple[int, float], ...] = ()
    power_profiles: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class IssuedPlans:
    """A job's plans, oldest first; the last one is in force or the next to begin."""

    kept: list[ClockPlan] = field(default_factory=list)
    num_dropped: dict[PlanPurpose, int] = field(default_factory=dict)
    """Number of dropped plans by purpose, since trials last started over."""
    last_apply_at: int = 0
    """First iteration of the newest plan sent."""
    _id_of_epoch: dict[int, str] = field(default_factory=lambda: {0: BASELINE_PLAN_ID})
    target_when_made_s: dict[str, float] = field(default_factory=dict)
    """Target iteration time for which each tuned plan was made."""
    _for_straggler: set[str] = field(default_factory=set)
    _awaited: tuple[int, int] | None = None
    """Epoch of the newest plan sent, and the last iteration reported before it, assuming that it was sent as late as
    possible; None once the plan is followed."""
    _power_limits_w: tuple[tuple[int, float], ...] = ()
    """Power limits of the newest plan sent."""
    _power_profiles: tuple[tuple[int, int], ...] = ()
    """Workload power profiles of the newest plan sent."""
    _settling_from: list[int] = field(default_factory=list)
    """First iterations under changed power limits or profiles."""

    @property
    def current(self) -> ClockPlan:
        """The plan in force, or the newest plan sent if it has yet to begin."""
        return self.kept[-1] if self.kept else _BASELINE_PLAN

    def by_id(self, plan_id: str | None) -> ClockPlan | None:
        """Return a kept plan; None if there is none with this id."""
        return next((plan for plan in reversed(self.kept) if plan.plan_id == plan_id), None)

    def orders_of(self, plan_id: str | None) -> Orders:
        """Return the orders of a plan; empty means the registered orders, or an unknown plan."""
        plan = self.by_id(plan_id)
        return () if plan is None else plan.orders

    def id_of(self, plan_epoch: int | None) -> str | None:
        """Return the id of the plan that was sent under an epoch; None for an unknown epoch."""
        return self._id_of_epoch.get(plan_epoch) if plan_epoch is not None else None

    def purpose_of(self, plan_id: str | None) -> PlanPurpose | None:
        """Return the purpose of a plan's iterations; None for iterations under mixed plans."""
        if plan_id in {BASELINE_PLAN_ID, PROOF_PLAN_ID}:
            return PlanPurpose.BASELINE
        plan = self.by_id(plan_id)
        return plan.purpose if plan else None

    def purposes(self) -> Purposes:
        """Return the purposes of all kept plans, for classifying many iterations at once."""
        known: dict[str | None, PlanPurpose] = {plan.plan_id: plan.purpose for plan in self.kept}
        return {**known, BASELINE_PLAN_ID: PlanPurpose.BASELINE, PROOF_PLAN_ID: PlanPurpose.BASELINE}

    def add(self, plan: ClockPlan, needed_ids: Iterable[str | None]) -> None:
        """Add a plan before it is sent; the plans of kept iterations (`needed_ids`) are not dropped to make room."""
        self.kept.append(plan)
        if len(self.kept) > MAX_PLANS_KEPT:
            self._drop_one(set(needed_ids))

    def record_target(self, plan_id: str, target_s: float, *, is_forced: bool) -> None:
        """Record the target iteration time of a plan, and whether a straggler determines it."""
        self.target_when_made_s[plan_id] = target_s
        if is_forced:
            self._for_straggler.add(plan_id)

    def send(
        self,
        plan: ClockPlan,
        *,
        last_reported: int,
        run_ahead: int = 0,
        after: int = 1,
        not_before: int = 0,
        num_iterations: int | None = None,
    ) -> SendPlan:
        """Return the command that sends a plan under the next epoch.

        The plan begins at least `after` iterations after the plan sent before it, and not before `not_before`. All
        ranks follow it from the same iteration on, which none may have launched when the plan arrives: programs launch
        `run_ahead` iterations before their GPUs begin them. After `num_iterations` the current plan resumes.
        """
        plan_epoch = max(self._id_of_epoch) + 1
        self._id_of_epoch[plan_epoch] = plan.plan_id
        # Epoch 0 is full speed without a plan, which members of a pipeline across hosts follow between plan windows.
        for forgotten in [epoch for epoch in self._id_of_epoch if 0 < epoch <= plan_epoch - _EPOCHS_KEPT]:
            del self._id_of_epoch[forgotten]
        possible_at = last_reported + ITERATIONS_AHEAD + run_ahead
        self.last_apply_at = max(possible_at, self.last_apply_at + after, not_before)
        self._awaited = plan_epoch, self.last_apply_at - possible_at + last_reported
        if (plan.power_limits_w, plan.power_profiles) != (self._power_limits_w, self._power_profiles):
            self._power_limits_w, self._power_profiles = plan.power_limits_w, plan.power_profiles
            self._settling_from = [*self._settling_from[1 - _EPOCHS_KEPT :], self.last_apply_at]
        return SendPlan(plan, plan_epoch, self.last_apply_at, num_iterations)

    def is_settling(self, iteration_index: int) -> bool:
        """Return whether GPUs may not yet have followed a change of their power limits or profiles."""
        return any(0 <= iteration_index - begin < SETTLING_ITERATIONS for begin in self._settling_from)

    def pop_delay(self, plan_epoch: int | None, iteration_index: int) -> int | None:
        """Return once how many iterations after being sent the newest plan is followed; None for another plan."""
        if self._awaited is None or plan_epoch != self._awaited[0]:
            return None
        delay, self._awaited = iteration_index - self._awaited[1], None
        return delay

    def is_for_straggler(self, plan_id: str | None) -> bool:
        """Return whether a plan was made for a straggler's pace."""
        return plan_id in self._for_straggler

    def is_fast_enough(self, plan: ClockPlan, target_s: float) -> bool:
        """Return whether a plan was made for this target iteration time or a shorter one."""
        made_for_s = self.target_when_made_s.get(plan.plan_id)
        return made_for_s is not None and made_for_s <= target_s * (1 + _SAME_TIME_RATIO)

    def newest_fast_enough(self, target_s: float) -> ClockPlan | None:
        """Return the newest tuned plan that is fast enough; None if there is none."""
        tuned = (plan for plan in reversed(self.kept) if plan.purpose is PlanPurpose.TUNED)
        return next((plan for plan in tuned if self.is_fast_enough(plan, target_s)), None)

    def begin_anew(self) -> None:
        """Drop all plans except full-speed ones, because trials start over."""
        self.kept = [plan for plan in self.kept if plan.purpose is PlanPurpose.BASELINE]
        at_full_speed = self.num_dropped.get(PlanPurpose.BASELINE, 0)
        self.num_dropped = {PlanPurpose.BASELINE: at_full_speed} if at_full_speed else {}
        self.target_when_made_s.clear()
        self._for_straggler.clear()

    def snapshot(self) -> IssuedPlansSnapshot:
        """Return a copy of all state."""
        return IssuedPlansSnapshot(
            kept=tuple(self.kept),
            num_dropped=dict(self.num_dropped),
            last_apply_at=self.last_apply_at,
            id_of_epoch=dict(self._id_of_epoch),
            target_when_made_s=dict(self.target_when_made_s),
            for_straggler=frozenset(self._for_straggler),
            settling_from=tuple(self._settling_from),
            power_limits_w=self._power_limits_w,
            power_profiles=self._power_profiles,
        )

    def restore(self, snapshot: IssuedPlansSnapshot) -> None:
        """Replace all state."""
        self.kept, self.num_dropped = list(snapshot.kept), dict(snapshot.num_dropped)
        self.last_apply_at = snapshot.last_apply_at
        self._id_of_epoch = dict(snapshot.id_of_epoch)
        self.target_when_made_s = dict(snapshot.target_when_made_s)
        self._for_straggler = set(snapshot.for_straggler)
        self._settling_from, self._power_limits_w = list(snapshot.settling_from), snapshot.power_limits_w
        self._power_profiles = snapshot.power_profiles

    def _drop_one(self, needed_ids: set[str | None]) -> None:
        """Drop one plan: one that was issued again later, otherwise the one chosen by the rules of this module."""
        num_times = Counter(plan.plan_id for plan in self.kept)
        needed = {*needed_ids, *(plan.plan_id for plan in self.kept[-_NEWEST_KEPT:])}
        plain = (plan.plan_id for plan in reversed(self.kept) if plan.purpose is PlanPurpose.TUNED and not plan.orders)
        needed.update(itertools.islice(plain, 1))
        free = [i for i, plan in enumerate(self.kept) if num_times[plan.plan_id] > 1 or plan.plan_id not in needed]
        if not free:
            return
        trials_last = sorted(free, key=lambda i: self.kept[i].purpose in TRIALS)
        dropped = self.kept.pop(trials_last[0])
        self.num_dropped[dropped.purpose] = self.num_dropped.get(dropped.purpose, 0) + 1
        if num_times[dropped.plan_id] == 1:
            self.target_when_made_s.pop(dropped.plan_id, None)
            self._for_straggler.discard(dropped.plan_id)
