"""Intensities given by the user: one constant, or a CSV file."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gpuenergyd.core.carbon.intensity import (
    HOUR,
    CarbonSignal,
    EmissionFactor,
    IntensitySample,
    SampleStatus,
    SignalKind,
)
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.rules.hourly_values import checked_intensity
from gpuenergyd_carbon.signal_file import CARBON_COLUMN, file_text, signal_rows
from gpuenergyd_carbon.sources.checking import RawValue, checked_reply
from gpuenergyd_carbon.sources.source import SourceOptions, SourceReply
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem

FIXED, CSV = "fixed", "csv"
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Fixed:
    """Constant intensity, used for accounting; it never changes a target."""

    signal: CarbonSignal
    g_per_kwh: float
    period_s: float = HOUR.total_seconds()

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the value for the current hour."""
        begin = now_at.replace(minute=0, second=0, microsecond=0)
        return SourceReply((IntensitySample(begin, begin + HOUR, self.g_per_kwh, SampleStatus.STATIC),))


@dataclass(frozen=True, slots=True)
class CsvFile:
    """Hourly rows `timestamp_utc,carbon_intensity_g_per_kwh`; future rows are a forecast."""

    signal: CarbonSignal
    path: Path
    period_s: float = 60.0

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the values in the file, or raise CarbonSourceError if the file cannot be read or a row is invalid."""
        return checked_reply(self.signal, self._values(now_at), now_at)

    def _values(self, now_at: datetime) -> list[RawValue]:
        try:
            text = file_text(self.path, _MAX_BYTES)
        except OSError as error:
            raise SourceError(SourceProblem.UNREACHABLE, f"{CSV}: {self.path}: {error.strerror}") from None
        except CarbonDataError as error:
            raise SourceError(SourceProblem.TOO_LARGE, f"{CSV}: {error}") from None
        try:
            rows = [*signal_rows(self.path, text, CARBON_COLUMN, is_checked=False)[1]]
        except CarbonDataError as error:
            raise SourceError(SourceProblem.NOT_PARSED, f"{CSV}: {error}") from None
        return [
            RawValue(at, at + HOUR, value, SampleStatus.FORECAST if at > now_at else SampleStatus.MEASURED)
            for _, at, value in rows
        ]


def make_fixed(options: SourceOptions) -> Fixed:
    """Return the source; requires a value."""
    if options.g_per_kwh is None:
        raise CarbonDataError(f"carbon source {FIXED} requires a value in g/kWh")
    kind = options.kind or SignalKind.AVERAGE
    signal = CarbonSignal(options.zone, FIXED, kind, options.factor or EmissionFactor.LIFECYCLE)
    return Fixed(signal, checked_intensity(options.g_per_kwh, kind))


def make_csv(options: SourceOptions) -> CsvFile:
    """Return the source; requires a path."""
    if options.path is None:
        raise CarbonDataError(f"carbon source {CSV} requires the path of a file")
    kind = options.kind or SignalKind.AVERAGE
    return CsvFile(CarbonSignal(options.zone, CSV, kind, options.factor or EmissionFactor.LIFECYCLE), options.path)
