"""Time and energy of given clocks on a dependency graph, and the baseline to which savings refer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile
from gpuenergyd.core.pipeline.timeline import Timeline, iteration_energy_j, timeline
from gpuenergyd.core.policy_api.policy import OfflinePlan, OfflineRequest
from gpuenergyd.errors import UsageError


@dataclass(frozen=True, slots=True)
class PlanEvaluation:
    """Clocks for every node of a graph with their timeline and energy, including waits up to the end."""

    sm_clocks_mhz: tuple[int, ...]
    timeline: Timeline
    energy_j: float

    @property
    def iteration_time_s(self) -> float:
        """Iteration time of these clocks."""
        return self.timeline.iteration_time_s


def evaluate_options(
    graph: DependencyGraph, profile: PipelineProfile, options: Iterable[ClockOption]
) -> PlanEvaluation:
    """Return timeline and energy of an iteration in which node i runs with the i-th option."""
    chosen = tuple(options)
    durations_s = [option.time_s for option in chosen]
    planned = timeline(graph, durations_s)
    return PlanEvaluation(
        sm_clocks_mhz=tuple(option.sm_clock_mhz for option in chosen),
        timeline=planned,
        energy_j=iteration_energy_j(
            energies_j=[option.energy_j for option in chosen],
            durations_s=durations_s,
            iteration_time_s=planned.iteration_time_s,
            num_ranks=graph.num_ranks,
            blocking_power_w=profile.blocking_power_w,
        ),
    )


def evaluate_clocks(graph: DependencyGraph, profile: PipelineProfile, sm_clocks_mhz: Sequence[int]) -> PlanEvaluation:
    """Return timeline and energy of an iteration at these clocks, one per node; each must have been measured."""
    chosen = list(zip(graph.class_of, sm_clocks_mhz, strict=True))
    option_of = {(c, sm_clock_mhz): profile[graph.classes[c]].at_clock(sm_clock_mhz) for c, sm_clock_mhz in set(chosen)}
    return evaluate_options(graph, profile, map(option_of.__getitem__, chosen))


def baseline(graph: DependencyGraph, profile: PipelineProfile) -> PlanEvaluation:
    """Return timeline and energy with every instruction at its maximum clock."""
    return evaluate_options(graph, profile, (profile[i.instruction_class].at_max_clock for i in graph.instructions))


def rank_orders(graph: DependencyGraph) -> tuple[tuple[Instruction, ...], ...]:
    """Return the program order of every rank of a graph."""
    orders: list[list[Instruction]] = [[] for _ in range(graph.num_ranks)]
    for instruction in graph.instructions:
        orders[instruction.pp_rank].append(instruction)
    return tuple(tuple(order) for order in orders)


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
