"""Iterations in which some ranks of a pipeline still follow the old plan while others already follow the next one.

Ranks on several hosts can only change plans together by agreeing in advance on the iteration, which takes several
iterations. A plan for a straggler's pace needs no such agreement if no mix of the old and the new plan is slower than
the new one, because the replicas wait for the straggler in any case. The slowest possible mix runs every instruction at
the lower of its two clocks.
"""

from collections import defaultdict
from collections.abc import Sequence

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass, Schedule
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.pipeline.timeline import makespan_s

MAX_MIXED_RATIO = 0.01
"""Largest permitted excess time of a mixed iteration over one of the next plan; it lasts for one or two iterations."""


def may_be_mixed(
    graph: DependencyGraph,
    full_speed: IterationObservation,
    now_mhz: Sequence[int | None],
    next_mhz: Sequence[int | None],
    top_mhz: Sequence[int],
) -> bool:
    """Return whether no mix of two plans is slower than the next plan by more than `MAX_MIXED_RATIO`.

    Times are assumed inverse to the clock, which overestimates the cost of a lower clock.

    Args:
        graph: the pipeline.
        full_speed: an iteration at full speed; returns False unless it has a time for each class.
        now_mhz: clocks of the plan in force in the graph's node order; None is full speed.
        next_mhz: clocks of the next plan.
        top_mhz: maximum clock of each rank.
    """
    totals: dict[InstructionClass, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for sample in full_speed.instruction_samples:
        time_s, count = totals[sample.instruction_class]
        totals[sample.instruction_class] = time_s + sample.count * sample.time_s, count + sample.count
    if any(key not in totals for key in graph.classes):
        return False
    times_s = [time_s / count for time_s, count in (totals[key] for key in graph.classes)]
    mixed_s, next_s = [], []
    for key, now, after in zip(graph.class_of, now_mhz, next_mhz, strict=True):
        top = top_mhz[graph.classes[key].pp_rank]
        next_s.append(times_s[key] * top / (after or top))
        mixed_s.append(max(next_s[-1], times_s[key] * top / (now or top)))
    return makespan_s(graph, mixed_s) <= (1 + MAX_MIXED_RATIO) * makespan_s(graph, next_s)


def node_clocks_mhz(schedule: Schedule, plan: ClockPlan) -> list[int | None]:
    """Return a plan's clocks in the graph's node order: rank by rank, in program order; None means full speed."""
    clocks = {rank.pp_rank: rank.sm_clocks_mhz for rank in plan.ranks}
    orders = enumerate(schedule.orders)
    return [mhz for pp_rank, order in orders for mhz in clocks.get(pp_rank, (None,) * len(order))]
