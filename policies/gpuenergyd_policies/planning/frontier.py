"""The planner's door: one plan for a deadline, or the whole time-energy frontier, each with a proven lower bound.

Knows nothing of GPUs, sockets or files: a dependency graph and a profile in, values out.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from gpuenergyd.core.pipeline import (
    DependencyGraph,
    InstructionClass,
    InstructionKind,
    dependency_graph,
    one_forward_one_backward,
)
from gpuenergyd.core.policy import FrontierPoint
from gpuenergyd.core.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.timeline import iteration_energy_j, timeline
from gpuenergyd.errors import TargetError
from gpuenergyd_policies.planning.certificate import cost_lower_bounds_j
from gpuenergyd_policies.planning.network import FlowNetwork, flow_network
from gpuenergyd_policies.planning.rounding import EARLY, LATE, MIDDLE, RoundedPlan, Rounder
from gpuenergyd_policies.planning.sweep import Sweep, sweep_frontier
from gpuenergyd_policies.planning.tables import FloatArray, IntArray, PlanningTables, planning_tables

DEADLINE_ROUNDING_RATIO = 1e-12
"""A deadline this little below T_min is T_min, added up in another order."""
LARGE_PIPELINE = 4096
"""Instructions from which long hulls are thinned unless told otherwise."""
LARGE_PIPELINE_TOLERANCE = 1e-3
ROUGH_TOLERANCE = 1e-2
"""Thinning with which T* is found roughly, to know where to put the plans."""
LATER_RATIOS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02)
"""Durations that are optimal for a slightly later deadline are worth rounding too."""


class Effort(IntEnum):
    """How hard to look for clocks once the frontier is known."""

    QUICK = 1
    """Two candidates: for frontiers of many plans."""
    FULL = 2
    """All candidates and local search: for the plan that will run."""


@dataclass(frozen=True, slots=True)
class SolvedPlan:
    """Clocks for every node of a graph, what they cost, and the optimum of the relaxation that they come from.

    `lower_bound_j` is proven: no plan meets `deadline_s` with less energy than that, waiting charged as in
    `energy_j`. `prices_w[i]` is what one more second for node i would save; `price_w`, one more second in all.
    """

    sm_clocks_mhz: tuple[int, ...]
    durations_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    iteration_time_s: float
    energy_j: float
    lower_bound_j: float
    deadline_s: float
    fractional_durations_s: tuple[float, ...]
    prices_w: tuple[float, ...]
    price_w: float
    min_time_s: float
    min_energy_time_s: float
    slowest_time_s: float


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Where the continuous frontier bends: its energy there, and the price of one second less below that time."""

    iteration_time_s: float
    energy_j: float
    price_w: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """The time-energy frontier of a pipeline: every breakpoint of the continuous one, and real plans along it.

    T_min is the fastest time, T* the time of least energy, T_slow the time with every instruction at its cheapest.
    Points run from fast to slow; their energy charges waiting until the point's deadline.
    """

    min_time_s: float
    min_energy_time_s: float
    slowest_time_s: float
    breakpoints: tuple[Breakpoint, ...]
    points: tuple[FrontierPoint, ...]


@dataclass(frozen=True, slots=True)
class _Problem:
    graph: DependencyGraph
    tables: PlanningTables
    network: FlowNetwork
    rounder: Rounder
    min_time_s: float
    slowest_time_s: float


