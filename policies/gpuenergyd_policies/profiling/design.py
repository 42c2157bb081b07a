"""Chooses the SM clocks of profiling: few iterations that tell the energy of each kind of instruction at each clock.

Energy is only known per GPU and iteration, so iterations with one clock for all instructions cannot separate forward
from backward. Each kind therefore gets its own clock. The design is a complete factorial, run in balanced blocks,
because profiling may stop after any of them: with K levels, shift s runs the K pairs (level k, level k + s mod K), so
that every level of every kind appears equally often. Ranks start at different levels, which keeps iterations about
equally long. The order within and between blocks is random, with a seed; an iteration at full speed between two blocks
shows drift.
"""

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPurpose, RankClocks
from gpuenergyd_policies.profiling.times import TimeCurve

LOWEST_RATIO = 0.55
"""Lowest clock of a plan, as a share of the maximum clock; lower clocks cost more time than they save energy."""
LEVEL_RATIOS = (1.0, 0.935, 0.862, 0.766, 0.66, LOWEST_RATIO)
"""Levels as shares of the maximum clock, densest near typical power caps and voltage knees."""
LOWEST_WAIT_RATIO = 0.3
"""Lowest clock of a phase that waits for other ranks, as a share of the maximum clock: it takes no longer there, and
where it does, as collectives whose kernels become the limit, profiling shows it. Below the voltage knee power falls
with the clock alone, and most of it is static then. A wait for data runs nothing and has no such limit."""
LevelsOfKinds = Sequence[Mapping[InstructionKind, Sequence[int]]]
"""By rank, the levels of each kind of instruction."""


@dataclass(frozen=True, slots=True)
class DesignPoint:
    """The clocks of one iteration: `levels[r]` is the level of each kind of instruction on rank r."""

    levels: tuple[dict[InstructionKind, int], ...]


def clock_levels(supported_sm_clocks_mhz: Sequence[int]) -> tuple[int, ...]:
    """Return the levels of one GPU, descending: the supported clocks nearest to `LEVEL_RATIOS` of the maximum."""
    top = max(supported_sm_clocks_mhz)
    usable = [clock for clock in supported_sm_clocks_mhz if clock >= LOWEST_RATIO * top]
    nearest = {min(usable, key=lambda clock: abs(clock - ratio * top)) for ratio in LEVEL_RATIOS}
    return tuple(sorted(nearest, reverse=True))


def wait_levels(supported_sm_clocks_mhz: Sequence[int], num_levels: int, kind: InstructionKind) -> tuple[int, ...]:
    """Return the levels of a kind of phase that waits, descending: evenly spaced, as many as other kinds have."""
    top = max(supported_sm_clocks_mhz)
    lowest_mhz = LOWEST_WAIT_RATIO * top if kind.waits_for_ranks else min(supported_sm_clocks_mhz)
    step_mhz = (top - lowest_mhz) / max(num_levels - 1, 1)
    wanted_mhz = [top - k * step_mhz for k in range(num_levels)]
    return tuple(min(supported_sm_clocks_mhz, key=lambda clock: abs(clock - mhz)) for mhz in wanted_mhz)


_AS_MEASURED_RATIO = 0.04
"""Relative distance within which a clock counts as measured; bends are not located more precisely."""


def next_clock(
    supported_sm_clocks_mhz: Sequence[int], measured_mhz: Collection[int], curves: Iterable[TimeCurve] = ()
) -> int | None:
    """Return the most informative clock to measure next, None when all gaps between measured clocks are small.

    First the lowest and highest clock of plans and their geometric mean; then the highest clock below a power cap, as
    estimated from the curves of this GPU: without a knot there, interpolation is wrong on both sides. Then the middle
    of the widest gap, measured in squares of clocks, which energy is proportional to below a cap.
    """
    top = max(supported_sm_clocks_mhz)
    usable = sorted(clock for clock in supported_sm_clocks_mhz if clock >= LOWEST_RATIO * top)
    middle = min(usable, key=lambda clock: abs(clock - math.sqrt(usable[0] * top)))
    for clock in (top, usable[0], middle):
        if clock not in measured_mhz:
            return clock
    bends = [bend for bend in (curve.cap_mhz or curve.bend_mhz for curve in curves) if bend is not None]
    bend_mhz = max((clock for clock in usable if clock <= min(bends, default=math.inf)), default=top)
    if all(abs(clock / bend_mhz - 1) > _AS_MEASURED_RATIO for clock in measured_mhz):
        return bend_mhz
    below_mhz = bend_mhz / (1 + _AS_MEASURED_RATIO)
    gaps = [(low, high) for low, high in pairwise(sorted(measured_mhz)) if usable[0] <= low < below_mhz]
    low, high = max(gaps, key=lambda gap: gap[1] ** 2 - gap[0] ** 2)
    if high / low - 1 <= _AS_MEASURED_RATIO:
        return None
    return min(usable, key=lambda clock: abs(clock - math.sqrt(low * high)))


def design_points(
    kinds_of_rank: Sequence[Sequence[InstructionKind]], num_levels: int, *, seed: str = ""
) -> tuple[DesignPoint, ...]:
    """Return the design: on each rank, the first kind runs through the levels, and other kinds are shifted.

    The block without a shift, with all kinds at one clock, is the least informative and comes last.
    """
    draw = random.Random(seed)  # noqa: S311  not for cryptography
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
    """Return the kinds of instruction of each rank, in order of first appearance."""
    return tuple(tuple(dict.fromkeys(instruction.kind for instruction in order)) for order in schedule.orders)


def profile_plan(
    plan_id: str,
    point: DesignPoint,
    schedule: Schedule,
    levels_mhz: Sequence[Sequence[int]],
    *,
    reason: str,
    held_ranks: Collection[int] = (),
    wait_levels_mhz: LevelsOfKinds | None = None,
    fast: Collection[Instruction] = (),
) -> ClockPlan:
    """Return the plan of one design point; each clock is requested when its instruction begins.

    Phases that wait have the levels of `wait_levels_mhz`, by default those of other instructions. Instructions that are
    `fast` run at the highest level.

    On `held_ranks` the clocks of a point follow one another, each for an equal share of the iteration, instead of
    changing with the kind of instruction: where clocks take effect as late as instructions last, that is the only way
    to see instructions at a clock. Where some are fast, the others have one clock, for few calls.
    """
    ranks = []
    for pp_rank, order in enumerate(schedule.orders):
        waiting_mhz = {} if wait_levels_mhz is None else wait_levels_mhz[pp_rank]
        clock_of = {
            kind: waiting_mhz.get(kind, levels_mhz[pp_rank])[level] for kind, level in point.levels[pp_rank].items()
        }
        top_mhz, lowered = levels_mhz[pp_rank][0], [one for one in order if one not in fast]
        lower_mhz = {one: clock_of[one.kind] for one in lowered}
        if pp_rank in held_ranks and lowered:
            own = [clock_of[lowered[0].kind]] if len(lowered) < len(order) else list(clock_of.values())
            held = [clock for clock in own for _ in range(-(-len(lowered) // len(own)))]
            lower_mhz = dict(zip(lowered, held, strict=False))
        clocks = tuple(lower_mhz.get(one, top_mhz) for one in order)
        changes = tuple(
            ClockChange(instruction, 0.0, clock)
            for position, (instruction, clock) in enumerate(zip(order, clocks, strict=True))
            if position == 0 or clock != clocks[position - 1]
        )
        ranks.append(RankClocks(pp_rank, clocks, changes))
    return ClockPlan(plan_id, PlanPurpose.PROFILE, tuple(ranks), reason=reason)
