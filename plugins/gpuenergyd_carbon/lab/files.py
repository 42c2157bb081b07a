"""Reads and writes the files of the carbon commands: traces, frontiers, profiles, start times, forecasts, choices."""

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpuenergyd.cli.commands.report_output import write_text
from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.lab.results import ZoneReplay
from gpuenergyd_carbon.signal_file import CARBON_COLUMN, TIME_COLUMN, file_text, series_of, signal_rows, zone_of_file

FORECAST_COLUMNS = ("issued_at_utc", "target_utc", "carbon_intensity_g_per_kwh")
POWER_LIMIT_COLUMNS = ("elapsed_time", "gpu0_energy")
_MAX_BYTES = 256 * 2**20

Points = tuple[tuple[float, float], ...]


def read_traces(paths: Sequence[Path]) -> tuple[HourlySeries, ...]:
    """Return one series per zone, in the order of its first file; several files of a zone are joined.

    Raises:
        CarbonDataError: a file cannot be read, a row is invalid, or two files contradict each other.
    """
    by_zone: dict[str, dict[datetime, float]] = {}
    for path in paths:
        hours = by_zone.setdefault(zone_of_file(path), {})
        for line, at, value in signal_rows(path, _text(path), CARBON_COLUMN)[1]:
            known = hours.get(at)
            if known is not None and not (known == value or math.isnan(known) or math.isnan(value)):
                raise CarbonDataError(f"{path}: line {line}: {value:g} for {utc_text(at)}, but {known:g} earlier")
            if known is None or math.isnan(known):
                hours[at] = value
    for zone, hours in by_zone.items():
        if not hours:
            raise CarbonDataError(f"zone {zone}: the trace has no rows")
    return tuple(series_of(zone, hours) for zone, hours in by_zone.items())


def is_trace(path: Path) -> bool:
    with io.StringIO(_text(path)[:4096]) as file:
        return {TIME_COLUMN, CARBON_COLUMN} <= set(next(csv.reader(file), ()))


def read_frontier(path: Path) -> Points:
    """Return the points of a JSON file `[{"T": seconds, "E": joules}, ...]` or `[[T, E], ...]`.

    Raises:
        CarbonDataError: the file has another format.
    """
    try:
        document = json.loads(_text(path))
        points = tuple(
            (float(point["T"]), float(point["E"])) if isinstance(point, dict) else (float(point[0]), float(point[1]))
            for point in document
        )
    except (ValueError, TypeError, KeyError, IndexError):
        raise CarbonDataError(f'{path}: must be a frontier such as [{{"T": 1.0, "E": 500.0}}, ...] (s, J)') from None
    if not points:
        raise CarbonDataError(f"{path}: the frontier is empty")
    return points


def read_power_limit_profiles(paths: Sequence[Path]) -> Points:
    """Return points measured under power limits, one file per GPU: the slowest GPU's time and the sum of energies.

    The columns are those of Zeus: `elapsed_time` and `gpu<N>_energy`.

    Raises:
        CarbonDataError: a file has other columns, or the files have different numbers of rows.
    """
    tables = [_power_limit_rows(path) for path in paths]
    if len({len(table) for table in tables}) != 1:
        raise CarbonDataError(f"profiles {', '.join(map(str, paths))} must have the same number of rows")
    return tuple(
        (max(time_s for time_s, _ in row), sum(energy_j for _, energy_j in row)) for row in zip(*tables, strict=True)
    )


def is_power_limit_profile(path: Path) -> bool:
    with io.StringIO(_text(path)[:4096]) as file:
        header = next(csv.reader(file), [])
    return "elapsed_time" in header and any(_is_energy(column) for column in header)


def read_starts(path: Path) -> dict[str, tuple[datetime, ...]]:
    """Return the start times of a JSON file `[{"zone": ..., "starts_utc": [...]}]`.

    Raises:
        CarbonDataError: the file has another format.
    """
    try:
        document = json.loads(_text(path))
        listed = [document] if isinstance(document, dict) else document
        return {str(row["zone"]): tuple(utc_instant(text) for text in row["starts_utc"]) for row in listed}
    except (ValueError, TypeError, KeyError):
        raise CarbonDataError(
            f'{path}: must be start times such as [{{"zone": "GB", "starts_utc": ["2024-01-01T00:00Z"]}}]'
        ) from None


def write_forecasts(path: Path, zones: Sequence[ZoneReplay]) -> None:
    """Write all forecasts as `issued_at_utc,target_utc,carbon_intensity_g_per_kwh`; several zones add a zone column.

    Raises:
        CarbonDataError: the file cannot be written.
    """

    def rows() -> Iterable[list[str]]:
        yield [*FORECAST_COLUMNS, *(["zone"] if len(zones) > 1 else [])]
        for zone in zones:
            for number, row in enumerate(zone.forecasts):
                at = zone.first_issued_at + number * HOUR
                for hour, value in enumerate(row):
                    target = [utc_text(at), utc_text(at + hour * HOUR), f"{value:.3f}"]
                    yield [*target, zone.zone] if len(zones) > 1 else target

    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows())
    except OSError as error:
        raise CarbonDataError(f"{path}: {error.strerror}") from None


def write_choices(path: Path, zones: Sequence[ZoneReplay]) -> None:
    """Write the point chosen for each hour of each job: one object, or a list of objects for several zones.

    Raises:
        UsageError: the file cannot be written.
    """
    documents = [
        {"zone": zone.zone, "jobs": [{"start_utc": utc_text(j.start_at), "choices": j.choices} for j in zone.jobs]}
        for zone in zones
    ]
    write_text(path, json.dumps(documents[0] if len(documents) == 1 else documents))


def utc_text(at: datetime) -> str:
    """Return an instant in the format of traces."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def utc_instant(text: str) -> datetime:
    """Return an instant; text without a time zone is UTC.

    Raises:
        ValueError: the text is not a date or time.
    """
    at = datetime.fromisoformat(text)
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


def _power_limit_rows(path: Path) -> list[tuple[float, float]]:
    reader = csv.DictReader(io.StringIO(_text(path)))
    energy = next((name for name in reader.fieldnames or () if _is_energy(name)), None)
    if energy is None or "elapsed_time" not in (reader.fieldnames or ()):
        raise CarbonDataError(f"{path}: a power-limit profile must have the columns {','.join(POWER_LIMIT_COLUMNS)}")
    try:
        return [(float(row["elapsed_time"]), float(row[energy])) for row in reader]
    except (TypeError, ValueError):
        raise CarbonDataError(f"{path}: every row must contain a time and an energy") from None


def _is_energy(column: str) -> bool:
    return column.startswith("gpu") and column.endswith("_energy")


def _text(path: Path) -> str:
    try:
        return file_text(path, _MAX_BYTES)
    except OSError as error:
        raise CarbonDataError(f"{path}: {error.strerror}") from None


def plain_zone(zone: ZoneReplay) -> dict[str, Any]:
    """Return a zone's result as a JSON object: ratios, forecast skill, and the results of all methods."""
    values = {field.name: getattr(zone, field.name) for field in fields(zone)}
    for name in ("skill", "jobs", "first_issued_at", "forecasts"):
        del values[name]
    skills = ("skill_1h_ratio", "skill_6h_ratio", "skill_24h_mean_ratio")
    return {**values, **{name: getattr(zone.skill, name) for name in skills}}