def solve(
    graph: DependencyGraph,
    profile: PipelineProfile,
    *,
    deadline_s: float,
    forced: bool = False,
    thin_tolerance: float | None = None,
    effort: Effort = Effort.FULL,
) -> SolvedPlan:
    """Return the cheapest plan found with iteration time at most `deadline_s`.

    A deadline is a permission, used up to T* and no further; `forced` says that the time will pass anyway, so that
    slowness is worth its energy up to T_slow.

    Raises:
        ProfileError: a class of the graph was not measured.
        TargetError: the deadline is below T_min.
    """
    problem = _problem(graph, profile, thin_tolerance)
    _require_possible(problem, deadline_s)
    wanted_s = max(problem.min_time_s, min(deadline_s, problem.slowest_time_s))
    later = LATER_RATIOS if effort is Effort.FULL else ()
    deadlines_s = np.array([wanted_s, *(wanted_s * (1 + ratio) for ratio in later)])
    sweep = _sweep(problem, deadlines_s, stop_early=True)
    row = 0
    if not forced and sweep.min_energy_time_s < wanted_s:
        row = len(deadlines_s)
        wanted_s = max(problem.min_time_s, sweep.min_energy_time_s)
    rows = [row, *range(1, len(deadlines_s))] if row == 0 else [row]
    bound_j = float(_bounds_j(problem, sweep, np.array([row]), np.array([wanted_s]))[0])
    best = _best_rounding(problem, [sweep.durations_s[r] for r in rows], wanted_s, forced=forced, effort=effort)
    charged_s = best.makespan_s if forced else wanted_s
    clocks, times_s, energies_j = _look_up(problem.tables, best)
    return SolvedPlan(
        sm_clocks_mhz=clocks,
        durations_s=times_s,
        energies_j=energies_j,
        iteration_time_s=best.makespan_s,
        energy_j=iteration_energy_j(
            energies_j=energies_j,
            durations_s=times_s,
            iteration_time_s=best.makespan_s,
            num_ranks=graph.num_ranks,
            blocking_power_w=profile.blocking_power_w,
        ),
        lower_bound_j=bound_j + problem.tables.idle_power_w * charged_s,
        deadline_s=wanted_s,
        fractional_durations_s=tuple(sweep.durations_s[row].tolist()),
        prices_w=tuple(sweep.prices_w[row].tolist()),
        price_w=float(sweep.snapshot_prices_w[row]),
        min_time_s=problem.min_time_s,
        min_energy_time_s=max(problem.min_time_s, sweep.min_energy_time_s),
        slowest_time_s=problem.slowest_time_s,
    )


def frontier(
    graph: DependencyGraph,
    profile: PipelineProfile,
    *,
    num_points: int = 64,
    thin_tolerance: float | None = None,
    until_slowest: bool = True,
) -> Frontier:
    """Return the whole frontier with about `num_points` real plans, no plan dominated by a faster one.

    Half of the plans lie in [T_min, T*], the rest beyond, where only a forced wait is worth planning for;
    without `until_slowest` all lie up to T*.

    Raises:
        ProfileError: a class of the graph was not measured.
    """
    problem = _problem(graph, profile, thin_tolerance)
    roughly = _problem(graph, profile, max(ROUGH_TOLERANCE, thin_tolerance or 0.0)) if num_points > 1 else problem
    least_s = _sweep(roughly, np.array([problem.slowest_time_s]), stop_early=True).min_energy_time_s
    num_fast = (num_points + 1) // 2 if until_slowest else num_points
    # the frontier bends most next to T_min
    fast = problem.min_time_s + (least_s - problem.min_time_s) * np.linspace(0, 1, num_fast, endpoint=False) ** 1.5
    slow = np.linspace(least_s, problem.slowest_time_s, num_points - num_fast + 1)[1:]
    sweep = _sweep(problem, np.concatenate([fast, slow]), stop_early=False)
    least_s = max(problem.min_time_s, sweep.min_energy_time_s)
    deadlines_s = np.concatenate([fast, slow, [least_s]])
    by_time = np.argsort(deadlines_s, kind="stable")
    costs_j = _bounds_j(problem, sweep, np.arange(len(deadlines_s)), deadlines_s)
    points: list[FrontierPoint] = []
    cheapest_j = np.inf
    for row in by_time.tolist():
        deadline_s = float(deadlines_s[row])
        if deadline_s > least_s and not until_slowest:
            break
        plan = _best_rounding(
            problem, [sweep.durations_s[row]], deadline_s, forced=deadline_s > least_s, effort=Effort.QUICK
        )
        if plan.cost_j >= cheapest_j:
            continue
        cheapest_j = plan.cost_j
        idle_w = problem.tables.idle_power_w
        points.append(
            FrontierPoint(
                iteration_time_s=plan.makespan_s,
                energy_j=plan.cost_j + idle_w * plan.makespan_s,
                lower_bound_j=float(costs_j[row]) + idle_w * (deadline_s if deadline_s <= least_s else plan.makespan_s),
            )
        )
    return Frontier(
        min_time_s=problem.min_time_s,
        min_energy_time_s=least_s,
        slowest_time_s=problem.slowest_time_s,
        breakpoints=_breakpoints(problem, sweep),
        points=tuple(points),
    )


def min_iteration_time_s(graph: DependencyGraph, profile: PipelineProfile) -> float:
    """Return T_min: the iteration time with every instruction at its fastest option."""
    return timeline(graph, [profile[i.instruction_class].fastest.time_s for i in graph.instructions]).iteration_time_s


