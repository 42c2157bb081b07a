"""What setting a clock costs a training: how long a call stops the GPU, and how late the clock takes effect.

Both are found with the curves of times (see `seen.time_evidence`): raises and reductions show a delay with opposite
signs, and a stop alike. Each counts only if it is clearly different from zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from gpuenergyd_policies.learning.curves import CurveModel
from gpuenergyd_policies.learning.deviations import TIME
from gpuenergyd_policies.learning.seen import CallKind, ClassAtFullSpeed, TimeSeen, time_evidence, time_rows
from gpuenergyd_policies.observed_pipeline import CLEAR_SIGMAS

CALLS_SIGMA_S = (0.003, 0.03)
"""Standard deviations, before anything is measured, of the time that a call stops a GPU, and of the delay: drivers
were seen to stop work for up to some milliseconds, and clocks to take effect up to 0.1 s later than reported."""
_MIN_STALL_RATIO = 0.0005
"""Least stall worth a correction, as a share of the median instruction's time."""


@dataclass(frozen=True, slots=True)
class CallCost:
    """Time for which a call stops the GPU's work, and time from the report of a clock until its effect."""

    stall_s: float
    delay_s: float

    @classmethod
    def none(cls) -> "CallCost":
        """Return what calls cost until the job shows that they cost more."""
        return cls(0.0, 0.0)


def call_cost(classes: Sequence[ClassAtFullSpeed], times: Sequence[TimeSeen], of_time: CurveModel) -> CallCost:
    """Return the cost of calls; none where no instruction shows it."""
    model = CurveModel(of_time.prior, TIME)
    rows = time_rows(classes, times, has_calls=True)
    if all(calls is CallKind.NONE for _, _, calls in rows.rows):
        return CallCost.none()
    seen = time_evidence(classes, rows, model, calls_sigma_s=CALLS_SIGMA_S)
    amounts_s, errors_s = model.amounts(seen.observed, seen.evidence, seen.calls, np.array(CALLS_SIGMA_S))
    (stall_s, delay_s), (of_stall_s, of_delay_s) = amounts_s.tolist(), errors_s.tolist()
    least_s = max(CLEAR_SIGMAS * of_stall_s, _MIN_STALL_RATIO * median(own.time_s for own in classes))
    return CallCost(
        stall_s if stall_s >= least_s else 0.0, delay_s if abs(delay_s) >= CLEAR_SIGMAS * of_delay_s else 0.0
    )
