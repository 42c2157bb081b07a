"""When enough is known: how much energy a plan from the present fit is expected to lose for what is not known yet.

The fit leaves many profiles probable. A plan made from the most probable one is judged on draws of the others, each
against the plan that its own draw would have asked for. Time that the plan would take beyond the deadline is charged
at the deadline's price, since a correction will have to buy it back. Near the least time of a pipeline that price has
no bound: single draws lost 50 % and more where the typical one lost 0.6 %, and a mean of few draws told only whether
one of those was among them. So the median counts.
"""

from statistics import median

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.plan_evaluation import evaluate_clocks
from gpuenergyd_policies.planning.problem import Effort
from gpuenergyd_policies.profiling.fit import FittedProfile

NUM_DRAWS = 11
_THIN_TOLERANCE = 5e-3
_SEED = 5


def predicted_regret_ratio(fitted: FittedProfile, graph: DependencyGraph, *, deadline_s: float) -> float:
    """Return the energy typically lost by planning on the fit now, over that of the plans of perfect knowledge."""
    profile = fitted.profile
    deadline_s = max(deadline_s, min_iteration_time_s(graph, profile))
    plan = solve(graph, profile, deadline_s=deadline_s, effort=Effort.QUICK, thin_tolerance=_THIN_TOLERANCE)
    random = np.random.default_rng(_SEED)
    losses = []
    for _ in range(NUM_DRAWS):
        truth = fitted.drawn(random)
        evaluated = evaluate_clocks(graph, truth, plan.sm_clocks_mhz)
        target_s = max(deadline_s, min_iteration_time_s(graph, truth))
        best = solve(graph, truth, deadline_s=target_s, effort=Effort.QUICK, thin_tolerance=_THIN_TOLERANCE)
        late_j = best.price_w * max(0.0, evaluated.iteration_time_s - target_s)
        losses.append((evaluated.energy_j + late_j) / best.energy_j - 1)
    return max(0.0, median(losses))