def warm_up() -> None:
    """Load or compile the kernels, so that the first real plan does not pay for it."""
    options = (ClockOption(2, 0.1, 2.0), ClockOption(1, 0.2, 1.0))
    kinds = (InstructionKind.F, InstructionKind.B)
    profile = PipelineProfile({InstructionClass(0, kind): InstructionProfile(options) for kind in kinds}, 1.0)
    solve(dependency_graph(one_forward_one_backward(1, 1)), profile, deadline_s=0.3)


def _problem(graph: DependencyGraph, profile: PipelineProfile, thin_tolerance: float | None) -> _Problem:
    if thin_tolerance is None:
        thin_tolerance = LARGE_PIPELINE_TOLERANCE if len(graph.instructions) >= LARGE_PIPELINE else 0.0
    tables = planning_tables(graph, profile)
    return _Problem(
        graph=graph,
        tables=tables,
        network=flow_network(graph, tables, thin_tolerance=thin_tolerance),
        rounder=Rounder(graph, tables),
        min_time_s=timeline(graph, tables.fastest_s.tolist()).iteration_time_s,
        slowest_time_s=timeline(graph, tables.slowest_s.tolist()).iteration_time_s,
    )


def _require_possible(problem: _Problem, deadline_s: float) -> None:
    if not deadline_s >= problem.min_time_s * (1.0 - DEADLINE_ROUNDING_RATIO):
        raise TargetError(
            f"iteration time {deadline_s:.6g} s cannot be met: with every instruction at its fastest clock it is"
            f" T_min = {problem.min_time_s!r} s"
        )


def _sweep(problem: _Problem, deadlines_s: FloatArray, *, stop_early: bool) -> Sweep:
    return sweep_frontier(
        problem.network,
        deadlines_s,
        min_time_s=problem.min_time_s,
        idle_power_w=problem.tables.idle_power_w,
        stop_early=stop_early,
    )


def _bounds_j(problem: _Problem, sweep: Sweep, rows: IntArray, deadlines_s: FloatArray) -> FloatArray:
    return cost_lower_bounds_j(
        problem.tables,
        problem.network,
        prices_w=sweep.prices_w[rows],
        edge_prices_w=sweep.edge_prices_w[rows],
        values_w=sweep.snapshot_prices_w[rows],
        deadlines_s=deadlines_s,
    )


def _best_rounding(
    problem: _Problem, durations_s: list[FloatArray], deadline_s: float, *, forced: bool, effort: Effort
) -> RoundedPlan:
    """Return the cheapest rounding: by effective energy when time is sunk, else with waiting charged to its end."""
    wishes = (LATE,) if effort is Effort.QUICK else (LATE, EARLY, MIDDLE)
    idle_w = 0.0 if forced else problem.tables.idle_power_w
    candidates = (
        problem.rounder.round_plan(durations, deadline_s, wish=wish, hull_first=hull_first)
        for durations in durations_s
        for wish in wishes
        for hull_first in (False, True)
    )
    return min(candidates, key=lambda plan: plan.cost_j + idle_w * plan.makespan_s)


def _look_up(tables: PlanningTables, plan: RoundedPlan) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """Return clock, time and energy of each node."""
    rows = [(tables.tables[c], int(k)) for c, k in zip(tables.class_of.tolist(), plan.choice, strict=True)]
    return (
        tuple(int(table.sm_clocks_mhz[k]) for table, k in rows),
        tuple(float(table.times_s[k]) for table, k in rows),
        tuple(float(table.energies_j[k]) for table, k in rows),
    )


def _breakpoints(problem: _Problem, sweep: Sweep) -> tuple[Breakpoint, ...]:
    """Return the breakpoints, fast to slow; between them energy is linear, so it adds up from the slow end."""
    times_s, prices_w = sweep.breakpoint_times_s, sweep.breakpoint_prices_w
    slowest_j = float(problem.tables.costs_j[problem.tables.start[problem.tables.class_of + 1] - 1].sum())
    costs_j = slowest_j + np.concatenate([[0.0], np.cumsum(prices_w[:-1] * -np.diff(times_s))])
    energies_j = costs_j + problem.tables.idle_power_w * times_s
    return tuple(
        Breakpoint(time_s, energy_j, price_w)
        for time_s, energy_j, price_w in zip(
            times_s[::-1].tolist(), energies_j[::-1].tolist(), prices_w[::-1].tolist(), strict=True
        )
    )
