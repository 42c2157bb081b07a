"""What offline planners share: limits and checks of requests, and plans without a lower bound."""

from collections.abc import Sequence

from gpuenergyd.core.policy_api.policy import OfflinePlan, OfflineRequest
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError, UsageError
from gpuenergyd_policies.planning.plan_evaluation import PlanEvaluation, baseline, rank_orders


def unproven_plan(request: OfflineRequest, chosen: PlanEvaluation, *, solve_cpu_s: float) -> OfflinePlan:
    """Return an offline plan with these clocks for the request's graph, without a lower bound.

    Raises:
        UsageError: the request leaves the order to the planner, or has a power cap.
    """
    require_plain(request)
    reference = baseline(request.baseline_graph, request.profile)
    own = baseline(request.graph, request.profile)
    return OfflinePlan(
        orders=rank_orders(request.graph),
        sm_clocks_mhz=dict(zip(request.graph.instructions, chosen.sm_clocks_mhz, strict=True)),
        baseline_time_s=reference.iteration_time_s,
        baseline_energy_j=reference.energy_j,
        iteration_time_s=chosen.iteration_time_s,
        energy_j=chosen.energy_j,
        lower_bound_j=None,
        solve_cpu_s=solve_cpu_s,
        own_order_time_s=own.iteration_time_s,
        own_order_energy_j=own.energy_j,
    )


def require_plain(request: OfflineRequest) -> None:
    """Raise UsageError if the request needs a choice of order or a power cap, which simple planners do not support."""
    if request.order_limits:
        raise UsageError("--schedule auto: only policy bubble-aware chooses the order")
    if request.is_flattest:
        raise UsageError("--flattest: only policy bubble-aware chooses plans by how much their power swings")
    if request.power_cap is not None:
        raise UsageError(f"--power-cap-w {request.power_cap.power_w:g}: only policy bubble-aware plans under a cap")


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
