"""Offline planning with the bubble-aware planner, as run by `gpuenergyd plan`.

The baseline is every instruction at its maximum clock under 1F1B, or under the order of the file. With
`--schedule auto` the order is chosen together with the clocks. Modules needed by only some requests are imported late:
scipy, which bounds the orders, takes longer to import than a small pipeline takes to plan.
"""

import sys
import time
from dataclasses import replace
from itertools import groupby

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.pipeline.waiting import WaitingPower
from gpuenergyd.core.policy_api.policy import (
    FrontierPoint,
    OfflinePlan,
    OfflineRequest,
    SwitchingFigures,
    WaitingFigures,
)
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import TargetError
from gpuenergyd_plan.flat.plan import EXTRA_ENERGY_RATIO, flat_plan, flattest_order, planned_swing
from gpuenergyd_plan.offline.inflight import plan_inflight
from gpuenergyd_policies.planning.compiled import COMPILE_CLOCK, plain_python
from gpuenergyd_policies.planning.frontier import SolvedPlan, frontier, solve, solve_with_frontier, warm_up
from gpuenergyd_policies.planning.large import TOO_LARGE
from gpuenergyd_policies.planning.offline_requests import requested_caps
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan, OrderTask
from gpuenergyd_policies.planning.plan_evaluation import baseline, rank_orders
from gpuenergyd_policies.planning.power_waves import WavePlan
from gpuenergyd_policies.planning.problem import Effort

_BRIEF_INSTRUCTIONS = 96
"""Up to this many instructions, plain Python plans faster than the compiled kernels load (a CPU second). It uses few
passes of refinement; all passes would lower the energy by 0.002 % on average, 0.08 % at most (99 plans)."""
_SOON_KNOWN = 512
"""Up to this many instructions, the swing of every plan is computed, which takes a tenth of a second."""


def plan_offline(request: OfflineRequest) -> OfflinePlan:
    """Return the cheapest plan found that meets the request's target, with a proven lower bound.

    The plan does not depend on whether the kernels run compiled or, for small pipelines, as plain Python.

    Raises:
        TargetError: no plan is fast enough, or none with so few clock segments or so little power; the message names
            what is possible.
        ScheduleError: extra in-flight microbatches for a schedule that cannot use them, or more than memory holds.
    """
    with plain_python(is_quicker=_is_brief(request) and "numba" not in sys.modules):
        compiled_before_s = COMPILE_CLOCK.cpu_s
        warm_up()
        began_cpu_s, warmed_up_s = time.process_time(), COMPILE_CLOCK.cpu_s
        if request.power_cap is None:
            plan = _planned(request)
        else:
            from gpuenergyd_plan.offline.under_cap import plan_under_cap  # noqa: PLC0415  start fast

            plan = plan_under_cap(request, request.power_cap)
        compiled_s = COMPILE_CLOCK.cpu_s
        return replace(
            plan,
            solve_cpu_s=time.process_time() - began_cpu_s - (compiled_s - warmed_up_s),
            compile_cpu_s=compiled_s - compiled_before_s,
        )


def _is_brief(request: OfflineRequest) -> bool:
    """Return whether plain Python plans a request faster than the compiled kernels can be loaded."""
    needs_search = request.is_flattest or request.order_limits or request.power_cap is not None
    needs_search = needs_search or request.max_switches is not None or request.switch_latency_s > 0
    return not needs_search and len(request.graph.instructions) <= _BRIEF_INSTRUCTIONS


