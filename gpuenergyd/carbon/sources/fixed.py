"""Intensities that the user has: one constant, or a CSV file that is read again when it changes."""

import csv
import io
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuenergyd.carbon.sources.checking import RawValue, checked_reply
from gpuenergyd.carbon.sources.source import SourceOptions, SourceReply
from gpuenergyd.carbon.sources.web import Problem, SourceError
from gpuenergyd.core.carbon.intensity import (
    HOUR,
    CarbonSignal,
    EmissionFactor,
    IntensitySample,
    SampleStatus,
    SignalKind,
    checked_intensity,
)
from gpuenergyd.errors import CarbonDataError

FIXED, CSV = "fixed", "csv"
CSV_COLUMNS = ("timestamp_utc", "carbon_intensity_g_per_kwh")
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same value for ever; it prices energy and never moves a target."""

    signal: CarbonSignal
    g_per_kwh: float
    period_s: float = HOUR.total_seconds()

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the value for the hour that holds now."""
        begin = now_at.replace(minute=0, second=0, microsecond=0)
        return SourceReply((IntensitySample(begin, begin + HOUR, self.g_per_kwh, SampleStatus.STATIC),))


@dataclass(frozen=True, slots=True)
class CsvFile:
    """Hourly rows `timestamp_utc,carbon_intensity_g_per_kwh`; rows after now count as a forecast."""

    signal: CarbonSignal
    path: Path
    period_s: float = 60.0

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return what the file holds.

        Raises:
            CarbonSourceError: it cannot be read, or a row makes no sense.
        """
        return checked_reply(self.signal, self._values(now_at), now_at)

    def _values(self, now_at: datetime) -> list[RawValue]:
        try:
            with self.path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise SourceError(Problem.UNREACHABLE, f"{CSV}: {self.path}: {error.strerror}") from None
        if len(content) > _MAX_BYTES:
            raise SourceError(Problem.TOO_LARGE, f"{CSV}: {self.path} is larger than {_MAX_BYTES} bytes")
        reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig", "replace")))
        if not set(CSV_COLUMNS) <= set(reader.fieldnames or ()):
            wanted = ",".join(CSV_COLUMNS)
            raise SourceError(Problem.NOT_PARSED, f"{CSV}: {self.path} has no columns {wanted}")
        values = []
        for line, row in enumerate(reader, start=2):
            try:
                begin = datetime.fromisoformat(row[CSV_COLUMNS[0]])
                number: object = float(row[CSV_COLUMNS[1]])
            except (TypeError, ValueError):
                raise SourceError(
                    Problem.NOT_PARSED, f"{CSV}: {self.path}: line {line} is no time and number"
                ) from None
            begin = begin.astimezone(UTC) if begin.tzinfo else begin.replace(tzinfo=UTC)
            status = SampleStatus.FORECAST if begin > now_at else SampleStatus.MEASURED
            values.append(RawValue(begin, begin + HOUR, number, status))
        return values


def make_fixed(options: SourceOptions) -> Fixed:
    """Return the source; it needs a value.

    Raises:
        CarbonDataError: there is none, or it is out of range.
    """
    if options.g_per_kwh is None:
        raise CarbonDataError(f"carbon source {FIXED} needs a value in g/kWh")
    kind = options.kind or SignalKind.AVERAGE
    signal = CarbonSignal(options.zone, FIXED, kind, options.factor or EmissionFactor.LIFECYCLE)
    return Fixed(signal, checked_intensity(options.g_per_kwh, kind))


def make_csv(options: SourceOptions) -> CsvFile:
    """Return the source; it needs a path.

    Raises:
        CarbonDataError: there is none.
    """
    if options.path is None:
        raise CarbonDataError(f"carbon source {CSV} needs the path of a file")
    kind = options.kind or SignalKind.AVERAGE
    return CsvFile(CarbonSignal(options.zone, CSV, kind, options.factor or EmissionFactor.LIFECYCLE), options.path)
