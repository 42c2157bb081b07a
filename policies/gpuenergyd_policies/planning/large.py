"""Plans for pipelines too large for the exact sweep: prices by averaging, rounding, and refinement.

Theory of operation. The sweep finds the best flow of prices breakpoint by breakpoint, which takes minutes for ten
thousand instructions or more. Averaging (see `averaging`) approaches that flow, rounding on the whole graph meets the
deadline, and time windows are then optimized exactly. Any flow gives a proven bound, so a plan's distance from the
optimum is known.
"""

from functools import partial

from gpuenergyd_policies.planning.discrete.refinement import BY_TIME, refine, windows_of_passes
from gpuenergyd_policies.planning.discrete.rounding import RoundedPlan
from gpuenergyd_policies.planning.problem import PlanningProblem

TOO_LARGE = 8_000
"""With more instructions, the exact sweep takes longer than a job should wait for a plan."""
WINDOW_PER_RANK, LEAST_WINDOW = 16, 256
"""Instructions per time window in refinement; the sweep's time grows faster than in proportion to them."""
LARGEST_WINDOW, GROWTH = 4096, 4
"""Windows at both ends grow, then move inwards, as long as they gain: rounding leaves slack there for large windows."""
WORTH_GROWING = 0.05
"""A window at an end must close this share of the gap for the next one to be tried."""
NUM_SAMPLED = 16
"""Number of windows that are refined first, to estimate the gain."""
WORTH_REFINING = 0.1
"""The first windows must indicate that refining all would close this share of the gap."""
REFINED_GAP = 1e-3
"""Windows are refined if a rounded plan exceeds its bound by more than this share of the energy."""


def refined(
    problem: PlanningProblem, plan: RoundedPlan, deadline_s: float, *, excess_j: float, is_prompt: bool = False
) -> RoundedPlan:
    """Return the plan after optimizing time windows one after the other; it never costs more.

    The ends come first, in windows that grow while they gain. In between, refinement gains much with coarse clocks but
    little with fine ones, so some windows are tried, and the others only if those gain enough. These windows do not
    overlap: half-overlapping ones take twice as long and gain little more. `excess_j` is the plan's cost above its
    bound. With `is_prompt` windows stay small for any number of stages, so that each takes hundredths of a second
    instead of most of one, and all are refined for a smaller gain.
    """
    whole = max(LEAST_WINDOW, WINDOW_PER_RANK * problem.graph.num_ranks)
    window = LEAST_WINDOW if is_prompt else whole
    largest = LARGEST_WINDOW * window // whole
    of_windows = partial(refine, problem.rounder, problem.network, deadline_s=deadline_s)
    bound_j = plan.cost_j - excess_j
    for is_end in (False, True):
        size, number, gain_j = window, 0, excess_j
        while gain_j >= WORTH_GROWING * excess_j > 0.0:
            windows = windows_of_passes(problem.rounder, ((BY_TIME, size),))
            if number >= len(windows):
                break
            before_j = plan.cost_j
            plan = of_windows(plan, windows=[windows[-1 - number if is_end else number]])
            gain_j = before_j - plan.cost_j
            if size * GROWTH <= largest:
                size *= GROWTH
            else:
                number += 1
    inner = windows_of_passes(problem.rounder, ((BY_TIME, window),))[2:-2:2]  # windows overlap by half
    sampled = inner[:: max(1, len(inner) // NUM_SAMPLED)]
    first = of_windows(plan, windows=sampled)
    gain_j = (plan.cost_j - first.cost_j) * len(inner) / max(1, len(sampled))
    if gain_j < WORTH_REFINING * window / whole * (plan.cost_j - bound_j):
        return first
    return of_windows(first, windows=sorted(set(inner) - set(sampled)))
