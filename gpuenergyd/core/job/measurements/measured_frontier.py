"""Measured time-energy points of a job, used as its frontier if the policy has no better one."""

from collections.abc import Sequence
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.policy_api.policy import FrontierPoint, JobView

LEAST_ITERATIONS = 2
"""Minimum number of iterations per plan; if there are more, the first, while clocks still change, is left out."""


def measured_frontier(view: JobView) -> tuple[FrontierPoint, ...]:
    """Return median time and energy of every plan that ran, and of full speed, fastest first.

    For a policy that tries one clock on all GPUs, these are the points of the job's uniform-clock curve.
    """
    by_plan: dict[str, list[IterationObservation]] = {}
    for seen in view.observations:
        if seen.is_regular and seen.plan_id is not None and seen.energy_j is not None:
            by_plan.setdefault(seen.plan_id, []).append(seen)
    points = [point for iterations in by_plan.values() if (point := _point(iterations)) is not None]
    if view.baseline.energy_j is not None:
        points.append(FrontierPoint(view.baseline.iteration_time_s, view.baseline.energy_j, None))
    return tuple(sorted(points, key=lambda point: point.iteration_time_s))


def _point(own: Sequence[IterationObservation]) -> FrontierPoint | None:
    settled = own[1:] if len(own) > LEAST_ITERATIONS else own
    energies_j = [seen.energy_j for seen in settled if seen.energy_j is not None]
    if len(own) < LEAST_ITERATIONS or not energies_j:
        return None
    return FrontierPoint(median(seen.iteration_time_s for seen in settled), median(energies_j), None)
