"""Finds the plan with the smallest power swing among those of nearly the least energy and equal time.

Theory of operation. A plan sets only clocks, and instructions start as soon as they can. A wave is therefore flattened
by clocks alone: which of two instructions uses the slack, and whether power is needed earlier or later. Local search
starts from the least-energy plan and keeps its iteration time. Moves change some clocks and are kept while the energy
stays within a limit. Most of a pipeline's swing remains: its ranks wait at the start and end of an iteration whatever
their clocks are, and filling that gap costs energy.
"""

import math
from collections.abc import Sequence

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.power_swing import PlannedSwing, PowerWave, band_energy_w2, harmonics_in_band, swing_of
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile
from gpuenergyd_plan.flat.kernels import Band, FlatGraph, FlatLimits, FlatOptions, FlatState, flatten
from gpuenergyd_policies.planning.compiled import IS_COMPILED, floats, ints
from gpuenergyd_policies.planning.frontier import SolvedPlan
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan
from gpuenergyd_policies.planning.power_waves import WavePlan, fast_to_frugal, wave_of

EXTRA_ENERGY_RATIO = 0.002
"""Energy that a flatter plan may need beyond the minimum."""
SEARCH_STEPS = 240_000_000 if IS_COMPILED else 600_000
"""Number of instructions placed by the search for one plan: about three CPU seconds."""
_MOST_MOVES = 3_000_000
"""Maximum moves of one search; small pipelines need no more."""
_HEATS = (0.0005, 0.003, 0.02)
"""Initial temperatures of the annealing, relative to the swing; the best result is used."""
_MOST_HARMONICS = 160
"""Maximum number of harmonics that the search uses, because amplitudes fall with frequency."""
_SAME_RATIO = 1e-12
_SEED = 1


