"""Search for extra in-flight microbatches of 1F1B, together with the clocks: the largest saving at full speed.

Theory of operation. With balanced stages plain 1F1B has no slack: the round trip of a microbatch through the later
stages takes exactly as long as the microbatches in flight need. Each further microbatch in flight on stage s adds slack
to that loop, and lower clocks turn slack into energy savings. More is not always better: beyond about twice the plain
number, draining the pipeline at the end costs more than the slack saves. Orders are shapes with full backwards (see
`planning/orders/shape`), which `planning/orders/search` compares by their relaxation.
"""

from collections.abc import Sequence
from dataclasses import replace

from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan, OrderTask
from gpuenergyd_policies.planning.orders.search import FINALISTS, ranked_shapes

MOST_SHAPES = 100
"""Maximum number of shapes that are compared."""


def plan_inflight(task: OrderTask, caps: Sequence[int] | None = None) -> OrderPlan:
    """Return the best 1F1B found with at most `caps[r]` extra microbatches in flight on rank r (None: no limit).

    Raises:
        TargetError: even plain 1F1B cannot meet the deadline.
    """
    num_ranks, num_microbatches = len(task.limits), task.num_microbatches
    extra_limits = [num_microbatches] * (num_ranks - 1) if caps is None else list(caps[:-1])
    limits = [min(num_microbatches, num_ranks - r + extra) for r, extra in enumerate([*extra_limits, 0])]
    task = replace(task, limits=limits, keeps_whole=True)
    ranked = ranked_shapes(task, try_whole=True, most_work=MOST_SHAPES * 3 * num_ranks * num_microbatches)
    extras = [[max(0, rank.num_ahead - (num_ranks - r)) for r, rank in enumerate(shape)] for shape, _ in ranked]
    schedules = [one_forward_one_backward(num_ranks, num_microbatches, extra) for extra in extras[:FINALISTS] or [[]]]
    return min(map(task.solved, schedules), key=lambda plan: plan.solved.energy_j)
