"""The bubble-aware planner without a daemon: what `gpuenergyd plan` runs on tables.

The baseline is every instruction at its maximum clock under the plain schedule.
"""

import time

from gpuenergyd.core.pipeline import DependencyGraph, Instruction
from gpuenergyd.core.policy import OfflinePlan, OfflineRequest
from gpuenergyd.core.profile import PipelineProfile
from gpuenergyd.core.timeline import iteration_energy_j, timeline
from gpuenergyd_policies.planning.frontier import frontier, solve, warm_up


def plan_offline(request: OfflineRequest) -> OfflinePlan:
    """Return the cheapest plan found that meets the request's target, with a proven lower bound.

    Raises:
        TargetError: no plan is fast enough; the message says what T_min is.
    """
    warm_up()
    began_cpu_s = time.process_time()
    graph = request.graph
    baseline_time_s, baseline_energy_j = full_speed(graph, request.profile)
    solved = solve(
        graph,
        request.profile,
        deadline_s=request.target.iteration_time_s(baseline_time_s),
        forced=request.target.is_forced,
    )
    points = frontier(graph, request.profile, until_slowest=False).points if request.want_frontier else ()
    return OfflinePlan(
        orders=orders(graph),
        sm_clocks_mhz=dict(zip(graph.instructions, solved.sm_clocks_mhz, strict=True)),
        baseline_time_s=baseline_time_s,
        baseline_energy_j=baseline_energy_j,
        iteration_time_s=solved.iteration_time_s,
        energy_j=solved.energy_j,
        lower_bound_j=solved.lower_bound_j,
        solve_cpu_s=time.process_time() - began_cpu_s,
        frontier=points,
    )


def full_speed(graph: DependencyGraph, profile: PipelineProfile) -> tuple[float, float]:
    """Return iteration time and energy with every instruction at its maximum clock."""
    options = [profile[instruction.instruction_class].at_max_clock for instruction in graph.instructions]
    durations_s = [option.time_s for option in options]
    iteration_time_s = timeline(graph, durations_s).iteration_time_s
    return iteration_time_s, iteration_energy_j(
        energies_j=[option.energy_j for option in options],
        durations_s=durations_s,
        iteration_time_s=iteration_time_s,
        num_ranks=graph.num_ranks,
        blocking_power_w=profile.blocking_power_w,
    )


def orders(graph: DependencyGraph) -> tuple[tuple[Instruction, ...], ...]:
    """Return what each rank runs, first to last."""
    by_rank: list[list[Instruction]] = [[] for _ in range(graph.num_ranks)]
    for instruction in graph.instructions:
        by_rank[instruction.pp_rank].append(instruction)
    return tuple(tuple(order) for order in by_rank)
