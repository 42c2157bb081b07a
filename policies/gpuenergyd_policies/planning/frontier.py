"""Public functions of the planner: a plan for one deadline, or the time-energy frontier, with proven lower bounds.

Pure functions of a dependency graph and a profile, without GPUs, sockets or files.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.pipeline.graph import (
    DependencyGraph,
    InstructionClass,
    InstructionKind,
    dependency_graph,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.pipeline.timeline import iteration_energy_j, makespan_s
from gpuenergyd.core.policy_api.policy import FrontierPoint
from gpuenergyd_policies.planning.averaging import QUICK_STEPS, AveragedPrices, FlowAveraging
from gpuenergyd_policies.planning.discrete.rounding import RoundedPlan
from gpuenergyd_policies.planning.exact.sweep import Sweep
from gpuenergyd_policies.planning.exact.tables import FloatArray
from gpuenergyd_policies.planning.large import REFINED_GAP, TOO_LARGE, refined
from gpuenergyd_policies.planning.problem import (
    LARGE_PIPELINE,
    Effort,
    PlanningProblem,
    later_deadlines_s,
    make_problem,
    useful_s,
)

__all__ = (
    "Effort",
    "Frontier",
    "SolvedPlan",
    "frontier",
    "least_energies_j",
    "min_iteration_time_s",
    "solve",
    "solve_with_frontier",
    "solved_plan",
    "tiny_pipeline",
    "warm_up",
)

ROUGH_TOLERANCE = 1e-2
"""Thinning tolerance of the first sweep, which finds T* (the time of least energy) approximately."""
LARGE_POINTS = 16
"""Number of points on the frontier of a large pipeline."""
NEIGHBOURS = 2
"""Number of plans to the later deadline whose durations are rounded too, because they often round better."""


@dataclass(frozen=True, slots=True)
class SolvedPlan:
    """Clocks for every node of a graph, their time and energy, and the optimum of the continuous relaxation.

    `energy_j` charges waiting up to `iteration_time_s`. `lower_bound_j` is proven: no plan that meets `deadline_s`
    needs less, with waiting charged up to that plan's own end, or up to the same end as here if the wait is forced.
    `prices_w[i]` is the energy saved per additional second for node i; `price_w` is that per second of iteration time.
    """

    sm_clocks_mhz: tuple[int, ...]
    durations_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    iteration_time_s: float
    energy_j: float
    lower_bound_j: float
    deadline_s: float
    """The iteration time planned for: the target, limited to T* or T_slow."""
    fractional_durations_s: tuple[float, ...]
    prices_w: tuple[float, ...]
    price_w: float
    min_time_s: float
    min_energy_time_s: float
    slowest_time_s: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """Plans along the time-energy frontier of a pipeline, from fast to slow; each is charged for waits up to its end.

    T_min is the fastest time, T* the time of least energy, T_slow the time with every instruction at its cheapest.
    """

    min_time_s: float
    min_energy_time_s: float
    slowest_time_s: float
    points: tuple[FrontierPoint, ...]


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

    A deadline is used only up to T*, beyond which energy rises. With `forced` the time passes anyway (a straggler), so
    plans slow down to T_slow. Pipelines of thousands of instructions are planned by averaging flows (see `large`).

    Raises:
        ProfileError: a class of the graph was not measured.
        TargetError: the deadline is below T_min.
    """
    problem = make_problem(graph, profile, thin_tolerance)
    if len(graph.instructions) > TOO_LARGE:
        return _solve_large(problem, deadline_s, forced=forced, effort=effort)
    wanted_s = useful_s(deadline_s, problem.min_time_s, problem.slowest_time_s)
    deadlines_s = later_deadlines_s(wanted_s) if effort is not Effort.QUICK else np.array([wanted_s])
    sweep = problem.sweep(deadlines_s, stop_early=True)
    return solved_plan(problem, sweep, deadlines_s, forced=forced, effort=effort)


