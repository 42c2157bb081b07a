"""Which clocks to try: few iterations that still tell what each kind of instruction costs at each clock.

Energy is only known per GPU and iteration, so an iteration in which all instructions share one clock says nothing about
forward and backward apart. Each kind therefore gets its own clock, in a balanced design: with K levels, shift s runs
the K pairs (level k, level k + s mod K), so that every level of every kind appears equally often. Ranks start at
different places, which keeps the iterations about equally long.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuenergyd.core.pipeline import InstructionKind, Schedule
from gpuenergyd.core.plan import ClockChange, ClockPlan, PlanPurpose, RankClocks

LEVEL_RATIOS = (1.0, 0.935, 0.862, 0.766, 0.66, 0.56)
"""Levels against the maximum clock, dense where power caps and voltage knees sit; below 0.55 no plan is worth it."""
SHIFTS = (1, 3)


@dataclass(frozen=True, slots=True)
class DesignPoint:
    """One iteration's clocks: `levels[r]` gives, per kind of instruction, which level rank r runs it at."""

    levels: tuple[dict[InstructionKind, int], ...]


def clock_levels(supported_sm_clocks_mhz: Sequence[int]) -> tuple[int, ...]:
    """Return the clocks to try on one GPU, descending: the supported ones nearest to `LEVEL_RATIOS` of the maximum."""
    top = max(supported_sm_clocks_mhz)
    nearest = {min(supported_sm_clocks_mhz, key=lambda clock: abs(clock - ratio * top)) for ratio in LEVEL_RATIOS}
    return tuple(sorted(nearest, reverse=True))


def design_points(kinds_of_rank: Sequence[Sequence[InstructionKind]], num_levels: int) -> tuple[DesignPoint, ...]:
    """Return the design: per rank the kinds it runs; the first kind walks the levels, each further one is shifted."""
    points = []
    for shift in SHIFTS:
        for step in range(num_levels):
            levels = tuple(
                {kind: (step + rank + k * shift) % num_levels for k, kind in enumerate(kinds)}
                for rank, kinds in enumerate(kinds_of_rank)
            )
            points.append(DesignPoint(levels))
    return tuple(points)


def kinds_of_ranks(schedule: Schedule) -> tuple[tuple[InstructionKind, ...], ...]:
    """Return the kinds of instruction that each rank runs, in the order of their first appearance."""
    return tuple(tuple(dict.fromkeys(instruction.kind for instruction in order)) for order in schedule.orders)


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
