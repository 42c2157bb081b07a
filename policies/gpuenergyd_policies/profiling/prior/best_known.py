"""The best plan so far: a plan that ran need not be predicted, its iteration time was measured.

Near full speed the frontier is steep: where a power cap makes a clock almost free, 0.3 % of time is worth 2 % of
energy. A new plan that is believed to be a little better may be late by more than it saves, so it is compared with the
plans that ran: their energies by the present belief, their times as measured, lateness at its price on the frontier.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.plan_evaluation import evaluate_clocks
from gpuenergyd_policies.planning.problem import Effort

_PRICED_LATE_RATIO = 0.003
"""Lateness that the price refers to: about that of plans that are late by mistake."""
_THIN_TOLERANCE = 5e-3


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """Energy of a plan by the present belief, and how late it is: measured if it ran, expected if it did not."""

    energy_j: float
    late_s: float
    """Behind the deadline; negative if early, which is worth nothing."""


def best_known(plans: Sequence[KnownPlan], *, price_w: float) -> int:
    """Return the index of the plan of least energy, with lateness at a price; of equal plans that of the first."""
    costs_j = [own.energy_j + price_w * max(0.0, own.late_s) for own in plans]
    return costs_j.index(min(costs_j))


def price_of_lateness_w(graph: DependencyGraph, believed: PipelineProfile, *, deadline_s: float) -> float:
    """Return the energy that a later deadline would save, per time, in W."""
    at_j = []
    for ratio in (1.0, 1.0 + _PRICED_LATE_RATIO):
        least_s = max(ratio * deadline_s, min_iteration_time_s(graph, believed))
        plan = solve(graph, believed, deadline_s=least_s, effort=Effort.QUICK, thin_tolerance=_THIN_TOLERANCE)
        at_j.append(evaluate_clocks(graph, believed, plan.sm_clocks_mhz).energy_j)
    return max(0.0, at_j[0] - at_j[1]) / (_PRICED_LATE_RATIO * deadline_s)
