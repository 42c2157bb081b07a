"""National Energy System Operator (NESO), Great Britain: half-hourly, no key. https://api.carbonintensity.org.uk."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from gpuenergyd.carbon.sources.checking import RawValue, checked_reply, instant, part, rows
from gpuenergyd.carbon.sources.source import SourceOptions, SourceReply
from gpuenergyd.carbon.sources.web import Web
from gpuenergyd.core.carbon.intensity import CarbonSignal, EmissionFactor, SampleStatus, SignalKind
from gpuenergyd.errors import CarbonDataError

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
        reply = self.web.get_json(
            NAME, f"{self.base_url}/intensity/{begin_at:%Y-%m-%dT%H:%MZ}/{end_at:%Y-%m-%dT%H:%MZ}"
        )
        return checked_reply(self.signal, _values(reply, end_at), end_at)

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the last 24 hours and a forecast of 48 hours."""
        slot = now_at.replace(minute=now_at.minute // 30 * 30, second=0, microsecond=0)
        stamp = f"{slot:%Y-%m-%dT%H:%MZ}"
        values: list[RawValue] = []
        for window in ("pt24h", "fw48h"):
            reply = self.web.get_json(NAME, f"{self.base_url}/intensity/{stamp}/{window}")
            values += _values(reply, now_at)
        return checked_reply(self.signal, values, now_at)


def make(options: SourceOptions) -> Neso:
    """Return the source; only for zone GB."""
    if options.zone != ZONE:
        raise CarbonDataError(f"carbon source {NAME} supports only zone {ZONE}, got {options.zone!r}")
    return Neso(options.web, options.base_url or HOST)


def _values(reply: Any, now_at: datetime) -> Iterator[RawValue]:
    for row in rows(NAME, reply, "data"):
        begin, end = instant(NAME, part(NAME, row, "from")), instant(NAME, part(NAME, row, "to"))
        intensity = part(NAME, row, "intensity")
        actual, forecast = part(NAME, intensity, "actual"), part(NAME, intensity, "forecast")
        if actual is not None:
            yield RawValue(begin, end, actual, SampleStatus.MEASURED)
        elif begin > now_at:
            yield RawValue(begin, end, forecast, SampleStatus.FORECAST)
        else:  # the slot has begun, but its value is not settled: the last forecast is the best estimate
            yield RawValue(begin, end, forecast, SampleStatus.ESTIMATED)