def frontier(
    graph: DependencyGraph,
    profile: PipelineProfile,
    *,
    num_points: int = 64,
    thin_tolerance: float | None = None,
    until_slowest: bool = True,
) -> Frontier:
    """Return the frontier with about `num_points` discrete plans, none dominated by a faster one.

    Half of the plans lie in [T_min, T*], the others beyond, for forced waits. Without `until_slowest` all are in
    [T_min, T*].

    Raises:
        ProfileError: a class of the graph was not measured.
    """
    problem = make_problem(graph, profile, thin_tolerance)
    if len(graph.instructions) > TOO_LARGE:
        return _large_frontier(problem, num_points)
    deadlines_s = _spread_deadlines_s(problem, num_points, until_slowest=until_slowest)
    return _frontier(problem, problem.sweep(deadlines_s, stop_early=False), deadlines_s, until_slowest=until_slowest)


def solve_with_frontier(
    graph: DependencyGraph,
    profile: PipelineProfile,
    *,
    deadline_s: float,
    forced: bool = False,
    num_points: int = 64,
    effort: Effort = Effort.FULL,
) -> tuple[SolvedPlan, Frontier]:
    """Return the results of `solve` and of `frontier` (up to T*) from a single sweep.

    Raises:
        ProfileError: a class of the graph was not measured.
        TargetError: the deadline is below T_min.
    """
    problem = make_problem(graph, profile)
    wanted = later_deadlines_s(useful_s(deadline_s, problem.min_time_s, problem.slowest_time_s))
    spread = _spread_deadlines_s(problem, num_points, until_slowest=False)
    sweep = problem.sweep(np.concatenate([wanted, spread]), stop_early=False)
    return (
        solved_plan(problem, sweep, wanted, forced=forced, effort=effort),
        _frontier(problem, sweep, spread, first_row=len(wanted), until_slowest=False),
    )


def least_energies_j(
    graph: DependencyGraph, profile: PipelineProfile, deadlines_s: Iterable[float], thin_tolerance: float | None = None
) -> tuple[float, ...]:
    """Return the lower bound of `solve` for each deadline, for T_min if that is later, from a single sweep."""
    problem = make_problem(graph, profile, thin_tolerance)
    least_s, most_s = problem.min_time_s, problem.slowest_time_s
    wanted_s = [useful_s(max(deadline_s, least_s), least_s, most_s) for deadline_s in deadlines_s]
    if len(graph.instructions) > TOO_LARGE:
        return tuple(_solve_large(problem, s, forced=False, effort=Effort.QUICK).lower_bound_j for s in wanted_s)
    sweep = problem.sweep(np.array(wanted_s), stop_early=True)
    found = (problem.up_to_least_energy(sweep, row, s) for row, s in enumerate(wanted_s))
    return tuple(problem.energy_bound_j(sweep, row, s) for row, s in found)


def min_iteration_time_s(graph: DependencyGraph, profile: PipelineProfile) -> float:
    """Return T_min: the iteration time with every instruction at its fastest option."""
    fastest_s = [profile[key].fastest.time_s for key in graph.classes]
    return makespan_s(graph, [fastest_s[c] for c in graph.class_of])


def warm_up() -> None:
    """Load or compile the kernels ahead of the first plan."""
    solve(*tiny_pipeline(1, 1), deadline_s=0.23)


def tiny_pipeline(num_stages: int, num_microbatches: int) -> tuple[DependencyGraph, PipelineProfile]:
    """Return an artificial pipeline, for calling kernels ahead of the first plan."""
    options = (ClockOption(3, 0.1, 3.0), ClockOption(2, 0.15, 1.8), ClockOption(1, 0.2, 1.0))
    keys = [InstructionClass(s, kind) for s in range(num_stages) for kind in (InstructionKind.F, InstructionKind.B)]
    profile = PipelineProfile(dict.fromkeys(keys, InstructionProfile(options)), 1.0)
    return dependency_graph(one_forward_one_backward(num_stages, num_microbatches)), profile


