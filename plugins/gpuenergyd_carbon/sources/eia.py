"""U.S. Energy Information Administration: hourly generation per fuel, converted as in `mix`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from gpuenergyd.core.carbon.intensity import HOUR, CarbonSignal, EmissionFactor, SignalKind
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.sources.checking import (
    HeldBack,
    RawValue,
    check_zone,
    checked_reply,
    checked_year,
    generated,
    part,
    rows,
)
from gpuenergyd_carbon.sources.mix import EIA_TYPES, Generation
from gpuenergyd_carbon.sources.source import SourceOptions, SourceReply
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem, Web

NAME = "eia"
HOST = "https://api.eia.gov/v2"
_HISTORY = timedelta(hours=48)


@dataclass(frozen=True, slots=True)
class Eia:
    """Generation of a balancing authority; the provider's times are the ends of hours."""

    web: Web
    key: str = field(repr=False)
    signal: CarbonSignal
    base_url: str = HOST
    period_s: float = HOUR.total_seconds()

    past_window: timedelta = timedelta(days=7)

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the published values of the last two days."""
        return checked_reply(self.signal, self._published(now_at - _HISTORY, now_at), now_at)

    def fetch_past(self, begin_at: datetime, end_at: datetime) -> SourceReply:
        """Return the published values of a past period; a reply holds 5,000 values: about a week for 29 fuels."""
        return checked_reply(self.signal, self._published(begin_at, end_at), end_at)

    def _published(self, begin_at: datetime, end_at: datetime) -> Iterator[RawValue | HeldBack | SourceError]:
        reply = self.web.get_json(
            NAME,
            f"{self.base_url}/electricity/rto/fuel-type-data/data/",
            parameters={
                "api_key": self.key,
                "frequency": "hourly",
                "data[0]": "value",
                "facets[respondent][]": self.signal.zone,
                "start": f"{begin_at:%Y-%m-%dT%H}",
                "end": f"{end_at:%Y-%m-%dT%H}",
                "sort[0][column]": "period",
                "sort[0][direction]": "desc",
                "offset": "0",
                "length": "5000",
            },
        )
        return self._values(reply)

    def _values(self, reply: Any) -> Iterator[RawValue | HeldBack | SourceError]:
        generation = Generation(NAME, EIA_TYPES)
        for row in rows(NAME, part(NAME, reply, "response"), "data"):
            try:
                self._add(generation, row)
            except SourceError as error:
                yield error
        yield from generation.values()

    def _add(self, generation: Generation, row: Any) -> None:
        """Add a row of the reply; a row whose value is null is skipped."""
        check_zone(NAME, self.signal.zone, part(NAME, row, "respondent"))
        unit = row.get("value-units", "megawatthours")
        if unit != "megawatthours":
            raise SourceError(SourceProblem.WRONG_UNIT, f"{NAME}: unit {unit!r:.40} is not megawatthours")
        end, plant, value = _hour(part(NAME, row, "period")), str(part(NAME, row, "fueltype")), part(NAME, row, "value")
        if value is not None:
            try:
                generation.add((end - HOUR, end), plant, generated(NAME, value, "megawatt hours"))
            except SourceError:
                generation.add_unreadable(plant)
                raise


def make(options: SourceOptions) -> Eia:
    """Return the source; requires a key."""
    if not options.key:
        raise CarbonDataError(f"carbon source {NAME} needs a key file")
    signal = CarbonSignal(options.zone, NAME, SignalKind.AVERAGE, EmissionFactor.LIFECYCLE)
    return Eia(options.web, options.key, signal, options.base_url or HOST)


def _hour(text: object) -> datetime:
    try:
        at = datetime.strptime(str(text), "%Y-%m-%dT%H").replace(tzinfo=UTC)
    except ValueError:
        raise SourceError(
            SourceProblem.NOT_PARSED, f"{NAME}: period {text!r:.40} is not an hour like 2026-01-31T12"
        ) from None
    return checked_year(NAME, at)
