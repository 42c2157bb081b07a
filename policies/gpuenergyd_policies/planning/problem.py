"""The planning problem of one pipeline, and the steps of its solution.

The sweep finds the time-energy frontier for continuous clocks, the bound certifies it, rounding chooses clocks that the
GPU supports, and refinement improves the rounded plan.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd.errors import TargetError
from gpuenergyd_policies.planning.discrete.refinement import FULL_PASSES, LIGHT_PASSES, refine, windows_of_passes
from gpuenergyd_policies.planning.discrete.rounding import EARLY, LATE, MIDDLE, RoundedPlan, Rounder
from gpuenergyd_policies.planning.exact.network import FlowNetwork, flow_network
from gpuenergyd_policies.planning.exact.sweep import Sweep, sweep_frontier
from gpuenergyd_policies.planning.exact.tables import (
    HULL_TOLERANCE,
    FloatArray,
    IntArray,
    PlanningTables,
    planning_tables,
)

DEADLINE_ROUNDING_RATIO = 1e-12
"""Relative tolerance below T_min, for sums of the same times in another order."""
PRICE_ROUNDING_W = 1e-5
"""Tolerance of prices, which are whole microwatts."""
SLOWEST_MARGIN_RATIO = 1e-9
"""Margin beyond T_slow with which rounding can still reach every slowest option."""
LARGE_PIPELINE = 4096
"""Number of instructions from which long hulls are thinned by default."""
LATER_RATIOS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02)
"""Relative delays of later deadlines whose optimal durations are rounded too, because they often round better."""
SMALL_PIPELINE = 160
"""Plans with at most this many instructions are always refined in full."""
WIDE_GAP, NARROW_GAP = 3e-3, 2e-4
"""Gaps to the bound, as shares of the energy, above which a plan is refined with all passes, or with a few."""


class Effort(IntEnum):
    """Effort spent on clocks once the frontier is known."""

    QUICK = 1
    """Two candidates; for frontiers of many plans, and for comparing schedules."""
    BRIEF = 2
    """All candidates, then few passes of refinement; for small pipelines planned offline in plain Python."""
    PROMPT = 3
    """All candidates, then refinement window by window, with small windows in large pipelines of many stages; for a job
    that waits for its plan."""
    FULL = 4
    """Like PROMPT, but without a time limit; for plans made offline."""


@dataclass(frozen=True)
class PlanningProblem:
    """A graph and its tables in the forms required by the planning steps."""

    graph: DependencyGraph
    tables: PlanningTables
    thin_tolerance: float
    """Relative error permitted when hulls are thinned for the sweep; bounds and rounding keep all options."""
    rounder: Rounder
    min_time_s: float
    slowest_time_s: float

    @cached_property
    def network(self) -> FlowNetwork:
        return flow_network(self.graph, self.tables, thin_tolerance=self.thin_tolerance)

    def thinned(self, tolerance_ratio: float) -> "PlanningProblem":
        """Return the same problem with differently thinned hulls for the sweep."""
        return replace(self, thin_tolerance=tolerance_ratio)

    def sweep(self, deadlines_s: FloatArray, *, stop_early: bool) -> Sweep:
        """Return optimal flows and durations at these deadlines and, in the last row, at T* (least energy)."""
        return sweep_frontier(
            self.network,
            deadlines_s,
            min_time_s=self.min_time_s,
            idle_power_w=self.tables.idle_power_w,
            stop_early=stop_early,
        )

    def cost_bounds_j(self, sweep: Sweep, rows: IntArray, deadlines_s: FloatArray) -> FloatArray:
        """Return, for each row of a sweep, a lower bound on the effective energy of plans that meet its deadline.

        By weak LP duality, for any flow x >= 0 from source to sink of value F, and any plan with makespan at most T,

            sum_i cost_i >= sum_i min_k (cost_ik + x_i * time_ik) + sum_e x_e * latency_e - F * T.

        The bound is computed from the original tables and latencies, not from the rounded and thinned ones of the
        sweep, so it is valid for any flow: a worse flow gives a weaker bound, never an invalid one.
        """
        latency_s = self.network.edge_latency_s
        bounds = sweep.edge_prices_w[rows] @ latency_s - sweep.snapshot_prices_w[rows] * deadlines_s
        for index, table in enumerate(self.tables.tables):
            times, costs = table.times_s[table.hull], table.costs_j[table.hull]
            slopes = -np.diff(costs) / np.diff(times)
            prices = sweep.prices_w[rows][:, np.flatnonzero(self.tables.class_of == index)]
            # cost + price * time is convex over the hull; its minimum is where the slope falls below the price
            vertex = np.searchsorted(-slopes, -prices.ravel()).reshape(prices.shape)
            bounds += (costs[vertex] + prices * times[vertex]).sum(axis=1)
        return bounds

    def energy_bound_j(self, sweep: Sweep, row: int, deadline_s: float) -> float:
        """Return a lower bound on the energy of plans that meet a deadline, with waits charged up to their own end.

        A plan with makespan M costs at least cost bound + F * (deadline - M) + idle power * M. This is least at the
        deadline if a second costs more than waiting, otherwise at T_min.
        """
        price_w = float(sweep.snapshot_prices_w[row])
        end_s = deadline_s if price_w >= self.tables.idle_power_w else self.min_time_s
        cost_j = float(self.cost_bounds_j(sweep, np.array([row]), np.array([end_s]))[0])
        return cost_j + self.tables.idle_power_w * end_s

    def is_beyond_least_energy(self, sweep: Sweep, row: int) -> bool:
        """Return whether a snapshot is later than T* (least energy): more slowdown pays only if waits are forced."""
        return float(sweep.snapshot_prices_w[row]) < self.tables.idle_power_w - PRICE_ROUNDING_W

    def up_to_least_energy(self, sweep: Sweep, row: int, deadline_s: float) -> tuple[int, float]:
        """Return row and deadline of a plan without forced waits: those of T* (least energy) if that is earlier."""
        if not self.is_beyond_least_energy(sweep, row):
            return row, deadline_s
        return len(sweep.durations_s) - 1, min(deadline_s, max(self.min_time_s, sweep.min_energy_time_s))

    def best_rounding(
        self, durations_s: list[FloatArray], deadline_s: float, *, forced: bool, effort: Effort
    ) -> RoundedPlan:
        """Return the cheapest rounding: by effective energy if the wait is forced, else with waits up to its end."""
        slack_shares = (LATE,) if effort is Effort.QUICK else (LATE, EARLY, MIDDLE)
        idle_w = 0.0 if forced else self.tables.idle_power_w
        candidates = (
            self.rounder.round_plan(durations, deadline_s, slack_share=slack_share, hull_first=hull_first)
            for durations in durations_s
            for slack_share in slack_shares
            for hull_first in (False, True)
        )
        return min(candidates, key=lambda plan: plan.cost_j + idle_w * plan.makespan_s)

    def improved(
        self, plan: RoundedPlan, deadline_s: float, *, cost_bound_j: float, effort: Effort = Effort.FULL
    ) -> RoundedPlan:
        """Return the plan, refined as thoroughly as the effort and its gap to the bound justify."""
        gap = (plan.cost_j - cost_bound_j) / (cost_bound_j + self.tables.idle_power_w * deadline_s)
        if gap <= NARROW_GAP:
            return plan
        is_thorough = gap > WIDE_GAP or self.rounder.num_operations <= SMALL_PIPELINE
        is_light = effort is Effort.BRIEF or not is_thorough
        windows = windows_of_passes(self.rounder, LIGHT_PASSES if is_light else FULL_PASSES)
        return refine(self.rounder, self.thinned(HULL_TOLERANCE).network, plan, deadline_s, windows)


def useful_s(deadline_s: float, min_time_s: float, slowest_time_s: float) -> float:
    """Return the deadline limited to [T_min, T_slow], plus a margin with which rounding can reach T_slow.

    Raises:
        TargetError: the deadline is below T_min.
    """
    if not deadline_s >= min_time_s * (1.0 - DEADLINE_ROUNDING_RATIO):
        raise TargetError(
            f"iteration time {deadline_s:.6g} s cannot be met: with every instruction at its fastest clock it is"
            f" T_min = {min_time_s!r} s"
        )
    return max(min_time_s, min(deadline_s, slowest_time_s * (1.0 + SLOWEST_MARGIN_RATIO)))


def make_problem(
    graph: DependencyGraph, profile: PipelineProfile, thin_tolerance: float | None = None
) -> PlanningProblem:
    """Prepare a pipeline for planning; with `thin_tolerance` None only the hulls of large pipelines are thinned.

    Raises:
        ProfileError: a class of the graph was not measured.
    """
    if thin_tolerance is None:
        thin_tolerance = HULL_TOLERANCE if len(graph.instructions) >= LARGE_PIPELINE else 0.0
    tables = planning_tables(graph, profile)
    return PlanningProblem(
        graph=graph,
        tables=tables,
        thin_tolerance=thin_tolerance,
        rounder=Rounder(graph, tables),
        min_time_s=makespan_s(graph, tables.fastest_s.tolist()),
        slowest_time_s=makespan_s(graph, tables.slowest_s.tolist()),
    )


def later_deadlines_s(deadline_s: float) -> FloatArray:
    """Return a deadline followed by the slightly later ones whose durations are rounded too."""
    return deadline_s * (1.0 + np.array([0.0, *LATER_RATIOS]))
