"""Plans with few clock changes: at most K clock segments per rank and iteration, with switch latency.

Theory of operation. A reduction takes effect one latency after it is requested, so the start of a slow segment still
runs fast. That costs energy and gains time, which the plan uses elsewhere. Segments are therefore evaluated by the time
and energy of an iteration in which each reduction arrives one latency after its segment begins and each raise,
requested early, arrives when it is needed. This is exactly what `requests` implements.

The search starts from the cheapest segmentation under the dual prices of the continuous optimum: instruction i at
clock c costs energy - blocking power * time + price_i * time, and a dynamic program over (instruction, segments used,
clock) finds the best K segments of each rank separately. Since ranks interact, simulated annealing over clocks and
boundaries follows (Kirkpatrick et al. 1983), with a penalty for overtime that grows while the temperature falls; a
fixed seed makes it repeatable. The last restart begins with the best segments found, at a lower temperature. The
result is simulated again by independent code and must meet the deadline.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, InstructionClass
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import Timeline, timeline
from gpuenergyd_policies.planning.compiled import IS_COMPILED, floats, ints
from gpuenergyd_policies.planning.exact.tables import FloatArray
from gpuenergyd_policies.planning.frontier import SolvedPlan
from gpuenergyd_policies.planning.plan_evaluation import baseline
from gpuenergyd_policies.planning.switching.annealing import (
    MAX_PENDING,
    Annealing,
    Iteration,
    Pipeline,
    Segments,
    anneal,
    fill_clocks,
    run_iteration,
)
from gpuenergyd_policies.planning.switching.requests import Latency, clock_changes, rank_latencies
from gpuenergyd_policies.planning.switching.simulation import SimulatedIteration, simulate_switching

_ROUNDING = 1e-9
RESTARTS = 3
LAST_COOLER = 4
"""Factor by which the temperature of the last restart is lower; it begins with the best segments found."""
SEED = 1
"""Restarts use consecutive seeds; fixed seeds give the same plan for the same input."""
STEPS = 250_000 if IS_COMPILED else 800
"""Annealing steps of one restart; plain Python is much slower."""
TEMPERATURE_RATIO = 5e-4
"""Initial temperature, as a share of the ideal saving."""


@dataclass(frozen=True, slots=True)
class SegmentedPlan:
    """Clocks in at most K segments per rank, the clock changes that set them, and the simulated result with latency."""

    sm_clocks_mhz: tuple[int, ...]
    planned: Timeline
    changes: tuple[tuple[ClockChange, ...], ...]
    simulated: SimulatedIteration


class SegmentSearch:
    """Search for clock segments of one pipeline; clock c of rank r is the c-th in that rank's list, lowest first."""

    def __init__(self, graph: DependencyGraph, profile: PipelineProfile, *, latency: Latency) -> None:
        n, num_ranks = len(graph.instructions), graph.num_ranks
        self._graph = graph
        self._profile = profile
        self._latencies = rank_latencies(latency, num_ranks)
        classes = sorted({i.instruction_class for i in graph.instructions})
        self._grids = [common_clocks([key for key in classes if key.pp_rank == r], profile) for r in range(num_ranks)]
        options = [[profile[key].interpolated(mhz) for mhz in self._grids[key.pp_rank]] for key in classes]
        start = np.cumsum([0] + [len(row) for row in options])
        position = {key: k for k, key in enumerate(classes)}
        ranks = [i.pp_rank for i in graph.instructions]
        self._pipeline = Pipeline(
            order=ints(graph.topological_order),
            pred=ints(np.cumsum([0] + [len(p) for p in graph.predecessors])),
            pred_node=ints([u for before in graph.predecessors for u, _ in before]),
            pred_latency=floats([latency_s for before in graph.predecessors for _, latency_s in before]),
            epilogue=floats(graph.epilogues_s),
            rank=ints(ranks),
            first=ints(np.cumsum([0, *np.bincount(ranks, minlength=num_ranks)])),
            options=ints([start[position[i.instruction_class]] for i in graph.instructions]),
            times=floats([option.time_s for row in options for option in row]),
            energies=floats([option.energy_j for row in options for option in row]),
            num_clocks=ints([len(grid) for grid in self._grids]),
            clocks_from=ints(np.cumsum([0] + [len(grid) for grid in self._grids])[:-1]),
            reduction_latency=floats(
                [
                    own.typical_s(max(grid), clock) if clock < max(grid) else own.lower_s
                    for own, grid in zip(self._latencies, self._grids, strict=True)
                    for clock in grid
                ]
            ),
            stall=floats([latency.stall_s for latency in self._latencies]),
        )
        self._work = Iteration(
            planned=ints(np.zeros(n)),
            finish=floats(np.zeros(n)),
            active=ints(np.zeros(num_ranks)),
            num_pending=ints(np.zeros(num_ranks)),
            pending_at=floats(np.zeros(num_ranks * MAX_PENDING)),
            pending_clock=ints(np.zeros(num_ranks * MAX_PENDING)),
        )

    @cached_property
    def _at_full_speed(self) -> tuple[SegmentedPlan, float]:
        """The plan at full speed, and its energy where clocks are in effect in time."""
        return self.plan(self.full_speed()), baseline(self._graph, self._profile).energy_j

    def best(
        self, solved: SolvedPlan, *, deadline_s: float, max_segments: int, forced: bool = False, steps: int = STEPS
    ) -> SegmentedPlan | None:
        """Return the cheapest plan found with at most `max_segments` segments per rank, None if none is in time.

        The search starts from the prices of `solved`, the plan without segments for the same deadline, and makes
        `steps` steps per restart. With `forced` the time until the deadline passes anyway: waiting costs nothing extra.
        """
        full_speed, full_speed_j = self._at_full_speed
        best = full_speed if full_speed.simulated.iteration_time_s <= deadline_s * (1 + _ROUNDING) else None
        idle_power_w = self._profile.blocking_power_w * self._graph.num_ranks
        fastest_s = min(full_speed.simulated.iteration_time_s, deadline_s)
        late_s = 0.0
        start = at_prices = self.cheapest_at(solved.prices_w, max_segments)
        temperature_j = TEMPERATURE_RATIO * max(full_speed_j - solved.energy_j, 1e-3 * full_speed_j)
        for restart in range(RESTARTS):
            is_last = restart == RESTARTS - 1
            found = self.anneal(
                start if is_last else at_prices,
                Annealing(
                    blocking_power=self._profile.blocking_power_w,
                    waiting_power=0.0 if forced else idle_power_w,
                    deadline=max(deadline_s - late_s, fastest_s) * (1 + _ROUNDING),
                    overtime_price=max(solved.price_w, idle_power_w),
                    temperature=temperature_j / LAST_COOLER if is_last else temperature_j,
                    steps=steps,
                    seed=SEED + restart,
                ),
            )
            if found is None:
                continue
            plan = self.plan(found)
            meets_deadline = plan.simulated.iteration_time_s <= deadline_s * (1 + 2 * _ROUNDING)
            late_s += max(0.0, plan.simulated.iteration_time_s - deadline_s)
            if meets_deadline and (best is None or plan.simulated.energy_j < best.simulated.energy_j):
                best, start = plan, found
        return best

    def full_speed(self) -> Segments:
        """Return one segment per rank at its highest clock, which needs no clock change."""
        first = self._pipeline.first
        bounds: list[int] = []
        clocks: list[int] = []
        for r, grid in enumerate(self._grids):
            bounds += [0, first[r + 1] - first[r]]
            clocks += [len(grid) - 1]
        return Segments(ints(bounds), ints(clocks))

    def cheapest_at(self, prices_w: Sequence[float], max_segments: int) -> Segments:
        """Return each rank's cheapest segments at these prices of time, one price per node."""
        first, options, prices = self._pipeline.first, np.array(self._pipeline.options), np.array(prices_w)
        times, energies = np.array(self._pipeline.times), np.array(self._pipeline.energies)
        bounds: list[int] = []
        clocks: list[int] = []
        for r, grid in enumerate(self._grids):
            nodes = np.arange(first[r], first[r + 1])
            offered = options[nodes, None] + np.arange(len(grid))
            costs = energies[offered] + (prices[nodes, None] - self._profile.blocking_power_w) * times[offered]
            rank_bounds, rank_clocks = cheapest_segments(costs, max_segments)
            bounds += rank_bounds
            clocks += rank_clocks
        return Segments(ints(bounds), ints(clocks))

    def anneal(self, start: Segments, goal: Annealing) -> Segments | None:
        """Return the cheapest segments found from this start that meet the deadline, None if there are none."""
        best, kept, current = (Segments(*(ints(np.array(values)) for values in start)) for _ in range(3))
        cost_j = anneal(self._pipeline, current, kept, best, goal, self._work)
        return best if cost_j < math.inf else None

    def iteration(self, clocks: Sequence[int]) -> tuple[list[float], tuple[float, float, float]]:
        """Return the finish of each node at these clock indices, and the iteration time, energy and busy time."""
        self._work.planned[:] = ints(clocks)
        totals = run_iteration(self._pipeline, self._work)
        return list(self._work.finish), totals

    def plan(self, segments: Segments) -> SegmentedPlan:
        """Return segments as a plan with its clock changes and their simulation."""
        fill_clocks(self._pipeline, segments, self._work)
        return self._plan(list(self._work.planned))

    def plan_at(self, clock_of: Mapping[Instruction, int]) -> SegmentedPlan:
        """Return the plan with these clocks in MHz, or the next higher ones that all classes of a rank have."""
        instructions = self._graph.instructions
        grids = [self._grids[i.pp_rank] for i in instructions]
        return self._plan(
            [min(bisect_left(grid, clock_of[i]), len(grid) - 1) for i, grid in zip(instructions, grids, strict=True)]
        )

    def _plan(self, clocks: Sequence[int]) -> SegmentedPlan:
        graph = self._graph
        finish_s, _ = self.iteration(clocks)
        durations_s = [0.0] * len(finish_s)
        for v in graph.topological_order:
            start_s = max((finish_s[u] + latency_s for u, latency_s in graph.predecessors[v]), default=0.0)
            durations_s[v] = finish_s[v] - start_s
        planned = timeline(graph, durations_s)
        sm_clocks_mhz = tuple(
            self._grids[i.pp_rank][clock] for i, clock in zip(graph.instructions, clocks, strict=True)
        )
        by_instruction: dict[Instruction, int] = dict(zip(graph.instructions, sm_clocks_mhz, strict=True))
        changes = clock_changes(planned, by_instruction, latency=self._latencies)
        return SegmentedPlan(
            sm_clocks_mhz, planned, changes, simulate_switching(graph, self._profile, changes, latency=self._latencies)
        )


