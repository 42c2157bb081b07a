"""Search over shapes of orders: starts from known schedules and moves to the first neighbour with less energy."""

from gpuenergyd_policies.planning.orders.relaxation import OrderTask, RelaxedOrder, relaxed
from gpuenergyd_policies.planning.orders.shape import OrderShape, neighbours, shaped_schedule, starting_shapes

MOST_WORK, MOST_LONG_WORK = 50_000, 15_000
"""Maximum total of instructions in all compared orders, for short and for long pipelines; this limits the time of
planning."""
FINALISTS = 3
"""Number of orders that are then solved with real clocks."""
FEWEST_STARTS = 4
"""Minimum number of starting points compared."""


def ranked_shapes(task: OrderTask, *, try_whole: bool, most_work: int) -> list[tuple[OrderShape, RelaxedOrder]]:
    """Return shapes that meet the deadline, cheapest first; empty if no shape in the family does."""
    known: dict[OrderShape, RelaxedOrder] = {}

    def tried(shape: OrderShape) -> RelaxedOrder:
        if shape not in known:
            known[shape] = relaxed(task, shaped_schedule(shape, task.num_microbatches))
        return known[shape]

    size = 3 * len(task.limits) * task.num_microbatches
    limits = [min(limit, task.num_microbatches) for limit in task.limits]
    starts = [
        shape for shape in starting_shapes(limits, task.num_microbatches, try_whole=try_whole) if _fits(task, shape)
    ]
    for shape in starts:
        if len(known) >= FEWEST_STARTS and len(known) * size >= most_work:
            break
        tried(shape)
    best = min(known, key=lambda shape: (known[shape].energy_j, known[shape].min_time_s))
    improved = True
    while improved:
        improved = False
        for shape in neighbours(best, limits, try_whole=try_whole):
            if len(known) * size >= most_work:
                break
            if shape not in known and _fits(task, shape) and tried(shape).is_better(known[best]):
                best, improved = shape, True
                break
    possible = [shape for shape in known if known[shape].energy_j < float("inf")]
    return [(shape, known[shape]) for shape in sorted(possible, key=lambda shape: known[shape].energy_j)]


def _fits(task: OrderTask, shape: OrderShape) -> bool:
    """Return whether a shape keeps those properties of 1F1B that the task requires."""
    plain = [len(shape) - r for r in range(len(shape))]
    if task.keeps_whole:
        least = (min(number_ahead, task.num_microbatches) for number_ahead in plain)
        return all(not rank.is_split and rank.num_ahead >= number for rank, number in zip(shape, least, strict=True))
    return not task.keeps_exchange or [rank.num_ahead for rank in shape] == plain
