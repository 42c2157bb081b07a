"""Plans for pipelines too large for the exact sweep: prices by averaging, rounding, and refinement.

Theory of operation. The sweep finds the best flow of prices breakpoint by breakpoint, which takes minutes from about
ten thousand instructions on. Averaging (see `averaging`) approaches it, rounding on the whole graph meets the deadline,
and windows of time are then re-optimized exactly. Any flow gives a proven bound, so that a plan's distance from the
optimum is known.
"""

from dataclasses import dataclass
from functools import partial

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd_policies.planning.averaging import AveragedPrices, FlowAveraging
from gpuenergyd_policies.planning.discrete.refinement import BY_TIME, refine, windows_of_passes
from gpuenergyd_policies.planning.discrete.rounding import LATE, MIDDLE, RoundedPlan, Rounder
from gpuenergyd_policies.planning.exact.network import flow_network
from gpuenergyd_policies.planning.exact.tables import HULL_TOLERANCE, FloatArray, PlanningTables, planning_tables

TOO_LARGE = 8_000
"""Number of instructions above which the exact sweep takes longer than a job should wait for a plan."""
WINDOW_PER_RANK, LEAST_WINDOW = 16, 256
"""Instructions of windows of time in refinement: the sweep takes more than in proportion to them."""
LARGEST_WINDOW, GROWTH = 4096, 4
"""Windows at both ends grow, then move inwards, while they gain: rounding leaves slack there that large ones use."""
WORTH_GROWING = 0.05
"""Share of the gap that a window at an end should close, to go on with the next one."""
NUM_SAMPLED = 16
"""Windows that are refined first, to judge the gain."""
WORTH_REFINING = 0.1
"""Share of the gap that refinement should close, judged by the first windows, to go on with all of them."""
REFINED_GAP = 1e-3
"""Gap of a rounded plan to its bound, as a share of the energy, above which windows are re-optimized."""


@dataclass(frozen=True, slots=True)
class LargePipeline:
    """A large pipeline prepared for planning."""

    graph: DependencyGraph
    tables: PlanningTables
    rounder: Rounder
    min_time_s: float
    slowest_time_s: float

    @classmethod
    def of(cls, graph: DependencyGraph, profile: PipelineProfile) -> "LargePipeline":
        """Return a pipeline with its profile.

        Raises:
            ProfileError: a class of the graph was not measured.
        """
        tables = planning_tables(graph, profile)
        return cls(
            graph,
            tables,
            Rounder(graph, tables),
            makespan_s(graph, tables.fastest_s.tolist()),
            makespan_s(graph, tables.slowest_s.tolist()),
        )

    def prices(self, deadline_s: float, *, forced: bool, num_steps: int | None = None) -> AveragedPrices:
        """Return prices for a deadline; with `forced` the time until then passes anyway."""
        return FlowAveraging(self.graph, self.tables, self.rounder, deadline_s, forced=forced).prices(num_steps)

    def rounded(self, durations_s: FloatArray, deadline_s: float, *, forced: bool) -> RoundedPlan:
        """Return the cheapest of four roundings whose makespan is at most the deadline."""
        idle_w = 0.0 if forced else self.tables.idle_power_w
        plans = (
            self.rounder.round_plan(durations_s, deadline_s, slack_share=slack_share, hull_first=hull_first)
            for slack_share in (LATE, MIDDLE)
            for hull_first in (False, True)
        )
        return min(plans, key=lambda plan: plan.cost_j + idle_w * plan.makespan_s)

    def refined(self, plan: RoundedPlan, deadline_s: float, *, excess_j: float, is_prompt: bool = False) -> RoundedPlan:
        """Return the plan with windows of time re-optimized one after the other; it never costs more.

        The ends come first, in windows that grow while they gain. Between them, refinement gains much with coarse
        clocks, little with fine ones: so some windows are tried, and all others only if those gain enough. These do not
        overlap: half-overlapping ones take twice as long and gain little more. `excess_j` is what the plan costs above
        its bound. With `is_prompt` windows stay small whatever the number of stages, so that each takes hundredths of a
        second instead of most of one, and all are refined for a smaller gain.
        """
        whole = max(LEAST_WINDOW, WINDOW_PER_RANK * self.graph.num_ranks)
        window = LEAST_WINDOW if is_prompt else whole
        largest = LARGEST_WINDOW * window // whole
        network = flow_network(self.graph, self.tables, thin_tolerance=HULL_TOLERANCE)
        of_windows = partial(refine, self.rounder, network, deadline_s=deadline_s)
        bound_j = plan.cost_j - excess_j
        for is_end in (False, True):
            size, number, gain_j = window, 0, excess_j
            while gain_j >= WORTH_GROWING * excess_j > 0.0:
                windows = windows_of_passes(self.rounder, ((BY_TIME, size),))
                if number >= len(windows):
                    break
                before_j = plan.cost_j
                plan = of_windows(plan, windows=[windows[-1 - number if is_end else number]])
                gain_j = before_j - plan.cost_j
                if size * GROWTH <= largest:
                    size *= GROWTH
                else:
                    number += 1
        inner = windows_of_passes(self.rounder, ((BY_TIME, window),))[2:-2:2]  # windows overlap by half
        sampled = inner[:: max(1, len(inner) // NUM_SAMPLED)]
        first = of_windows(plan, windows=sampled)
        gain_j = (plan.cost_j - first.cost_j) * len(inner) / max(1, len(sampled))
        if gain_j < WORTH_REFINING * window / whole * (plan.cost_j - bound_j):
            return first
        return of_windows(first, windows=sorted(set(inner) - set(sampled)))

    def least_energy_time_s(self, found: AveragedPrices) -> float:
        """Return T* from prices for a deadline beyond it."""
        return max(self.min_time_s, makespan_s(self.graph, found.durations_s.tolist()))