def solved_plan(
    problem: PlanningProblem, sweep: Sweep, deadlines_s: FloatArray, *, forced: bool, effort: Effort
) -> SolvedPlan:
    """Return the plan for the first of these deadlines, which are the sweep's first rows."""
    row, wanted_s = 0, float(deadlines_s[0])
    if not forced:
        row, wanted_s = problem.up_to_least_energy(sweep, row, wanted_s)
    rows = [row] if row else list(range(len(deadlines_s)))
    bound_j = float(problem.cost_bounds_j(sweep, np.array([row]), np.array([wanted_s]))[0])
    plan = problem.best_rounding([sweep.durations_s[r] for r in rows], wanted_s, forced=forced, effort=effort)
    if effort is not Effort.QUICK:
        plan = problem.improved(plan, wanted_s, cost_bound_j=bound_j, effort=effort)
    waiting_w = problem.tables.idle_power_w
    return _as_solved(
        problem,
        plan,
        lower_bound_j=bound_j + waiting_w * plan.makespan_s if forced else problem.energy_bound_j(sweep, row, wanted_s),
        deadline_s=wanted_s,
        fractional_durations_s=tuple(sweep.durations_s[row].tolist()),
        prices_w=tuple(sweep.prices_w[row].tolist()),
        price_w=float(sweep.snapshot_prices_w[row]),
        min_energy_time_s=max(problem.min_time_s, sweep.min_energy_time_s),
    )


def _as_solved(
    problem: PlanningProblem,
    plan: RoundedPlan,
    *,
    lower_bound_j: float,
    deadline_s: float,
    fractional_durations_s: tuple[float, ...],
    prices_w: tuple[float, ...],
    price_w: float,
    min_energy_time_s: float,
) -> SolvedPlan:
    tables = problem.tables
    durations_s, energies_j = tables.times_s[plan.options].tolist(), tables.energies_j[plan.options].tolist()
    return SolvedPlan(
        sm_clocks_mhz=tuple(tables.sm_clocks_mhz[plan.options].tolist()),
        durations_s=tuple(durations_s),
        energies_j=tuple(energies_j),
        iteration_time_s=plan.makespan_s,
        energy_j=iteration_energy_j(
            energies_j=energies_j,
            durations_s=durations_s,
            iteration_time_s=plan.makespan_s,
            num_ranks=tables.num_ranks,
            blocking_power_w=tables.blocking_power_w,
        ),
        lower_bound_j=lower_bound_j,
        deadline_s=deadline_s,
        fractional_durations_s=fractional_durations_s,
        prices_w=prices_w,
        price_w=price_w,
        min_time_s=problem.min_time_s,
        min_energy_time_s=min_energy_time_s,
        slowest_time_s=problem.slowest_time_s,
    )


def _solve_large(problem: PlanningProblem, deadline_s: float, *, forced: bool, effort: Effort) -> SolvedPlan:
    wanted_s = useful_s(deadline_s, problem.min_time_s, problem.slowest_time_s)
    found = FlowAveraging(problem, wanted_s, forced=forced).prices(QUICK_STEPS if effort is Effort.QUICK else None)
    end_s = wanted_s
    if not forced and not found.is_limited:
        end_s = min(wanted_s, _least_energy_time_s(problem, found))
    # Averaged durations use slack less evenly than those of the sweep; trying all slack shares gains quick plans 0.1 %.
    plan = problem.best_rounding([found.durations_s], end_s, forced=forced, effort=max(effort, Effort.BRIEF))
    idle_w = problem.tables.idle_power_w
    # The price of a second is never below that of waiting, so the bound also holds for plans that end earlier.
    lower_bound_j = found.cost_bound_j + idle_w * wanted_s
    least_s = problem.slowest_time_s if forced or found.is_limited else end_s
    wanted_s = min(wanted_s, end_s)
    bound_j = found.cost_bound_j + idle_w * plan.makespan_s
    excess_j = plan.cost_j - found.cost_bound_j
    if effort is not Effort.QUICK and excess_j > REFINED_GAP * bound_j:
        plan = refined(problem, plan, wanted_s, excess_j=excess_j, is_prompt=effort is Effort.PROMPT)
    return _as_solved(
        problem,
        plan,
        lower_bound_j=found.cost_bound_j + idle_w * plan.makespan_s if forced else lower_bound_j,
        deadline_s=wanted_s,
        fractional_durations_s=tuple(found.durations_s.tolist()),
        prices_w=tuple(found.prices_w.tolist()),
        price_w=found.price_w,
        min_energy_time_s=least_s,
    )


def _least_energy_time_s(problem: PlanningProblem, found: AveragedPrices) -> float:
    """Return T*, the time of least energy, from the prices of a later deadline."""
    return max(problem.min_time_s, makespan_s(problem.graph, found.durations_s.tolist()))


