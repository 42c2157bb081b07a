"""The value of timing in a zone: the saving that the best choice of hours would have gained over the last month."""

import numpy as np
from threadpoolctl import threadpool_limits

from gpuenergyd.core.carbon.intensity import HourlySeries
from gpuenergyd_carbon.forecasting import TimingValue
from gpuenergyd_carbon.policy.budget import SLOT_S, speed_hull
from gpuenergyd_carbon.policy.history import DAY_HOURS, WEEK_HOURS, filled_history
from gpuenergyd_carbon.policy.jobs import TraceJob

NUM_DAYS = 30
START_EVERY_HOURS = 6
ASSUMED_FRONTIER = (
    (1.0, 1000.0), (1.0042, 990.6), (1.0118, 976.6), (1.0197, 964.2), (1.0312, 947.7), (1.0389, 939.1),
    (1.0528, 926.0), (1.0748, 913.7), (1.099, 903.4), (1.1333, 891.3), (1.1969, 877.1),
)  # fmt: skip
"""Frontier of a pipeline of four stages and eight microbatches on simulated A100s: relative time and energy."""


def timing_value(
    history: HourlySeries,
    *,
    frontier: tuple[tuple[float, float], ...] = (),
    max_slowdown_ratio: float = 0.025,
    job_hours: float = 72.0,
    host_power_w: float = 0.0,
) -> TimingValue | None:
    """Return the saving that timing could have added over the last 30 days; None if the history is too short.

    Raises:
        CarbonDataError: the frontier is invalid.
    """
    known = filled_history(history)
    if known is None:
        return None
    values = known.values[-NUM_DAYS * DAY_HOURS :]
    num_slots = int(np.ceil(job_hours * (1.0 + max_slowdown_ratio)))
    num_starts = len(values) - num_slots - 1
    if len(values) < WEEK_HOURS or num_starts < DAY_HOURS or not (values > 0).any():
        return None
    hull = speed_hull(frontier or ASSUMED_FRONTIER, host_power_w if frontier else 0.0)
    constants, oracles = [], []
    with threadpool_limits(1):
        for start in range(0, num_starts, START_EVERY_HOURS):
            job = TraceJob(hull, np.maximum(values[start:], 0.0), job_hours * SLOT_S, max_slowdown_ratio)
            full_g = job.constant_g(job.job_s)
            if full_g > 0:
                constants.append(1.0 - job.constant_g(job.permitted_s) / full_g)
                oracles.append(1.0 - job.oracle().carbon_g / full_g)
    if not constants:
        return None
    constant = float(np.mean(constants))
    return TimingValue(
        constant_saving_ratio=constant,
        timing_gain_ratio=float(np.mean(oracles)) - constant,
        max_slowdown_ratio=max_slowdown_ratio,
        job_hours=job_hours,
        num_jobs=len(constants),
        num_days=len(values) // DAY_HOURS,
        is_frontier_assumed=not frontier,
    )
