"""Chase's rule, for comparison: a fixed weight of carbon against time, without look-ahead or budget.

Each slot runs at the point that minimises `eta * P(T) * c + (1 - eta) * MAXPOWER * CI_MAX` per unit of speed. Per
iteration that is `c E(T) + kappa T` with kappa = MAXPOWER * CI_MAX * (1 - eta) / eta. Source: ml-energy/zeus, branch
`chase`, and the abstract of the paper.
"""

import numpy as np

from gpuenergyd_policies.carbon.budget import SpeedHull

ETA = 0.24
"""Published weight of carbon against time."""
MAX_INTENSITY_G_PER_KWH = 750.0


def chase_speed(hull: SpeedHull, intensity_g_per_kwh: float, *, eta: float = ETA) -> float:
    """Return the speed that Chase's rule selects for one slot."""
    kappa = float(hull.powers_w[-1]) * MAX_INTENSITY_G_PER_KWH * (1.0 - eta) / eta
    cost_per_iteration = (intensity_g_per_kwh * hull.powers_w + kappa) / hull.speeds_per_s
    return float(hull.speeds_per_s[int(np.argmin(cost_per_iteration))])
