"""Chooses the safety margin of the next learned plan: the smallest that keeps it on time in 19 of 20 cases.

A plan made with much caution stays at clocks that it knows and learns nothing. One made with none learns the most, but
may be late. Between them lies the plan with the least caution whose lateness, over draws from the belief, stays within
a limit in 19 of 20: an uncertain belief makes it cautious by itself, and what it then measures makes the next one bold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd_policies.learning.job_curves import FittedCurves
from gpuenergyd_policies.learning.shape import FloatArray
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.problem import Effort

CAUTION_SIGMAS = (-2.0, 0.0, 1.0, 2.0, 3.0)
"""Tried in this order: standard deviations by which times below the maximum clock are assumed longer."""
_HALVINGS = 3
"""Of the interval between the last caution that was too little and the first that was enough. Near full speed one step
too many costs percents of energy: where a power cap makes a clock almost free, caution decides whether it is tried."""
MAX_LATE_RATIO = 0.004
"""Lateness permitted in 19 of 20 draws: less than half of what a job may lose, as a belief may be too sure."""
NUM_DRAWS = 24
_QUANTILE = 0.95
THIN_TOLERANCE = 5e-3
"""By which hulls of rough plans are thinned, as a share of the energy."""


@dataclass(frozen=True, slots=True)
class Caution:
    """Standard deviations by which times below the maximum clock are assumed longer, and the lateness that remains."""

    sigmas: float
    late_ratio: float
    """Of the deadline, exceeded in one of 20 draws."""
    mean_late_ratio: float
    """Of the deadline, expected; draws that are early do not count."""


def caution_within_risk(
    graph: DependencyGraph,
    fitted: FittedCurves,
    *,
    deadline_s: float,
    random: np.random.Generator,
    caution_sigmas: Sequence[float] = CAUTION_SIGMAS,
    max_late_ratio: float = MAX_LATE_RATIO,
) -> Caution:
    """Return about the least caution whose plan keeps within the limit, or the last one; plans are solved roughly."""
    draws_s = fitted.drawn_times_s(NUM_DRAWS, random)

    def tried(sigmas: float) -> Caution:
        late = late_ratios(graph, fitted.profile(caution_sigmas=sigmas), fitted, draws_s, deadline_s)
        return Caution(sigmas, float(np.quantile(late, _QUANTILE)), float(np.mean(np.maximum(late, 0.0))))

    too_little: float | None = None
    found = tried(caution_sigmas[0])
    for sigmas in caution_sigmas[1:]:
        if found.late_ratio <= max_late_ratio:
            break
        too_little, found = found.sigmas, tried(sigmas)
    if too_little is None or found.late_ratio > max_late_ratio:
        return found
    for _ in range(_HALVINGS):
        middle = tried((too_little + found.sigmas) / 2)
        if middle.late_ratio <= max_late_ratio:
            found = middle
        else:
            too_little = middle.sigmas
    return found


def late_ratios(
    graph: DependencyGraph, believed: PipelineProfile, fitted: FittedCurves, draws_s: FloatArray, deadline_s: float
) -> list[float]:
    """Return by draw of times how late the plan of a believed profile is, as a share of the deadline."""
    index = fitted.index_of()
    least_s = max(deadline_s, min_iteration_time_s(graph, believed))
    solved = solve(graph, believed, deadline_s=least_s, effort=Effort.QUICK, thin_tolerance=THIN_TOLERANCE)
    clocks = zip(graph.instructions, solved.sm_clocks_mhz, strict=True)
    entries = np.array([index[node.instruction_class, clock] for node, clock in clocks], dtype=np.int64)
    return [makespan_s(graph, own[entries].tolist()) / deadline_s - 1 for own in draws_s]
