"""Order and clocks for `--schedule auto`: found on a pipeline with few microbatches, solved on the whole one.

Theory of operation. The best shape of an order does not depend on the number of microbatches once there are several
times as many as ranks. Shapes of long pipelines are therefore compared with fewer microbatches, at a deadline with the
same slowdown. The best shapes are then solved on the whole pipeline with real clocks, and the cheapest plan is chosen.
Plain 1F1B is one of the shapes; if splitting costs nothing, 1F1B with split backwards is at least as good.
"""

from dataclasses import replace

from gpuenergyd.core.pipeline.graph import Schedule, one_forward_one_backward
from gpuenergyd.errors import TargetError
from gpuenergyd_plan.offline.order_bound import any_order_bound, is_no_cheaper
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan, OrderTask
from gpuenergyd_policies.planning.orders.search import FINALISTS, MOST_LONG_WORK, MOST_WORK, ranked_shapes
from gpuenergyd_policies.planning.orders.shape import RankShape, repaired, shaped_schedule
from gpuenergyd_policies.planning.plan_evaluation import baseline

SHORT_PIPELINE = 1_600
"""Up to this many instructions, orders are compared with all microbatches."""
SHORT_ROUNDS = ((12, 2), (1, 4))
"""(Minimum number of ranks, microbatches per rank) with which orders of longer pipelines are compared."""
DEEP_PIPELINE = 24
"""Minimum number of ranks of a deep pipeline."""
FINALISTS_OF_MANY = 12
"""Number of orders solved with real clocks if all orders of nearly the least energy are wanted."""


def plan_order(task: OrderTask, *, near_ratio: float = 0.0) -> OrderPlan:
    """Return the cheapest order found that meets the deadline within the memory limits.

    With a `near_ratio`, more orders are solved; those within this ratio of the least energy are returned in `near`.

    Raises:
        ProfileError: input or weight gradients were not measured.
        TargetError: no order in the family is fast enough within the limits, which does not prove that none is.
    """
    plans: list[OrderPlan] = []
    for schedule in candidates(task, FINALISTS_OF_MANY if near_ratio > 0 else FINALISTS):
        try:
            plans.append(task.solved(schedule))
        except TargetError:
            continue
        if len(plans) * len(plans[-1].graph.instructions) > SHORT_PIPELINE * FINALISTS:
            break
    if not plans:
        raise TargetError(
            f"iteration time {task.deadline_s:.6g} s: no order was found that is that fast with at most"
            f" {', '.join(map(str, task.limits))} microbatches held per stage"
        )
    best, *others = sorted(plans, key=task.charged_j)
    most_j = best.solved.energy_j * (1 + near_ratio)
    near = tuple(other for other in others if near_ratio > 0 and other.solved.energy_j <= most_j)
    return replace(best, any_order_j=any_order_bound(task), near=near)


def candidates(task: OrderTask, finalists: int = FINALISTS) -> list[Schedule]:
    """Return orders to solve, most promising first; plain 1F1B is the last if it fits in memory."""
    num_ranks = len(task.limits)
    try_whole = not all(is_no_cheaper(task.profile, rank) for rank in range(num_ranks))
    short = _short(task)
    ranked = ranked_shapes(short, try_whole=try_whole, most_work=MOST_WORK if short is task else MOST_LONG_WORK)
    shapes = [repaired(shape, task.limits) for shape, _ in ranked[:finalists]]
    schedules = [shaped_schedule(shape, task.num_microbatches) for shape in dict.fromkeys(shapes)]
    plain = tuple(RankShape(num_ranks - r, num_ranks - r, is_split=False) for r in range(num_ranks))
    if try_whole and repaired(plain, task.limits) == plain:
        schedules.append(shaped_schedule(plain, task.num_microbatches))
    return list(dict.fromkeys(schedules))


def _short(task: OrderTask) -> OrderTask:
    """Return the task with fewer microbatches if the pipeline is long."""
    num_ranks = len(task.limits)
    rounds = next(rounds for least, rounds in SHORT_ROUNDS if num_ranks >= least)
    num_microbatches = max(rounds * num_ranks, 2 * max(task.limits) if num_ranks < DEEP_PIPELINE else 0)
    if 3 * num_ranks * task.num_microbatches <= SHORT_PIPELINE or num_microbatches >= task.num_microbatches:
        return task
    full_speed_s, short_s = (
        baseline(task.graph(one_forward_one_backward(num_ranks, number)), task.profile).iteration_time_s
        for number in (task.num_microbatches, num_microbatches)
    )
    return replace(
        task,
        num_microbatches=num_microbatches,
        deadline_s=short_s * task.deadline_s / full_speed_s,
        limits=tuple(min(limit, num_microbatches) for limit in task.limits),
    )
