"""Clock plans: an SM clock for every instruction of an iteration, and the clock changes that apply it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.pipeline.learned_curves import LearnedCurves
from gpuenergyd.core.pipeline.reorder import OrderAdvice, Orders, check_orders
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import PlanError


class PlanPurpose(StrEnum):
    """Purpose of a plan; decides what its iterations are compared with."""

    BASELINE = "baseline"
    """Full speed: the reference of all savings."""
    TRIAL = "trial"
    """Runs a slower setting or another order for a few iterations, to measure what it would save."""
    PROFILE = "profile"
    """A trial, in histories and policies of versions up to 0.3."""
    TUNED = "tuned"
    """Saves energy within the target iteration time."""
    PREDICTED = "predicted"
    """Never applied: a policy's predicted plan for a job whose clocks may not be set."""


TRIALS = frozenset({PlanPurpose.TRIAL, PlanPurpose.PROFILE})
"""Purposes of plans whose iterations neither save nor are what savings refer to."""


@dataclass(frozen=True, slots=True)
class ClockChange:
    """Request for a clock, sent `offset_s` after the start of an instruction.

    A lower clock is requested when the slow instruction begins. A higher clock is requested early, during the
    instruction before. A late change then costs a little energy but no time.
    """

    instruction: Instruction
    offset_s: float
    sm_clock_mhz: int


@dataclass(frozen=True, slots=True)
class RankClocks:
    """Clocks of one rank: `sm_clocks_mhz[k]` is for its k-th instruction; None does not set the clock."""

    pp_rank: int
    sm_clocks_mhz: tuple[int | None, ...]
    changes: tuple[ClockChange, ...] = ()
    power_limit_w: float | None = None
    """Power limit of each GPU of the rank for the whole iteration; None keeps the limit from before the job."""
    power_profile: int | None = None
    """Workload power profile of each GPU of the rank for the whole iteration; None requests none for the job."""


@dataclass(frozen=True, slots=True)
class PlanPrediction:
    """Predicted time and energy of a plan; no plan with that iteration time can use less than `lower_bound_j`."""

    iteration_time_s: float
    energy_j: float
    lower_bound_j: float | None = None
    baseline_time_s: float | None = None
    baseline_energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class PredictedSaving:
    """Predicted saving of a plan against full speed, at least 0; exactly 0 if its interval includes 0."""

    ratio: float
    low_ratio: float | None
    high_ratio: float | None
    """Bounds of the interval; None if the policy provides none."""


SAVING_LOW, SAVING_HIGH = "saving_low_ratio", "saving_high_ratio"
"""Names of figures of a plan: the bounds of its predicted saving."""
_KNOWN_WITHIN_RATIO = 0.02
"""Maximum half-width of an interval of savings for which a single value is shown."""


@dataclass(frozen=True, slots=True)
class SavingAdvice:
    """Saving of a job if a larger slowdown were permitted, with its 90 % interval; measured or predicted."""

    max_slowdown_ratio: float
    saving_ratio: float
    low_ratio: float
    high_ratio: float
    is_measured: bool

    @property
    def is_range(self) -> bool:
        """Whether the interval is too wide to show a single value."""
        return self.high_ratio - self.low_ratio > 2 * _KNOWN_WITHIN_RATIO + 1e-9


