"""Which clocks to try: few iterations that still tell what each kind of instruction costs at each clock.

Energy is only known per GPU and iteration, so an iteration in which all instructions share one clock says nothing about
forward and backward apart. Each kind therefore gets its own clock. The design is a complete factorial, run in blocks
that are balanced each by itself, because profiling may stop after any of them: with K levels, shift s runs the K pairs
(level k, level k + s mod K), so that every level of every kind appears equally often. Ranks start at different places,
which keeps the iterations about equally long. Order is random, by a seed, within blocks and between them; an iteration
at full speed between two blocks shows drift.
"""

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, Schedule
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPurpose, RankClocks
from gpuenergyd_policies.profiling.times import TimeCurve

LOWEST_RATIO = 0.55
"""Against the maximum clock; below it no plan is worth it."""
LEVEL_RATIOS = (1.0, 0.935, 0.862, 0.766, 0.66, LOWEST_RATIO)
"""Levels against the maximum clock, dense where power caps and voltage knees sit."""


@dataclass(frozen=True, slots=True)
class DesignPoint:
    """One iteration's clocks: `levels[r]` gives, per kind of instruction, which level rank r runs it at."""

    levels: tuple[dict[InstructionKind, int], ...]


def clock_levels(supported_sm_clocks_mhz: Sequence[int]) -> tuple[int, ...]:
    """Return the clocks to try on one GPU, descending: the supported ones nearest to `LEVEL_RATIOS` of the maximum."""
    top = max(supported_sm_clocks_mhz)
    worth_it = [clock for clock in supported_sm_clocks_mhz if clock >= LOWEST_RATIO * top]
    nearest = {min(worth_it, key=lambda clock: abs(clock - ratio * top)) for ratio in LEVEL_RATIOS}
    return tuple(sorted(nearest, reverse=True))


_AS_MEASURED_RATIO = 0.04
"""A clock this near to a measured one need not be measured: no bend is known better."""


def next_clock(
    supported_sm_clocks_mhz: Sequence[int], measured_mhz: Collection[int], curves: Iterable[TimeCurve] = ()
) -> int | None:
    """Return the clock that would tell most beside those measured, None when every gap between them is small.

    First the ends of what a plan may use and their geometric mean; then the highest clock at which a power cap holds
    nothing, as the curves of this GPU's classes show it: without a knot there both sides come out wrong. Then the
    middle of the widest gap. Gaps count in squares of clocks, as energy moves with them; above a cap it does not.
    """
    top = max(supported_sm_clocks_mhz)
    worth_it = sorted(clock for clock in supported_sm_clocks_mhz if clock >= LOWEST_RATIO * top)
    middle = min(worth_it, key=lambda clock: abs(clock - math.sqrt(worth_it[0] * top)))
    for clock in (top, worth_it[0], middle):
        if clock not in measured_mhz:
            return clock
    bends = [bend for bend in (curve.cap_mhz or curve.bend_mhz for curve in curves) if bend is not None]
    bend_mhz = max((clock for clock in worth_it if clock <= min(bends, default=math.inf)), default=top)
    if all(abs(clock / bend_mhz - 1) > _AS_MEASURED_RATIO for clock in measured_mhz):
        return bend_mhz
    below_mhz = bend_mhz / (1 + _AS_MEASURED_RATIO)
    gaps = [(low, high) for low, high in pairwise(sorted(measured_mhz)) if worth_it[0] <= low < below_mhz]
    low, high = max(gaps, key=lambda gap: gap[1] ** 2 - gap[0] ** 2)
    if high / low - 1 <= _AS_MEASURED_RATIO:
        return None
    return min(worth_it, key=lambda clock: abs(clock - math.sqrt(low * high)))


def design_points(
    kinds_of_rank: Sequence[Sequence[InstructionKind]], num_levels: int, *, seed: str = ""
) -> tuple[DesignPoint, ...]:
    """Return the design, per rank with the kinds it runs: the first kind walks the levels, others are shifted.

    The block without a shift, all kinds at one clock, tells least and comes last.
    """
    draw = random.Random(seed)  # noqa: S311  an order, not a secret
    shifts = list(range(1, num_levels))
    draw.shuffle(shifts)
    points: list[DesignPoint] = []
    for shift in (*shifts, 0):
        if points:
            points.append(DesignPoint(tuple(dict.fromkeys(kinds, 0) for kinds in kinds_of_rank)))
        steps = list(range(num_levels))
        draw.shuffle(steps)
        for step in steps:
            levels = tuple(
                {kind: (step + rank + k * shift + k // 2) % num_levels for k, kind in enumerate(kinds)}
                for rank, kinds in enumerate(kinds_of_rank)
            )
            points.append(DesignPoint(levels))
    return tuple(points)


def kinds_of_ranks(schedule: Schedule) -> tuple[tuple[InstructionKind, ...], ...]:
    """Return the kinds of instruction that each rank runs, in the order of their first appearance."""
    return tuple(tuple(dict.fromkeys(instruction.kind for instruction in order)) for order in schedule.orders)


def lost_ratio(
    point: DesignPoint, levels_mhz: Sequence[Sequence[int]], busy_s: Mapping[InstructionClass, float]
) -> float:
    """Return by how much an iteration under a design point may be longer than one at full speed, as a ratio of it.

    Pessimistic: time goes with 1 / clock, and nothing hides in bubbles. `busy_s` is what each class takes in an
    iteration at full speed.
    """
    return max(
        sum(
            _share(rank, kind, levels, busy_s) * (levels_mhz[rank][0] / levels_mhz[rank][level] - 1)
            for kind, level in levels.items()
        )
        for rank, levels in enumerate(point.levels)
    )


def _share(
    rank: int,
    kind: InstructionKind,
    levels: Mapping[InstructionKind, int],
    busy_s: Mapping[InstructionClass, float],
) -> float:
    time_s = {k: sum(t for c, t in busy_s.items() if (c.pp_rank, c.kind) == (rank, k)) for k in levels}
    total_s = sum(time_s.values())
    return time_s[kind] / total_s if total_s > 0 else 1 / len(levels)


def profile_plan(
    plan_id: str, point: DesignPoint, schedule: Schedule, levels_mhz: Sequence[Sequence[int]], *, reason: str
) -> ClockPlan:
    """Return the plan of one design point; each clock is asked for when its instruction begins."""
    ranks = []
    for pp_rank, order in enumerate(schedule.orders):
        clocks = tuple(levels_mhz[pp_rank][point.levels[pp_rank][instruction.kind]] for instruction in order)
        changes = tuple(
            ClockChange(instruction, 0.0, clock)
            for position, (instruction, clock) in enumerate(zip(order, clocks, strict=True))
            if position == 0 or clock != clocks[position - 1]
        )
        ranks.append(RankClocks(pp_rank, clocks, changes))
    return ClockPlan(plan_id, PlanPurpose.PROFILE, tuple(ranks), reason=reason)