def _planned(request: OfflineRequest) -> OfflinePlan:
    reference = baseline(request.baseline_graph, request.profile)
    deadline_s = request.target.iteration_time_s(baseline(request.graph, request.profile).iteration_time_s)
    forced, effort = request.target.is_forced, Effort.BRIEF if _is_brief(request) else Effort.FULL
    # The bound may assume the lowest waiting power; the actual cost of waits is charged to the plan below.
    power = request.profile.waiting_power
    full_profile = request.profile
    if power is not None:
        request = replace(request, profile=replace(full_profile, blocking_power_w=power.least_w, waiting_power=None))
    any_order_bound_j: float | None = None
    points: tuple[FrontierPoint, ...] = ()
    graph, schedule, extra_inflight = request.graph, request.schedule, tuple[int, ...]()
    flat: WavePlan | None = None
    if request.order_limits:
        chosen, flat = _chosen_order(request, deadline_s)
        graph, least_energy, schedule = chosen.graph, chosen.solved, chosen.schedule
        any_order_bound_j = chosen.any_order_j
        request = replace(request, profile=chosen.profile)
        full_profile = replace(full_profile, classes=chosen.profile.classes)
    elif request.extra_inflight is not None:
        caps = requested_caps(request, graph.num_ranks)
        inflight = plan_inflight(_order_task(request, deadline_s), caps)
        graph, least_energy = inflight.graph, inflight.solved
        extra_inflight = inflight.schedule.extra_inflight or (0,) * graph.num_ranks
    elif request.want_frontier and len(graph.instructions) <= TOO_LARGE:
        least_energy, whole = solve_with_frontier(
            graph, request.profile, deadline_s=deadline_s, forced=forced, effort=effort
        )
        points = whole.points
    else:
        least_energy = solve(graph, request.profile, deadline_s=deadline_s, forced=forced, effort=effort)
    if request.want_frontier and not points:
        points = frontier(graph, request.profile, until_slowest=False).points
    solved = least_energy
    if request.is_flattest:
        solved = (flat or flat_plan(graph, request.profile, least_energy)).as_solved(least_energy)
    own = baseline(graph, full_profile)
    plan = OfflinePlan(
        orders=rank_orders(graph),
        sm_clocks_mhz=dict(zip(graph.instructions, solved.sm_clocks_mhz, strict=True)),
        baseline_time_s=reference.iteration_time_s,
        baseline_energy_j=reference.energy_j,
        iteration_time_s=solved.iteration_time_s,
        energy_j=solved.energy_j,
        lower_bound_j=solved.lower_bound_j,
        solve_cpu_s=0.0,
        extra_inflight=extra_inflight,
        frontier=points,
        prices_w=dict(zip(graph.instructions, solved.prices_w, strict=True)),
        own_order_time_s=own.iteration_time_s,
        own_order_energy_j=own.energy_j,
        any_order_bound_j=any_order_bound_j,
        stage_of_chunk=() if schedule is None else schedule.stage_of_chunk,
        swing=planned_swing(graph, full_profile, solved, least_energy) if _has_swing(request, graph, power) else None,
    )
    if request.max_switches is not None or request.switch_latency_s > 0:
        return _with_late_clocks(replace(request, profile=full_profile), plan, graph, solved, deadline_s)
    return plan if power is None else _with_waits(plan, graph, solved, full_profile, power)


def _has_swing(request: OfflineRequest, graph: DependencyGraph, waiting: WaitingPower | None) -> bool:
    """Return whether the swing is wanted or quick to compute, and instantaneous power follows from the clocks alone."""
    is_plain = request.max_switches is None and request.switch_latency_s == 0 and waiting is None
    return is_plain and (request.is_flattest or len(graph.instructions) <= _SOON_KNOWN)


def _order_task(request: OfflineRequest, deadline_s: float) -> OrderTask:
    num_microbatches = len({i.microbatch_index for i in request.graph.instructions})
    limits = request.order_limits or (num_microbatches,) * request.graph.num_ranks
    return OrderTask(
        num_microbatches,
        request.profile,
        deadline_s,
        [min(limit, num_microbatches) for limit in limits],
        request.target.is_forced,
        float(request.options.get("communication_latency_s", "0")),
    )


def _chosen_order(request: OfflineRequest, deadline_s: float) -> tuple[OrderPlan, WavePlan | None]:
    """Return the order chosen by the planner with the bound over any order, and flat clocks if requested.

    If the flattest plan is wanted, the order is the flattest among those of nearly the least energy.
    """
    from gpuenergyd_plan.offline.chunks import plan_chunk_order  # noqa: PLC0415
    from gpuenergyd_plan.offline.order_choice import plan_order  # noqa: PLC0415

    task = _order_task(request, deadline_s)
    if request.schedule is not None and request.schedule.num_chunks > 1:
        cheapest = plan_chunk_order(request.schedule, task)
    else:
        cheapest = plan_order(task, near_ratio=EXTRA_ENERGY_RATIO if request.is_flattest else 0.0)
    if not request.is_flattest:
        return cheapest, None
    found, flat = flattest_order(cheapest)
    return replace(found, any_order_j=cheapest.any_order_j), flat


def _with_waits(
    plan: OfflinePlan, graph: DependencyGraph, solved: SolvedPlan, profile: PipelineProfile, power: WaitingPower
) -> OfflinePlan:
    """Return the plan with its waits charged by clock; clocks are lowered as soon as a wait begins."""
    from gpuenergyd_plan.offline.clock_changes import planned_waits  # noqa: PLC0415  start fast

    waits = planned_waits(timeline(graph, solved.durations_s), plan.sm_clocks_mhz, power)
    working_j = sum(solved.energies_j)
    return replace(
        plan,
        energy_j=working_j + waits.lowered_j,
        waiting=WaitingFigures(
            power.is_assumed,
            profile.blocking_power_w,
            power.least_w,
            power.least_w,
            working_j + waits.in_force_j,
            waits.lowered,
        ),
    )