@dataclass(frozen=True, slots=True)
class ClockPlan:
    """Clocks of all ranks of a pipeline for one iteration; with empty `ranks` no clock is set."""

    plan_id: str
    purpose: PlanPurpose
    ranks: tuple[RankClocks, ...] = ()
    predicted: PlanPrediction | None = None
    reason: str = ""
    figures: tuple[tuple[str, float], ...] = ()
    """Numbers that the policy stores with the plan and finds again in `JobView.issued_plans`."""
    advice: tuple[SavingAdvice, ...] = ()
    """What a larger permitted slowdown would save."""
    orders: Orders = ()
    """Instructions of each rank under this plan, if not in the registered order."""
    order_advice: OrderAdvice | None = None
    """Predicted saving of another order; a policy may add it to a plan that it returns again."""
    learned: LearnedCurves | None = None
    """Curves measured in the job until now, stored for later jobs; not part of the plan in force."""

    def schedule(self, registered: Schedule) -> Schedule:
        """Return the schedule that ranks run under this plan, given their registered schedule."""
        return replace(registered, orders=self.orders) if self.orders else registered

    def figure(self, name: str) -> float | None:
        """Return the policy's number with this name; None if there is none."""
        return dict(self.figures).get(name)

    @property
    def predicted_saving(self) -> PredictedSaving | None:
        """Predicted saving of the plan; None if it has no predicted energy at full speed for comparison.

        A plan at full speed is always possible, so the saving is never negative.
        """
        if self.predicted is None or not self.predicted.baseline_energy_j:
            return None
        ratio = max(0.0, 1.0 - self.predicted.energy_j / self.predicted.baseline_energy_j)
        low, high = self.figure(SAVING_LOW), self.figure(SAVING_HIGH)
        if low is None or high is None:
            return PredictedSaving(ratio, None, None)
        low, high = max(0.0, low), max(0.0, high)
        return PredictedSaving(ratio if low > 0.0 else 0.0, low, high)

    def changes_of(self, pp_rank: int) -> tuple[ClockChange, ...]:
        """Return the clock changes of one rank; empty if the plan does not set its clock."""
        for rank in self.ranks:
            if rank.pp_rank == pp_rank:
                return rank.changes
        return ()

    @property
    def power_limits_w(self) -> tuple[tuple[int, float], ...]:
        """Ranks with a power limit under this plan, each with its limit in watts."""
        return tuple((rank.pp_rank, rank.power_limit_w) for rank in self.ranks if rank.power_limit_w is not None)

    @property
    def power_profiles(self) -> tuple[tuple[int, int], ...]:
        """Ranks with a workload power profile under this plan, each with the number of the profile."""
        return tuple((rank.pp_rank, rank.power_profile) for rank in self.ranks if rank.power_profile is not None)

    @property
    def sets_clocks(self) -> bool:
        """Whether ranks request clocks under this plan, instead of only power limits or power profiles."""
        return any(rank.changes for rank in self.ranks)


BASELINE_PLAN_ID = "baseline"


def baseline_plan(plan_id: str = BASELINE_PLAN_ID, *, reason: str = "baseline") -> ClockPlan:
    """Return the plan that keeps every GPU at its default clocks, without leases."""
    return ClockPlan(plan_id=plan_id, purpose=PlanPurpose.BASELINE, reason=reason)


def full_speed_plan(
    plan_id: str,
    schedule: Schedule,
    supported_sm_clocks_mhz: Sequence[Sequence[int]],
    *,
    reason: str,
    sets_clocks: bool = True,
) -> ClockPlan:
    """Return the plan that locks every GPU at its maximum clock: full speed while the leases are kept.

    With `sets_clocks` False, it only removes power limits and workload power profiles.
    """
    ranks = []
    for pp_rank, order in enumerate(schedule.orders):
        if not sets_clocks:
            ranks.append(RankClocks(pp_rank, (None,) * len(order)))
            continue
        top = max(supported_sm_clocks_mhz[pp_rank])
        ranks.append(RankClocks(pp_rank, (top,) * len(order), constant_clock_changes(order, top)))
    return ClockPlan(plan_id, PlanPurpose.BASELINE, tuple(ranks), reason=reason)


def constant_clock_changes(order: Sequence[Instruction], sm_clock_mhz: int) -> tuple[ClockChange, ...]:
    """Return the single change that sets one clock for the whole iteration."""
    return (ClockChange(order[0], 0.0, sm_clock_mhz),)


PowerLimitRange = tuple[float, float]
"""Lowest and highest power limit of a GPU, in watts."""


