"""National Energy System Operator (NESO), Great Britain: half-hourly, no key. https://api.carbonintensity.org.uk."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from gpuenergyd.core.carbon.intensity import HOUR, CarbonSignal, EmissionFactor, SampleStatus, SignalKind
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.sources.checking import RawValue, checked_reply, instant, part, read_rows, rows
from gpuenergyd_carbon.sources.source import SourceOptions, SourceReply
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem, Web

NAME = "neso"
ZONE = "GB"
HOST = "https://api.carbonintensity.org.uk"
_SLOT = timedelta(minutes=30)
_SIGNAL = CarbonSignal(ZONE, NAME, SignalKind.AVERAGE, EmissionFactor.OPERATIONAL)


@dataclass(frozen=True, slots=True)
class Neso:
    """Intensities of Great Britain: generation, imports and losses, without life-cycle emissions."""

    web: Web
    base_url: str = HOST
    signal: CarbonSignal = _SIGNAL
    period_s: float = _SLOT.total_seconds()
    past_window: timedelta = timedelta(days=7)

    def fetch_past(self, begin_at: datetime, end_at: datetime) -> SourceReply:
        """Return the values of a past period of at most 14 days."""
        window = f"{begin_at:%Y-%m-%dT%H:%MZ}/{end_at:%Y-%m-%dT%H:%MZ}"
        return checked_reply(self.signal, self._values_of(window, end_at), end_at)

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the last 24 hours and a forecast of 48 hours."""
        slot = now_at.replace(minute=now_at.minute // 30 * 30, second=0, microsecond=0)
        stamp = f"{slot:%Y-%m-%dT%H:%MZ}"
        values = list(self._values_of(f"{stamp}/pt24h", now_at))
        try:
            values += self._values_of(f"{stamp}/fw48h", now_at)
        except SourceError as error:  # past values are still used if there is no forecast
            values.append(error.with_traceback(None))  # a traceback would keep the connection open
        return checked_reply(self.signal, values, now_at)

    def _values_of(self, window: str, now_at: datetime) -> Iterator[RawValue | SourceError]:
        reply = self.web.get_json(NAME, f"{self.base_url}/intensity/{window}")
        return read_rows(rows(NAME, reply, "data"), partial(_value, now_at))


def make(options: SourceOptions) -> Neso:
    """Return the source, which supports only zone GB."""
    if options.zone != ZONE:
        raise CarbonDataError(f"carbon source {NAME} supports only zone {ZONE}, got {options.zone!r}")
    return Neso(options.web, options.base_url or HOST)


def _value(now_at: datetime, row: Any) -> RawValue:
    begin, end = instant(NAME, part(NAME, row, "from")), instant(NAME, part(NAME, row, "to"))
    if not timedelta() < end - begin <= HOUR:
        raise SourceError(SourceProblem.BAD_VALUE, f"{NAME}: interval {begin} to {end} is not at most an hour")
    intensity = part(NAME, row, "intensity")
    actual, forecast = part(NAME, intensity, "actual"), part(NAME, intensity, "forecast")
    if actual is not None:
        return RawValue(begin, end, actual, SampleStatus.MEASURED)
    if begin > now_at:
        return RawValue(begin, end, forecast, SampleStatus.FORECAST)
    # The slot has begun but its value is not final, so the last forecast is the best estimate.
    return RawValue(begin, end, forecast, SampleStatus.ESTIMATED)