def _with_late_clocks(
    request: OfflineRequest, plan: OfflinePlan, graph: DependencyGraph, solved: SolvedPlan, deadline_s: float
) -> OfflinePlan:
    """Return the plan with switch latency, or a cheaper one made for the power that its waits really draw."""
    first = _with_switching(request, plan, graph, solved, deadline_s)
    if first.waiting is None or request.max_switches is not None or len(graph.instructions) > TOO_LARGE:
        return first
    # Clocks cannot be lowered in short waits; the real cost of waiting may therefore make other clocks cheaper.
    profile = replace(request.profile, blocking_power_w=first.waiting.mean_w, waiting_power=None)
    other = solve(graph, profile, deadline_s=deadline_s, forced=request.target.is_forced)
    clocks = dict(zip(graph.instructions, other.sm_clocks_mhz, strict=True))
    other = replace(other, lower_bound_j=solved.lower_bound_j)  # that bound is proven with the lowest power
    again = _with_switching(request, replace(plan, sm_clocks_mhz=clocks), graph, other, deadline_s)
    return min(first, again, key=lambda one: one.energy_j)


def _with_switching(
    request: OfflineRequest, plan: OfflinePlan, graph: DependencyGraph, solved: SolvedPlan, deadline_s: float
) -> OfflinePlan:
    """Return the plan with switch latency, in at most `max_switches` segments if requested."""
    from gpuenergyd_plan.offline.clock_changes import lowered_waits, naive_changes  # noqa: PLC0415  start fast
    from gpuenergyd_policies.planning.switching.requests import clock_changes  # noqa: PLC0415
    from gpuenergyd_policies.planning.switching.segments import SegmentSearch  # noqa: PLC0415
    from gpuenergyd_policies.planning.switching.simulation import simulate_switching  # noqa: PLC0415

    latency_s, profile, forced = request.switch_latency_s, request.profile, request.target.is_forced
    power = profile.waiting_power
    planned = timeline(graph, solved.durations_s)
    free_changes = clock_changes(planned, plan.sm_clocks_mhz, latency=latency_s, profile=profile)
    free = simulate_switching(graph, profile, free_changes, latency=latency_s)
    naive = simulate_switching(graph, profile, naive_changes(graph, plan.sm_clocks_mhz), latency=latency_s)
    clocks, changes, simulated = plan.sm_clocks_mhz, free_changes, free
    if request.max_switches is not None:
        search = SegmentSearch(graph, profile, latency=latency_s)
        segmented = search.best(solved, deadline_s=deadline_s, max_segments=request.max_switches, forced=forced)
        if segmented is None:
            raise TargetError(
                f"iteration time {deadline_s:.6g} s cannot be met with"
                f" {count_text(request.max_switches, 'clock segment')} per stage"
                f" and {latency_s:g} s switch latency; it can be met without --max-switches"
            )
        clocks = dict(zip(graph.instructions, segmented.sm_clocks_mhz, strict=True))
        changes, simulated, planned = segmented.changes, segmented.simulated, segmented.planned
    waiting: WaitingFigures | None = None
    if power is not None:
        kept_j = simulated.energy_j
        changes, simulated, lowered = lowered_waits(graph, profile, planned, changes, simulated, latency=latency_s)
        mean_w = simulated.waiting_energy_j / simulated.waiting_s if simulated.waiting_s > 0 else power.least_w
        waiting = WaitingFigures(power.is_assumed, profile.blocking_power_w, power.least_w, mean_w, kept_j, lowered)
    longer_s = simulated.iteration_time_s - solved.iteration_time_s if forced else 0.0
    return replace(
        plan,
        sm_clocks_mhz=clocks,
        iteration_time_s=simulated.iteration_time_s,
        energy_j=simulated.energy_j,
        lower_bound_j=solved.lower_bound_j + profile.blocking_power_w * graph.num_ranks * longer_s,
        waiting=waiting,
        switching=SwitchingFigures(
            switch_latency_s=latency_s,
            num_segments=tuple(sum(1 for _ in groupby(order, key=clocks.__getitem__)) for order in rank_orders(graph)),
            changes=changes,
            iteration_time_s=simulated.iteration_time_s,
            energy_j=simulated.energy_j,
            free_lead_time_s=free.iteration_time_s,
            free_lead_energy_j=free.energy_j,
            free_naive_time_s=naive.iteration_time_s,
            free_naive_energy_j=naive.energy_j,
        ),
    )
