"""Queries about the target of a job to the policy host, and their evaluation there.

Series are sent with null for unknown hours, since JSON has no NaN.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from gpuenergyd.core.carbon.intensity import HourlySeries, IntensityBasis
from gpuenergyd.core.job.measurements.measured_frontier import measured_frontier
from gpuenergyd.core.policy_api.policy import ClockPolicy, FrontierPoint, JobView
from gpuenergyd.core.policy_api.target_policy import TargetDecision, TargetView


@dataclass(frozen=True, slots=True)
class EncodedSeries:
    """An hourly series in the encoding for the policy host."""

    zone: str
    first_hour_at: datetime
    values: tuple[float | None, ...]
    unit: str
    is_fixed: bool

    @classmethod
    def of(cls, series: HourlySeries, last_hours: int | None = None) -> "EncodedSeries":
        values = series.values if last_hours is None else series.values[-last_hours:]
        first_at = series.end_at - len(values) * (series.end_at - series.first_hour_at) / max(1, len(series.values))
        known = tuple(v if math.isfinite(v) else None for v in values)
        return cls(series.zone, first_at, known, series.unit, series.is_fixed)

    def series(self) -> HourlySeries:
        values = tuple(math.nan if value is None else value for value in self.values)
        return HourlySeries(self.zone, self.first_hour_at, values=values, unit=self.unit, is_fixed=self.is_fixed)


@dataclass(frozen=True, slots=True)
class TargetQuery:
    """Query for a job's target; the policy host adds the frontier, which only the job's clock policy knows.

    Times in `view` are grid time, of which `time_scale` seconds pass per second of host time.
    """

    target_policy: str
    view: TargetView
    history: EncodedSeries | None
    time_scale: float = 1.0
    basis: IntensityBasis = IntensityBasis.NEUTRAL
    """What the present value of the signal is based on, for policies that do not explain their target."""
    intensity: float | None = None


@dataclass(frozen=True, slots=True)
class TargetReply:
    """The decision and the frontier it is based on, both in host time."""

    decision: TargetDecision
    frontier: tuple[tuple[float, float], ...]


def answer_target(
    target_policy: Any, query: TargetQuery, policy: ClockPolicy | None, job_view: JobView | None
) -> TargetReply:
    """Return the target policy's decision for a job, based on the frontier of its clock policy."""
    points = frontier_of(policy, job_view)
    scale = query.time_scale
    scaled = tuple(FrontierPoint(p.iteration_time_s * scale, p.energy_j * scale, None) for p in points)
    history = query.history.series() if query.history is not None else None
    view = replace(query.view, frontier=scaled, history=history)
    explain: Callable[[TargetView], TargetDecision] | None = getattr(target_policy, "explain", None)
    if explain is not None:
        decision = explain(view)
    else:
        target = target_policy.next_target(view)
        decision = TargetDecision(target, query.target_policy, query.basis, query.intensity)
    target = decision.target
    unscaled = replace(
        target,
        permitted_time_s=None if target.permitted_time_s is None else target.permitted_time_s / scale,
        straggler_time_s=None if target.straggler_time_s is None else target.straggler_time_s / scale,
    )
    return TargetReply(
        replace(decision, target=unscaled, overrun_s=decision.overrun_s / scale),
        tuple((point.iteration_time_s, point.energy_j) for point in points),
    )


def frontier_of(policy: ClockPolicy | None, view: JobView | None) -> tuple[FrontierPoint, ...]:
    """Return a job's frontier from its clock policy if that provides one, else from measurements."""
    if view is None:
        return ()
    known: Callable[[JobView], tuple[FrontierPoint, ...]] | None = getattr(policy, "frontier", None)
    return known(view) if known is not None else measured_frontier(view)
