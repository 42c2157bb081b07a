"""What the history knows of the grid: intensities, forecasts as they were issued, targets as they were decided."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, select

from gpuenergyd.core.carbon import (
    CarbonForecast,
    CarbonSignal,
    EmissionFactor,
    IntensityRung,
    IntensitySample,
    SampleStatus,
    SignalKind,
)
from gpuenergyd.store import schema
from gpuenergyd.store.blobs import decode_hours, decode_points


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
    rung: IntensityRung
    intensity: float | None
    unit: str
    slowdown_so_far_ratio: float | None
    budget_ratio: float
    host_power_w: float
    frontier: tuple[tuple[float, float], ...] | None


def intensities(
    connection: Connection, since: datetime | None, until: datetime | None, zone: str | None
) -> tuple[StoredIntensity, ...]:
    """Return the values that held in a span of the host's time, oldest first."""
    table = schema.intensities
    query = select(table).order_by(table.c.valid_from, table.c.fetched_at)
    if since is not None:
        query = query.where(table.c.valid_to > since)
    if until is not None:
        query = query.where(table.c.valid_from < until)
    if zone is not None:
        query = query.where(table.c.zone == zone)
    return tuple(
        StoredIntensity(
            CarbonSignal(row.zone, row.source, SignalKind(row.kind), EmissionFactor(row.factor)),
            IntensitySample(row.valid_from, row.valid_to, row.carbon_intensity_g_per_kwh, SampleStatus(row.status)),
            row.grid_from,
        )
        for row in connection.execute(query)
    )


def forecasts(connection: Connection, zone: str, since: datetime) -> tuple[CarbonForecast, ...]:
    """Return the forecasts of a zone that were issued from an instant of the grid on, oldest first."""
    table = schema.forecasts
    query = select(table).where(table.c.zone == zone, table.c.issued_at >= since).order_by(table.c.issued_at)
    return tuple(
        CarbonForecast(row.zone, row.issued_at, row.model, decode_hours(row.hours), row.unit)
        for row in connection.execute(query)
    )


def targets(connection: Connection, job_id: str) -> tuple[TargetRow, ...]:
    """Return what was owed to a job, oldest first."""
    table = schema.targets
    query = select(table).where(table.c.job_id == job_id).order_by(table.c.decided_at)
    return tuple(
        TargetRow(
            decided_at=row.decided_at,
            policy=row.policy,
            permitted_time_s=row.permitted_time_s,
            reason=row.reason,
            rung=IntensityRung(row.rung),
            intensity=row.intensity,
            unit=row.unit,
            slowdown_so_far_ratio=row.slowdown_so_far_ratio,
            budget_ratio=row.budget_ratio,
            host_power_w=row.host_power_w,
            frontier=None if row.frontier is None else decode_points(row.frontier),
        )
        for row in connection.execute(query)
    )
