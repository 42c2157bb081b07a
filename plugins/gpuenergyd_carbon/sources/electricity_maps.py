"""Electricity Maps v3 and v4: hourly, most of the world; a free key includes 24 hours of one zone, no forecast.

The base URL selects the version. Both have the same endpoints and fields; v4 also offers shorter intervals, so hourly
values are requested explicitly. Replies of v4 are known only from other clients, with lists `history` or `data`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from gpuenergyd.core.carbon.intensity import HOUR, CarbonSignal, EmissionFactor, SampleStatus, SignalKind
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.sources.checking import RawValue, check_zone, checked_reply, instant, part, read_rows, rows
from gpuenergyd_carbon.sources.source import SourceOptions, SourceReply
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem, Web

NAME = "electricity-maps"
HOST = "https://api.electricitymaps.com/v3"
_SANDBOX = "sandbox"
_MADE_UP = f"{NAME}: the key is a sandbox key, whose values are made up: use a key of the service itself"


@dataclass(frozen=True, slots=True)
class ElectricityMaps:
    """Consumption-based intensities; the zone is always sent, as the service would else derive it from our address."""

    web: Web
    key: str
    signal: CarbonSignal
    base_url: str = HOST
    period_s: float = HOUR.total_seconds()

    past_window: timedelta = timedelta(days=7)

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the last 24 hours, so that hourly calls also fill gaps and replace estimates."""
        reply = self._ask("history", {})
        return checked_reply(self.signal, self._values(_rows(reply, "history")), now_at)

    def fetch_past(self, begin_at: datetime, end_at: datetime) -> SourceReply:
        """Return the values of a past period of at most 10 days, if the plan of the key includes them."""
        window = {"start": f"{begin_at:%Y-%m-%dT%H:%MZ}", "end": f"{end_at:%Y-%m-%dT%H:%MZ}"}
        reply = self._ask("past-range", window)
        return checked_reply(self.signal, self._values(_rows(reply, "data")), end_at)

    def _ask(self, what: str, window: Mapping[str, str]) -> Any:
        reply = self.web.get_json(
            NAME,
            f"{self.base_url}/carbon-intensity/{what}",
            parameters={
                "zone": self.signal.zone,
                "emissionFactorType": self.signal.factor.value,
                "disableCallerLookup": "true",
                "temporalGranularity": "hourly",
                **window,
            },
            headers={"auth-token": self.key},
        )
        check_zone(NAME, self.signal.zone, part(NAME, reply, "zone"))
        if _SANDBOX in str(reply.get("_disclaimer")).lower():
            raise SourceError(SourceProblem.SANDBOX, _MADE_UP)
        return reply

    def _values(self, history: Sequence[Any]) -> Iterator[RawValue | SourceError]:
        return read_rows(history, self._value)

    def _value(self, row: Any) -> RawValue:
        begin = instant(NAME, part(NAME, row, "datetime"))
        check_zone(NAME, self.signal.zone, row.get("zone", self.signal.zone))
        if _SANDBOX in str(row.get("estimationMethod")).lower():
            raise SourceError(SourceProblem.SANDBOX, _MADE_UP)
        factor = row.get("emissionFactorType", self.signal.factor.value)
        if factor != self.signal.factor.value:
            asked = self.signal.factor.value
            raise SourceError(SourceProblem.WRONG_UNIT, f"{NAME}: requested {asked} factors, got {factor!r:.40}")
        granularity = row.get("temporalGranularity", "hourly")
        if granularity != "hourly":
            raise SourceError(SourceProblem.WRONG_UNIT, f"{NAME}: requested hours, got {granularity!r:.40}")
        status = SampleStatus.ESTIMATED if row.get("isEstimated", True) else SampleStatus.MEASURED
        return RawValue(begin, begin + HOUR, row.get("carbonIntensity"), status)


def _rows(reply: Any, key: str) -> Sequence[Any]:
    """Return the list in a reply, under its usual key or the key that the other version or endpoint uses."""
    other = {"history": "data", "data": "history"}[key]
    is_other = isinstance(reply, Mapping) and key not in reply and other in reply
    return rows(NAME, reply, other if is_other else key)


def make(options: SourceOptions) -> ElectricityMaps:
    """Return the source; requires a key."""
    if not options.key:
        raise CarbonDataError(f"carbon source {NAME} needs a key file")
    if options.kind is SignalKind.MARGINAL or options.factor is EmissionFactor.OPERATIONAL:
        raise CarbonDataError(f"carbon source {NAME} offers average values, lifecycle or direct")
    signal = CarbonSignal(options.zone, NAME, SignalKind.AVERAGE, options.factor or EmissionFactor.LIFECYCLE)
    return ElectricityMaps(options.web, options.key, signal, options.base_url or HOST)
