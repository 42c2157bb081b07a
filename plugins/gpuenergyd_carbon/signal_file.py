"""Hourly signals in CSV files with two columns: `timestamp_utc`, and one that is named after the quantity.

If that is `carbon_intensity_g_per_kwh`, the signal is a carbon intensity. Any other name is the unit of a cost per
energy, for instance a price.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import CarbonDataError, CarbonSourceError
from gpuenergyd_carbon.rules.hourly_values import checked_intensity

TIME_COLUMN = "timestamp_utc"
CARBON_COLUMN = "carbon_intensity_g_per_kwh"
CARBON_UNIT = "g/kWh"
MAX_BYTES = 16 * 2**20
MAX_HOURS = 20 * 8784
SignalRow: TypeAlias = tuple[int, datetime, float]
"""Line number, instant in UTC and value."""


@dataclass(slots=True)
class SignalFile:
    """A signal file that is read again when it has changed."""

    path: Path
    zone: str
    _stamp: tuple[int, int] | None = None
    _series: HourlySeries | None = None

    def read(self) -> HourlySeries:
        """Return the series, including future hours.

        Raises:
            CarbonDataError: the file cannot be read or a row is invalid; the message names file and line.
        """
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if self._series is None or stamp != self._stamp:
                self._series = _series(self.path, file_text(self.path, MAX_BYTES), self.zone)
                self._stamp = stamp
        except OSError as error:
            raise CarbonDataError(f"{self.path}: {error.strerror}") from None
        return self._series


def zone_of_file(path: Path) -> str:
    """Return the zone of a trace file: its name up to the first underscore."""
    return path.stem.partition("_")[0]


def file_text(path: Path, max_bytes: int) -> str:
    """Return the text of a file.

    Raises:
        OSError: the file cannot be read.
        CarbonDataError: it is larger than `max_bytes`.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise CarbonDataError(f"{path}: larger than {count_text(max_bytes, 'byte')}")
    return content.decode("utf-8-sig", "replace")


def signal_rows(
    path: Path, text: str, column: str | None = None, *, is_checked: bool = True
) -> tuple[str, Iterator[SignalRow]]:
    """Return the name of the quantity and the rows of a file with this text; a missing value is NaN.

    If `column` names the quantity, the file may have further columns; otherwise it must have exactly one besides the
    time. Unless `is_checked`, values may be out of range, and times need not be full hours.

    Raises:
        CarbonDataError: the columns are wrong, or (while iterating) a row is invalid.
    """
    reader = csv.reader(io.StringIO(text))
    header = [name.strip() for name in next(reader, [])]
    name = next((other for other in header if other != TIME_COLUMN), "") if column is None else column
    if not {TIME_COLUMN, name} <= {*header} or (column is None and len(header) != 2):
        wanted = f"one more, e.g. {CARBON_COLUMN}" if column is None else column
        raise CarbonDataError(f"{path}: columns {','.join(header)!r:.80}; valid: {TIME_COLUMN} and {wanted}")
    time_index, index = header.index(TIME_COLUMN), header.index(name)

    def rows() -> Iterator[SignalRow]:
        for line, row in enumerate(reader, start=2):
            if not row:
                continue
            try:
                at = datetime.fromisoformat(row[time_index].strip())
                value = float(row[index]) if row[index].strip() else math.nan
            except (ValueError, IndexError):
                raise CarbonDataError(f"{path}: line {line}: expected a time and a number") from None
            at = at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
            if is_checked:
                if (at.minute, at.second, at.microsecond) != (0, 0, 0) or math.isinf(value):
                    raise CarbonDataError(
                        f"{path}: line {line}: expected a full hour and a finite value: rows are hourly"
                    )
                value = _checked(path, line, name, value)
            yield line, at, value

    return name, rows()


def series_of(zone: str, hours: Mapping[datetime, float], unit: str = CARBON_UNIT) -> HourlySeries:
    """Return the series of at least one hour; hours without a value between the first and the last are unknown."""
    first = min(hours)
    num_hours = (max(hours) - first) // HOUR + 1
    return HourlySeries(zone, first, tuple(hours.get(first + k * HOUR, math.nan) for k in range(num_hours)), unit)


def _series(path: Path, text: str, zone: str) -> HourlySeries:
    name, rows = signal_rows(path, text)
    hours = {at: value for _, at, value in rows}
    if not hours:
        raise CarbonDataError(f"{path}: no rows below the header")
    num_hours = (max(hours) - min(hours)) // HOUR + 1
    if num_hours > MAX_HOURS:
        raise CarbonDataError(f"{path}: spans {num_hours} hours; at most {MAX_HOURS} are read")
    return series_of(zone, hours, CARBON_UNIT if name == CARBON_COLUMN else name)


def _checked(path: Path, line: int, name: str, value: float) -> float:
    if name != CARBON_COLUMN or math.isnan(value):
        return value
    try:
        return checked_intensity(value)
    except CarbonSourceError as error:
        raise CarbonDataError(f"{path}: line {line}: {error}") from None
