"""Hourly signals in CSV files with the column `timestamp_utc` and one more, named after the quantity.

`carbon_intensity_g_per_kwh` is a carbon intensity; any other column is a cost per energy, for instance a price, and its
name is the unit.
"""

import csv
import io
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries, checked_intensity
from gpuenergyd.errors import CarbonDataError, CarbonSourceError

TIME_COLUMN = "timestamp_utc"
CARBON_COLUMN = "carbon_intensity_g_per_kwh"
CARBON_UNIT = "g/kWh"
MAX_BYTES = 16 * 2**20
MAX_HOURS = 20 * 8784


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
                with self.path.open("rb") as file:
                    content = file.read(MAX_BYTES + 1)
                self._series, self._stamp = _series(self.path, content, self.zone), stamp
        except OSError as error:
            raise CarbonDataError(f"{self.path}: {error.strerror}") from None
        return self._series


def zone_of_file(path: Path) -> str:
    """Return the zone of a trace file: its name up to the first underscore."""
    return path.stem.partition("_")[0]


def _series(path: Path, content: bytes, zone: str) -> HourlySeries:
    if len(content) > MAX_BYTES:
        raise CarbonDataError(f"{path}: larger than {MAX_BYTES} bytes")
    reader = csv.reader(io.StringIO(content.decode("utf-8-sig", "replace")))
    header = [name.strip() for name in next(reader, [])]
    if TIME_COLUMN not in header or len(header) != 2:
        raise CarbonDataError(
            f"{path}: columns {','.join(header)!r:.80}; valid: {TIME_COLUMN} and one more, e.g. {CARBON_COLUMN}"
        )
    time_index = header.index(TIME_COLUMN)
    name = header[1 - time_index]
    hours: dict[datetime, float] = {}
    for line, row in enumerate(reader, start=2):
        if not row:
            continue
        try:
            at = datetime.fromisoformat(row[time_index].strip())
            value = float(row[1 - time_index]) if row[1 - time_index].strip() else math.nan
        except (ValueError, IndexError):
            raise CarbonDataError(f"{path}: line {line}: expected a time and a number") from None
        at = at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
        if (at.minute, at.second, at.microsecond) != (0, 0, 0) or math.isinf(value):
            raise CarbonDataError(f"{path}: line {line}: expected a full hour and a finite value")
        hours[at] = _checked(path, line, name, value)
    if not hours:
        raise CarbonDataError(f"{path}: no rows below the header")
    first, last = min(hours), max(hours)
    num_hours = (last - first) // HOUR + 1
    if num_hours > MAX_HOURS:
        raise CarbonDataError(f"{path}: spans {num_hours} hours; at most {MAX_HOURS} are read")
    return HourlySeries(
        zone,
        first,
        values=tuple(hours.get(first + k * HOUR, math.nan) for k in range(num_hours)),
        unit=CARBON_UNIT if name == CARBON_COLUMN else name,
    )


def _checked(path: Path, line: int, name: str, value: float) -> float:
    if name != CARBON_COLUMN or math.isnan(value):
        return value
    try:
        return checked_intensity(value)
    except CarbonSourceError as error:
        raise CarbonDataError(f"{path}: line {line}: {error}") from None
