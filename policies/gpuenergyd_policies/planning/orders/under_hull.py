"""Convex under-estimates of hulls with few vertices, for bounds that must hold whatever is left out."""

from typing import NamedTuple

import numpy as np

from gpuenergyd.core.pipeline.profile import InstructionProfile
from gpuenergyd_policies.planning.exact.tables import FloatArray

TOLERANCE_RATIO = 2e-4
"""How far an under-estimate lies below the hull at most, as a share of the least energy of the class."""


class UnderHull(NamedTuple):
    """Vertices (time, effective energy) of a convex chain at or below a hull, fastest first."""

    times_s: FloatArray
    costs_j: FloatArray


def under_hull(profile: InstructionProfile, blocking_power_w: float) -> UnderHull:
    """Return an under-estimate of a class's hull, made of few of the lines through its neighbouring vertices."""
    hull = profile.lower_hull(blocking_power_w)
    times = np.array([option.time_s for option in hull])
    costs = np.array([option.effective_energy_j(blocking_power_w) for option in hull])
    if len(hull) <= 2:
        return UnderHull(times, costs)
    allowed_j = TOLERANCE_RATIO * min(option.energy_j for option in hull)
    slopes_w = np.diff(costs) / np.diff(times)
    at_zero_j = costs[:-1] - slopes_w * times[:-1]
    corners_s = [float(times[0])]
    corners_j = [float(costs[0])]
    kept = 0
    while kept < len(slopes_w) - 1:
        best = kept + 1
        for other in range(kept + 1, len(slopes_w)):
            # where the kept line meets a later one, the chain lies farthest below the hull
            corner_s = (at_zero_j[other] - at_zero_j[kept]) / (slopes_w[kept] - slopes_w[other])
            corner_j = at_zero_j[kept] + slopes_w[kept] * corner_s
            if float(np.interp(corner_s, times, costs)) - corner_j > allowed_j and other > kept + 1:
                break
            best = other
        corner_s = (at_zero_j[best] - at_zero_j[kept]) / (slopes_w[kept] - slopes_w[best])
        corners_s.append(float(corner_s))
        corners_j.append(float(at_zero_j[kept] + slopes_w[kept] * corner_s))
        kept = best
    corners_s.append(float(times[-1]))
    corners_j.append(float(costs[-1]))
    return UnderHull(np.array(corners_s), np.array(corners_j))
