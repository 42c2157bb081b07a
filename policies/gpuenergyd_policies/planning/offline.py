"""The bubble-aware planner without a daemon: what `gpuenergyd plan` runs on tables.

The baseline is every instruction at its maximum clock under the plain schedule.
"""

import time

from gpuenergyd.core.pipeline import DependencyGraph
from gpuenergyd.core.policy import FrontierPoint, OfflinePlan, OfflineRequest
from gpuenergyd.errors import UsageError
from gpuenergyd_policies.planning.frontier import SolvedPlan, frontier, solve, solve_with_frontier, warm_up
from gpuenergyd_policies.planning.inflight import caps_from_microbatches, plan_inflight
from gpuenergyd_policies.planning.judging import baseline, rank_orders


def plan_offline(request: OfflineRequest) -> OfflinePlan:
    """Return the cheapest plan found that meets the request's target, with a proven lower bound.

    Raises:
        TargetError: no plan is fast enough; the message says what T_min is.
        UsageError: extra in-flight microbatches for a schedule that takes none.
    """
    warm_up()
    began_cpu_s = time.process_time()
    reference = baseline(request.graph, request.profile)
    deadline_s = request.target.iteration_time_s(reference.iteration_time_s)
    points: tuple[FrontierPoint, ...] = ()
    graph, extra_inflight = request.graph, tuple[int, ...]()
    if request.want_frontier and request.extra_inflight is None:
        solved, whole = solve_with_frontier(
            graph, request.profile, deadline_s=deadline_s, forced=request.target.is_forced
        )
        points = whole.points
    else:
        graph, extra_inflight, solved = _solved(request, deadline_s)
        if request.want_frontier:
            points = frontier(graph, request.profile, until_slowest=False).points
    return OfflinePlan(
        orders=rank_orders(graph),
        sm_clocks_mhz=dict(zip(graph.instructions, solved.sm_clocks_mhz, strict=True)),
        baseline_time_s=reference.iteration_time_s,
        baseline_energy_j=reference.energy_j,
        iteration_time_s=solved.iteration_time_s,
        energy_j=solved.energy_j,
        lower_bound_j=solved.lower_bound_j,
        solve_cpu_s=time.process_time() - began_cpu_s,
        extra_inflight=extra_inflight,
        frontier=points,
    )


def _solved(request: OfflineRequest, deadline_s: float) -> tuple[DependencyGraph, tuple[int, ...], SolvedPlan]:
    """Return the graph to run, its extra in-flight microbatches, and its clocks."""
    forced = request.target.is_forced
    if request.extra_inflight is None:
        return request.graph, (), solve(request.graph, request.profile, deadline_s=deadline_s, forced=forced)
    schedule = request.schedule
    if schedule is None or schedule.name != "1f1b":
        raise UsageError(
            f"extra in-flight microbatches need schedule 1f1b, this one is {schedule.name if schedule else 'unknown'}"
        )
    limit = request.options.get("memory_limit_microbatches")
    caps = caps_from_microbatches([int(part) for part in limit.split(",")]) if limit else None
    if isinstance(request.extra_inflight, int):
        most = request.extra_inflight
        caps = tuple(min(most, cap) for cap in caps or (most,) * schedule.num_ranks)
    planned = plan_inflight(
        schedule.num_ranks,
        schedule.num_microbatches,
        request.profile,
        deadline_s=deadline_s,
        forced=forced,
        caps=caps,
        communication_latency_s=float(request.options.get("communication_latency_s", "0")),
    )
    return planned.graph, planned.extra_inflight, planned.solved