def _large_frontier(problem: PlanningProblem, num_points: int) -> Frontier:
    """Return the frontier of a large pipeline up to T* (least energy), with few points."""
    roughly = FlowAveraging(problem, problem.slowest_time_s, forced=False).prices(QUICK_STEPS)
    least_s = _least_energy_time_s(problem, roughly)
    num_points = min(num_points, LARGE_POINTS)
    shares = np.linspace(0, 1, num_points) ** 1.5
    points: list[FrontierPoint] = []
    for deadline_s in (problem.min_time_s + (least_s - problem.min_time_s) * shares).tolist():
        solved = _solve_large(problem, deadline_s, forced=False, effort=Effort.QUICK)
        if not points or solved.energy_j < points[-1].energy_j:
            points.append(FrontierPoint(solved.iteration_time_s, solved.energy_j, solved.lower_bound_j))
    return Frontier(problem.min_time_s, least_s, problem.slowest_time_s, tuple(points))


def _spread_deadlines_s(problem: PlanningProblem, num_points: int, *, until_slowest: bool) -> FloatArray:
    """Return deadlines for a frontier's plans, densest near T_min, where the frontier is most curved."""
    roughly = problem.thinned(ROUGH_TOLERANCE).sweep(np.array([problem.slowest_time_s]), stop_early=True)
    least_s = max(problem.min_time_s, roughly.min_energy_time_s)
    num_fast = (num_points + 1) // 2 if until_slowest else num_points
    fast = problem.min_time_s + (least_s - problem.min_time_s) * np.linspace(0, 1, num_fast, endpoint=False) ** 1.5
    slowest_s = useful_s(np.inf, problem.min_time_s, problem.slowest_time_s)
    slow = np.linspace(least_s, slowest_s, num_points - num_fast + 1)[1:]
    return np.concatenate([fast, slow])


def _frontier(
    problem: PlanningProblem, sweep: Sweep, deadlines_s: FloatArray, *, first_row: int = 0, until_slowest: bool
) -> Frontier:
    """Return the frontier with plans at these deadlines (the sweep's last rows) and at T*, the time of least energy."""
    least_s = max(problem.min_time_s, sweep.min_energy_time_s)
    idle_w = problem.tables.idle_power_w
    deadlines_s = np.append(deadlines_s, least_s)
    deadline_of = dict(enumerate(deadlines_s.tolist(), first_row))
    bounds_j = problem.cost_bounds_j(sweep, np.array(list(deadline_of)), deadlines_s)
    points: list[FrontierPoint] = []
    least_cost_j = least_energy_j = np.inf
    by_time = sorted(deadline_of, key=deadline_of.__getitem__)
    is_small = len(problem.graph.instructions) < LARGE_PIPELINE
    for place, row in enumerate(by_time):
        deadline_s = deadline_of[row]
        is_forced = row < len(sweep.durations_s) - 1 and problem.is_beyond_least_energy(sweep, row)
        if is_forced and not until_slowest:
            break
        later = by_time[place : place + NEIGHBOURS + 1 : NEIGHBOURS] if is_small else [row]
        plan = problem.best_rounding(
            [sweep.durations_s[r] for r in later], deadline_s, forced=is_forced, effort=Effort.QUICK
        )
        energy_j = plan.cost_j + idle_w * plan.makespan_s
        # beyond T* the wait is forced, so a later plan only has to be cheaper in effective energy
        is_waiting = is_forced and plan.makespan_s > least_s
        if plan.cost_j >= least_cost_j or (energy_j >= least_energy_j and not is_waiting):
            continue
        least_cost_j, least_energy_j = plan.cost_j, min(energy_j, least_energy_j)
        while points and points[-1].iteration_time_s >= plan.makespan_s:
            points.pop()
        points.append(
            FrontierPoint(
                iteration_time_s=plan.makespan_s,
                energy_j=energy_j,
                lower_bound_j=float(bounds_j[row - first_row]) + idle_w * plan.makespan_s
                if is_forced
                else problem.energy_bound_j(sweep, row, deadline_s),
            )
        )
    return Frontier(
        min_time_s=problem.min_time_s,
        min_energy_time_s=least_s,
        slowest_time_s=problem.slowest_time_s,
        points=tuple(points),
    )
