"""Queries for carbon intensities, forecasts and iteration time targets."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

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
from gpuenergyd.store.reader import Reader, column_names
from gpuenergyd.store.records import TargetRecord


@dataclass(frozen=True, slots=True)
class StoredIntensity:
    """One carbon intensity, with its validity in host time and its start in grid time."""

    signal: CarbonSignal
    host: IntensitySample
    grid_from: datetime


def intensities(
    reader: Reader, since: datetime | None, until: datetime | None, zone: str | None
) -> tuple[StoredIntensity, ...]:
    """Return the intensities valid in a range of host time, oldest first."""
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
    """Return the forecasts of a zone issued since an instant of grid time, oldest first."""
    wanted = {"zone = ?": zone, "issued_at >= ?": since}
    return tuple(
        CarbonForecast(row.zone, row.issued_at, row.model, decode_hours(row.hours), row.unit)
        for row in reader.select("*", "forecasts", wanted, order_by="issued_at")
    )


def targets(reader: Reader, job_id: str) -> tuple[TargetRecord, ...]:
    """Return the iteration time targets of a job, oldest first."""
    rows = reader.values(column_names(TargetRecord), "targets", {"job_id = ?": job_id}, order_by="decided_at")
    return tuple(_target(TargetRecord(*row)) for row in rows)


def _target(stored: TargetRecord) -> TargetRecord:
    """Convert the stored values of a target."""
    frontier: Any = stored.frontier
    return replace(
        stored, basis=IntensityBasis(stored.basis), frontier=None if frontier is None else decode_points(frontier)
    )