def common_clocks(classes: Sequence[InstructionClass], profile: PipelineProfile) -> list[int]:
    """Return the clocks, ascending, at which all classes of a rank were measured; if there are none, any class's."""
    measured = [{option.sm_clock_mhz for option in profile[key].options} for key in classes]
    return sorted(set.intersection(*measured) or set.union(*measured)) if measured else []


def cheapest_segments(costs: FloatArray, max_segments: int) -> tuple[list[int], list[int]]:
    """Return the K + 1 bounds and K clocks of least total cost, where `costs[i, c]` is instruction i at clock c."""
    n = len(costs)
    segments = min(max_segments, n)
    best = np.repeat(costs[0][None, :], segments, axis=0)
    came_from = np.full((n, segments, costs.shape[1]), -1, dtype=np.int64)
    for i in range(1, n):
        cheapest = best[:-1].argmin(axis=1)
        least = best[np.arange(segments - 1), cheapest][:, None]
        is_switch = least < best[1:]
        came_from[i, 1:] = np.where(is_switch, cheapest[:, None], -1)
        best[1:] = np.where(is_switch, least, best[1:])
        best = best + costs[i]
    k, clock = segments - 1, int(best[segments - 1].argmin())
    bounds, clocks = [n], [clock]
    for i in range(n - 1, 0, -1):
        if came_from[i, k, clock] >= 0:
            clock, k = int(came_from[i, k, clock]), k - 1
            bounds.append(i)
            clocks.append(clock)
    bounds.append(0)
    unused = max_segments - len(clocks)
    return bounds[::-1] + [n] * unused, clocks[::-1] + [clocks[0]] * unused
