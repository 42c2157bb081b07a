"""Expected regret: the energy that a plan from the current fit loses because the fit is uncertain.

The fit has a posterior distribution over profiles. A plan made for its mode is evaluated on draws from it, each
compared with the optimal plan of that draw. Time beyond the deadline is charged at the deadline's energy price, since a
later correction must recover it. Near the minimum time of a pipeline that price is unbounded: single draws lost 50 %
and more where the typical one lost 0.6 %, which dominated a mean of few draws. Hence the median.
"""

from statistics import median

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


def predicted_regret_ratio(fitted: FittedProfile, graph: DependencyGraph, *, deadline_s: float) -> float:
    """Return the median relative energy loss of a plan from the fit, against plans with perfect knowledge."""
    profile = fitted.profile
    deadline_s = max(deadline_s, min_iteration_time_s(graph, profile))
    plan = solve(graph, profile, deadline_s=deadline_s, effort=Effort.QUICK, thin_tolerance=_THIN_TOLERANCE)
    planned = FixedClocks(graph, plan.sm_clocks_mhz)
    random = np.random.default_rng(_SEED)
    losses = []
    for _ in range(NUM_DRAWS):
        truth = fitted.drawn(random)
        time_s, energy_j = planned.time_and_energy(truth)
        target_s = max(deadline_s, min_iteration_time_s(graph, truth))
        best = solve(graph, truth, deadline_s=target_s, effort=Effort.QUICK, thin_tolerance=_THIN_TOLERANCE)
        late_j = best.price_w * max(0.0, time_s - target_s)
        losses.append((energy_j + late_j) / best.energy_j - 1)
    return max(0.0, median(losses))
