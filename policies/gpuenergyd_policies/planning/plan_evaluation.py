"""Time and energy of given clocks on a dependency graph, and the baseline to which savings refer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile
from gpuenergyd.core.pipeline.timeline import Timeline, iteration_energy_j, timeline


@dataclass(frozen=True, slots=True)
class PlanEvaluation:
    """Clocks for every node of a graph with their timeline and energy, including waits up to the end."""

    sm_clocks_mhz: tuple[int, ...]
    timeline: Timeline
    energy_j: float

    @property
    def iteration_time_s(self) -> float:
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