def check_plan(
    plan: ClockPlan,
    schedule: Schedule,
    supported_sm_clocks_mhz: Sequence[Sequence[int]],
    power_limit_ranges_w: Sequence[PowerLimitRange | None] | None = None,
    power_profiles: Sequence[Sequence[int]] | None = None,
) -> None:
    """Check that a plan fits its pipeline and its GPUs; the k-th element of each sequence is for rank k.

    Raises:
        PlanError: the plan has a rank, instruction, clock, power limit or power profile that does not exist, an offset
            outside [0, 3600) s, orders without clocks, or the purpose `PREDICTED`.
        ScheduleError: the plan's orders cannot replace those of the pipeline.
    """
    if plan.orders:
        schedule = _checked_schedule(plan, schedule)
    if plan.purpose is PlanPurpose.PREDICTED:
        raise PlanError(f"plan {plan.plan_id!r}: purpose PREDICTED is only for jobs whose clocks may not be set")
    for rank in plan.ranks:
        if not 0 <= rank.pp_rank < schedule.num_ranks:
            raise PlanError(f"plan {plan.plan_id!r}: no rank {rank.pp_rank}; the pipeline has {schedule.num_ranks}")
        order = schedule.orders[rank.pp_rank]
        if len(rank.sm_clocks_mhz) != len(order):
            raise PlanError(
                f"plan {plan.plan_id!r}: {count_text(len(rank.sm_clocks_mhz), 'clock')} for rank {rank.pp_rank},"
                f" which has {count_text(len(order), 'instruction')}"
            )
        supported = set(supported_sm_clocks_mhz[rank.pp_rank])
        known = set(order)
        wanted = {clock for clock in rank.sm_clocks_mhz if clock is not None}
        wanted |= {change.sm_clock_mhz for change in rank.changes}
        if not wanted <= supported:
            raise PlanError(
                f"plan {plan.plan_id!r}: rank {rank.pp_rank} cannot run at {sorted(wanted - supported)} MHz;"
                f" supported: {min(supported)} to {max(supported)} MHz"
            )
        _check_power_limit(plan, rank, power_limit_ranges_w[rank.pp_rank] if power_limit_ranges_w else None)
        _check_power_profile(plan, rank, power_profiles[rank.pp_rank] if power_profiles else ())
        for change in rank.changes:
            if change.instruction not in known:
                raise PlanError(f"plan {plan.plan_id!r}: rank {rank.pp_rank} does not run {change.instruction}")
            if not 0.0 <= change.offset_s < 3600.0:
                raise PlanError(f"plan {plan.plan_id!r}: offset {change.offset_s} s must be in [0, 3600)")


def _checked_schedule(plan: ClockPlan, registered: Schedule) -> Schedule:
    """Return the schedule under a plan with orders; each rank needs clocks, so that it can return to its own order."""
    if len(plan.ranks) != len(plan.orders):
        raise PlanError(
            f"plan {plan.plan_id!r}: orders for {count_text(len(plan.orders), 'rank')}, clocks for {len(plan.ranks)}"
        )
    check_orders(plan.orders, registered)
    return plan.schedule(registered)


def _check_power_limit(plan: ClockPlan, rank: RankClocks, range_w: PowerLimitRange | None) -> None:
    if rank.power_limit_w is None:
        return
    if range_w is None:
        raise PlanError(f"plan {plan.plan_id!r}: the power of rank {rank.pp_rank} cannot be limited")
    low_w, high_w = range_w
    if not low_w <= rank.power_limit_w <= high_w:
        raise PlanError(
            f"plan {plan.plan_id!r}: rank {rank.pp_rank} cannot be limited to {rank.power_limit_w:g} W;"
            f" supported: {low_w:g} to {high_w:g} W"
        )


def _check_power_profile(plan: ClockPlan, rank: RankClocks, offered: Sequence[int]) -> None:
    if rank.power_profile is not None and rank.power_profile not in offered:
        known = ", ".join(map(str, offered)) or "none"
        raise PlanError(
            f"plan {plan.plan_id!r}: rank {rank.pp_rank} has no workload power profile {rank.power_profile};"
            f" offered: {known}"
        )


def instruction_key(instruction: Instruction) -> tuple[InstructionKind, int, int]:
    """Return the key of an instruction within its rank: kind, microbatch, chunk."""
    return instruction.kind, instruction.microbatch_index, instruction.chunk_index
