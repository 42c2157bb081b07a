"""Search for extra in-flight microbatches of 1F1B, together with the clocks: the largest saving at full speed.

Theory of operation. With balanced stages plain 1F1B has no slack: the round trip of a microbatch through the later
stages takes exactly as long as the microbatches in flight need. Each further microbatch in flight on stage s adds slack
to that loop, and lower clocks turn slack into energy savings. More is not always better: beyond about twice the plain
number, draining the pipeline at the end costs more than the slack saves. Orders are shapes with full backwards (see
`orders/shape`), which `orders/search` compares by their relaxation.
"""

from collections.abc import Sequence
from dataclasses import replace

from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.policy_api.policy import OfflineRequest
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan, OrderTask
from gpuenergyd_policies.planning.orders.search import FINALISTS, ranked_shapes

MOST_SHAPES = 100
"""Maximum number of shapes that are compared."""


def caps_from_microbatches(memory_limit_microbatches: Sequence[int]) -> tuple[int, ...]:
    """Return the number of microbatches that fit on each rank in addition to those of plain 1F1B.

    Raises:
        ScheduleError: plain 1F1B itself does not fit.
    """
    num_ranks = len(memory_limit_microbatches)
    for pp_rank, limit in enumerate(memory_limit_microbatches):
        if limit < num_ranks - pp_rank:
            raise ScheduleError(
                f"1F1B keeps {count_text(num_ranks - pp_rank, 'microbatch')} in flight on rank {pp_rank}, memory"
                f" holds {limit}"
            )
    return tuple(limit - (num_ranks - pp_rank) for pp_rank, limit in enumerate(memory_limit_microbatches))


def requested_caps(request: OfflineRequest, num_ranks: int) -> tuple[int, ...] | None:
    """Return each rank's limit of extra microbatches: the minimum of the requested number and the memory limits.

    Raises:
        ScheduleError: the schedule is not 1F1B, or does not fit into memory even without extra microbatches.
    """
    if request.schedule is None or request.schedule.name != "1f1b":
        name = request.schedule.name if request.schedule else "unknown"
        raise ScheduleError(f"extra in-flight microbatches need schedule 1f1b, this one is {name}")
    caps: list[tuple[int, ...]] = []
    if limit := request.options.get("memory_limit_microbatches"):
        caps.append(caps_from_microbatches(_per_rank(limit, num_ranks)))
    if room := request.options.get("extra_inflight_caps"):
        caps.append(_per_rank(room, num_ranks))
    if isinstance(request.extra_inflight, int):
        caps.append((request.extra_inflight,) * num_ranks)
    return tuple(min(of_rank) for of_rank in zip(*caps, strict=True)) if caps else None


def _per_rank(text: str, num_ranks: int) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    return values if len(values) > 1 else values * num_ranks


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
    extras = [[max(0, own.num_ahead - (num_ranks - r)) for r, own in enumerate(shape)] for shape, _ in ranked]
    schedules = [one_forward_one_backward(num_ranks, num_microbatches, extra) for extra in extras[:FINALISTS] or [[]]]
    return min(map(task.solved, schedules), key=lambda plan: plan.solved.energy_j)
