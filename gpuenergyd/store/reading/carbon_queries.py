"""What the history knows of the grid: intensities, forecasts as they were issued, targets as they were decided."""

from dataclasses import dataclass
from datetime import datetime

from gpuenergyd.core.carbon.intensity import (
    CarbonForecast,
    CarbonSignal,
    EmissionFactor,
    IntensityBasis,
    IntensitySample,
    SampleStatus,
    SignalKind,
)
from gpuenergyd.store.encoding.compressed_json import decode_hours, decode_points
from gpuenergyd.store.readers.sqlite import Reader


@dataclass(frozen=True, slots=True)
class StoredIntensity:
    """One value: when it held by the host's time, and when by the grid's."""

    signal: CarbonSignal
    host: IntensitySample
    grid_from: datetime


@dataclass(frozen=True, slots=True)
class TargetRow:
    """What was owed to a job from an instant on, and why; `permitted_time_s` None is full speed."""

    decided_at: datetime
    policy: str
    permitted_time_s: float | None
    reason: str
    basis: IntensityBasis
    intensity: float | None
    unit: str
    slowdown_so_far_ratio: float | None
    budget_ratio: float
    host_power_w: float
    frontier: tuple[tuple[float, float], ...] | None


def intensities(
    reader: Reader, since: datetime | None, until: datetime | None, zone: str | None
) -> tuple[StoredIntensity, ...]:
    """Return the values that held in a span of the host's time, oldest first."""
    wanted = {"valid_to > ?": since, "valid_from < ?": until, "zone = ?": zone}
    return tuple(
        StoredIntensity(
            CarbonSignal(row.zone, row.source, SignalKind(row.kind), EmissionFactor(row.factor)),
            IntensitySample(row.valid_from, row.valid_to, row.carbon_intensity_g_per_kwh, SampleStatus(row.status)),
            row.grid_from,
        )
        for row in reader.select("*", "intensities", wanted, order_by="valid_from, fetched_at")
    )


def forecasts(reader: Reader, zone: str, since: datetime) -> tuple[CarbonForecast, ...]:
    """Return the forecasts of a zone that were issued from an instant of the grid on, oldest first."""
    wanted = {"zone = ?": zone, "issued_at >= ?": since}
    return tuple(
        CarbonForecast(row.zone, row.issued_at, row.model, decode_hours(row.hours), row.unit)
        for row in reader.select("*", "forecasts", wanted, order_by="issued_at")
    )


def targets(reader: Reader, job_id: str) -> tuple[TargetRow, ...]:
    """Return what was owed to a job, oldest first."""
    return tuple(
        TargetRow(
            decided_at=row.decided_at,
            policy=row.policy,
            permitted_time_s=row.permitted_time_s,
            reason=row.reason,
            basis=IntensityBasis(row.rung),
            intensity=row.intensity,
            unit=row.unit,
            slowdown_so_far_ratio=row.slowdown_so_far_ratio,
            budget_ratio=row.budget_ratio,
            host_power_w=row.host_power_w,
            frontier=None if row.frontier is None else decode_points(row.frontier),
        )
        for row in reader.select("*", "targets", {"job_id = ?": job_id}, order_by="decided_at")
    )
