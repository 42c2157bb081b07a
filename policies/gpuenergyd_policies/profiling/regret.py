"""Expected regret: the energy that a plan from the current fit loses because the fit is uncertain.

The fit has a posterior distribution over profiles. A plan made for its mode is evaluated on draws from it, each
compared with the optimal plan of that draw. Time beyond the deadline is charged at the deadline's energy price, since a
later correction must recover it. Near the minimum time of a pipeline that price is unbounded: single draws lost 50 %
and more where the typical one lost 0.6 %, which dominated a mean of few draws. Hence the median.
"""

from collections.abc import Iterator

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.plan_evaluation import FixedClocks
from gpuenergyd_policies.planning.problem import Effort
from gpuenergyd_policies.profiling.fit import FittedProfile

NUM_DRAWS = 11
"""Draws per estimate; the median of an odd number is one of them."""
_THIN_TOLERANCE = 5e-3
_SEED = 5


def is_regret_at_most(limit_ratio: float, fitted: FittedProfile, graph: DependencyGraph, *, deadline_s: float) -> bool:
    """Return whether the median relative energy loss of a plan from the fit, against perfect knowledge, is so small."""
    return is_median_at_most(limit_ratio, _losses_ratio(fitted, graph, deadline_s=deadline_s), num_values=NUM_DRAWS)


def is_median_at_most(limit: float, values: Iterator[float], *, num_values: int) -> bool:
    """Return whether the median of an odd number of values is at most a limit; takes only as many as settle that."""
    num_within = num_above = 0
    while max(num_within, num_above) <= num_values // 2:
        is_within = next(values) <= limit
        num_within, num_above = num_within + is_within, num_above + (not is_within)
    return num_within > num_above


def _losses_ratio(fitted: FittedProfile, graph: DependencyGraph, *, deadline_s: float) -> Iterator[float]:
    """Yield the relative energy loss of a plan from the fit in one draw from its posterior after the other."""
    profile = fitted.profile
    deadline_s = max(deadline_s, min_iteration_time_s(graph, profile))
    plan = solve(graph, profile, deadline_s=deadline_s, effort=Effort.QUICK, thin_tolerance=_THIN_TOLERANCE)
    planned = FixedClocks(graph, plan.sm_clocks_mhz)
    random = np.random.default_rng(_SEED)
    while True:
        truth = fitted.drawn(random)
        time_s, energy_j = planned.time_and_energy(truth)
        target_s = max(deadline_s, min_iteration_time_s(graph, truth))
        best = solve(graph, truth, deadline_s=target_s, effort=Effort.QUICK, thin_tolerance=_THIN_TOLERANCE)
        late_j = best.price_w * max(0.0, time_s - target_s)
        yield (energy_j + late_j) / best.energy_j - 1