def flat_plan(
    graph: DependencyGraph,
    profile: PipelineProfile,
    solved: SolvedPlan,
    *,
    extra_energy_ratio: float = EXTRA_ENERGY_RATIO,
    search_steps: int = SEARCH_STEPS,
    seed: int = _SEED,
) -> WavePlan:
    """Return the plan with the least band energy found that takes no longer than the given least-energy plan.

    It may need more energy by `extra_energy_ratio`. The profile must have one waiting power. The search ends after
    `search_steps` placements.
    """
    own = [
        profile[instruction.instruction_class].at_clock(mhz)
        for instruction, mhz in zip(graph.instructions, solved.sm_clocks_mhz, strict=True)
    ]
    first = WavePlan.of(graph, profile, own)
    search = _Search(graph, profile, first)
    limit_j = first.wave.energy_j * (1 + extra_energy_ratio)
    found = [search.found(limit_j, search_steps // len(_HEATS), heat, seed) for heat in _HEATS]
    possible = [
        plan
        for plan in found
        if plan.wave.iteration_time_s <= first.wave.iteration_time_s * (1 + _SAME_RATIO)
        and plan.wave.energy_j <= limit_j * (1 + _SAME_RATIO)
    ]
    return min((first, *possible), key=lambda plan: band_energy_w2(plan.wave))


def flattest_order(
    cheapest: OrderPlan, *, extra_energy_ratio: float = EXTRA_ENERGY_RATIO, search_steps: int = SEARCH_STEPS
) -> tuple[OrderPlan, WavePlan]:
    """Return the flattest plan found among the cheapest order and those near it, after its order.

    Which order is flattest also depends on the clocks. A first search compares all of them; a second search of equal
    length improves the flattest. Each search places `search_steps` instructions.
    """
    limit_j = cheapest.solved.energy_j * (1 + extra_energy_ratio)

    def flattened(order: OrderPlan, steps: int) -> tuple[OrderPlan, WavePlan]:
        left_ratio = max(0.0, limit_j / order.solved.energy_j - 1)
        flat = flat_plan(order.graph, order.profile, order.solved, extra_energy_ratio=left_ratio, search_steps=steps)
        return order, flat

    if not cheapest.near:
        return flattened(cheapest, search_steps)
    orders = (cheapest, *cheapest.near)
    first = min((flattened(order, search_steps // len(orders)) for order in orders), key=_swing)
    return min((first, flattened(first[0], search_steps)), key=_swing)


def _swing(found: tuple[OrderPlan, WavePlan]) -> float:
    return band_energy_w2(found[1].wave)


def planned_swing(
    graph: DependencyGraph, profile: PipelineProfile, planned: SolvedPlan, least_energy: SolvedPlan
) -> PlannedSwing:
    """Return the swing of a plan, of full speed, and of the least-energy plan."""
    full_speed = [profile[i.instruction_class].at_max_clock for i in graph.instructions]
    waves = [_wave_of_solved(graph, profile, plan) for plan in (planned, least_energy)]
    return PlannedSwing(swing_of(waves[0]), swing_of(wave_of(graph, profile, full_speed)), swing_of(waves[1]))


def _wave_of_solved(graph: DependencyGraph, profile: PipelineProfile, solved: SolvedPlan) -> PowerWave:
    options = [
        ClockOption(mhz, time_s, energy_j)
        for mhz, time_s, energy_j in zip(solved.sm_clocks_mhz, solved.durations_s, solved.energies_j, strict=True)
    ]
    return wave_of(graph, profile, options)


class _Search:
    """The arrays of one pipeline in topological order, and searches that start from its least-energy plan."""

    def __init__(self, graph: DependencyGraph, profile: PipelineProfile, first: WavePlan) -> None:
        self._graph, self._profile, self._first = graph, profile, first
        self._nodes = list(graph.topological_order)
        by_class = {key: fast_to_frugal(profile[key].options) for key in graph.classes}
        self._options = [by_class[graph.instructions[v].instruction_class] for v in self._nodes]
        self._choice = [_position(known, first.options[v]) for known, v in zip(self._options, self._nodes, strict=True)]
        self._arrays = self._graph_arrays()
        self._tables = self._option_arrays()
        numbers = harmonics_in_band(first.wave.iteration_time_s)[:_MOST_HARMONICS]
        self._band = Band(
            numbers.start, floats([1 / (2 * (math.pi * number) ** 2) for number in numbers] or np.zeros(0))
        )

    def found(self, limit_j: float, search_steps: int, heat: float, seed: int) -> WavePlan:
        n, period_s = len(self._nodes), self._first.wave.iteration_time_s
        num_harmonics = len(self._band.weights)
        num_moves = min(_MOST_MOVES, search_steps // max(1, n))
        if num_harmonics == 0 or num_moves == 0:
            return self._first
        waiting_j = self._profile.blocking_power_w * self._graph.num_ranks * period_s
        limits = FlatLimits(period=period_s, deadline=period_s * (1 + _SAME_RATIO), cost=limit_j - waiting_j)
        state = FlatState(
            choice=ints(self._choice), begin=floats(np.zeros(n)), end=floats(np.zeros(n)),
            real=floats(np.zeros(num_harmonics)), imaginary=floats(np.zeros(num_harmonics)),
            kept_begin=floats(np.zeros(n)), kept_end=floats(np.zeros(n)), kept_real=floats(np.zeros(num_harmonics)),
            kept_imaginary=floats(np.zeros(num_harmonics)), kept_choice=ints(self._choice), best=ints(self._choice),
        )  # fmt: skip
        flatten(self._arrays, self._tables, self._band, limits, state, num_moves, heat, seed)
        options = list(self._first.options)
        for place, node in enumerate(self._nodes):
            options[node] = self._options[place][int(state.best[place])]
        return WavePlan.of(self._graph, self._profile, options)

    def _graph_arrays(self) -> FlatGraph:
        graph, nodes = self._graph, self._nodes
        place = {node: number for number, node in enumerate(nodes)}
        before = [graph.predecessors[v] for v in nodes]
        by_rank = sorted(range(len(nodes)), key=lambda k: (graph.instructions[nodes[k]].pp_rank, nodes[k]))
        lengths = np.bincount([i.pp_rank for i in graph.instructions], minlength=graph.num_ranks)
        return FlatGraph(
            pred=ints(np.cumsum([0] + [len(links) for links in before])),
            pred_node=ints([place[u] for links in before for u, _ in links]),
            pred_latency=floats([latency_s for links in before for _, latency_s in links]),
            epilogue=floats([graph.epilogues_s[v] for v in nodes]),
            rank_first=ints(np.concatenate(([0], np.cumsum(lengths)))),
            rank_nodes=ints(by_rank),
        )

    def _option_arrays(self) -> FlatOptions:
        waiting_w, flat = self._profile.blocking_power_w, [option for options in self._options for option in options]
        return FlatOptions(
            start=ints(np.cumsum([0] + [len(options) for options in self._options])),
            times=floats([option.time_s for option in flat]),
            powers=floats([option.energy_j / option.time_s - waiting_w for option in flat]),
            costs=floats([option.effective_energy_j(waiting_w) for option in flat]),
        )


def _position(options: Sequence[ClockOption], wanted: ClockOption) -> int:
    """Return the index of an option, or of the slowest option that takes no longer."""
    return max((k for k, option in enumerate(options) if option.time_s <= wanted.time_s), default=0)
