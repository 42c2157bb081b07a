"""ENTSO-E transparency platform: Europe's generation per plant type, converted as in `mix`.

Production-based, without imports: levels differ from consumption-based sources.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from xml.etree import ElementTree as ET

from gpuenergyd.core.carbon.intensity import HOUR, CarbonSignal, EmissionFactor, SignalKind
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.sources.checking import HeldBack, RawValue, check_zone, checked_reply, generated, instant
from gpuenergyd_carbon.sources.mix import ENTSOE_TYPES, Generation
from gpuenergyd_carbon.sources.source import SourceOptions, SourceReply
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem, Web, refusal_sentence

NAME = "entsoe"
HOST = "https://web-api.tp.entsoe.eu/api"
AREAS = {
    "AT": "10YAT-APG------L",
    "BE": "10YBE----------2",
    "CH": "10YCH-SWISSGRIDZ",
    "CZ": "10YCZ-CEPS-----N",
    "DE": "10Y1001A1001A82H",
    "ES": "10YES-REE------0",
    "FI": "10YFI-1--------U",
    "FR": "10YFR-RTE------C",
    "NL": "10YNL----------L",
    "PL": "10YPL-AREA-----S",
    "PT": "10YPT-REN------W",
}
"""Energy identification codes (EIC) of bidding zones; a zone may also be given as its code."""
_CODE = re.compile(r"10Y[0-9A-Z-]{13}")
_RESOLUTION = re.compile(r"PT(15|30|60)M")
_HISTORY = timedelta(hours=30)
_MAX_POINTS = 7 * 96


@dataclass(frozen=True, slots=True)
class Entsoe:
    """Actual generation per type; values lag by hours and are revised."""

    web: Web
    key: str = field(repr=False)
    signal: CarbonSignal
    area: str
    base_url: str = HOST
    period_s: float = HOUR.total_seconds()

    past_window: timedelta = timedelta(days=7)

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the published values of the last 30 hours."""
        end = now_at.replace(minute=0, second=0, microsecond=0) + HOUR
        return checked_reply(self.signal, self._published(end - _HISTORY, end), now_at)

    def fetch_past(self, begin_at: datetime, end_at: datetime) -> SourceReply:
        """Return the published values of a past period of at most 7 days."""
        return checked_reply(self.signal, self._published(begin_at, end_at), end_at)

    def _published(self, begin_at: datetime, end_at: datetime) -> Iterator[RawValue | HeldBack | SourceError]:
        body = self.web.get(
            NAME,
            self.base_url,
            parameters={
                "securityToken": self.key,
                "documentType": "A75",
                "processType": "A16",
                "in_Domain": self.area,
                "periodStart": f"{begin_at:%Y%m%d%H%M}",
                "periodEnd": f"{end_at:%Y%m%d%H%M}",
            },
        )
        return _values(body, self.area)


def make(options: SourceOptions) -> Entsoe:
    """Return the source; requires a token and a known zone."""
    if not options.key:
        raise CarbonDataError(f"carbon source {NAME} needs a key file that holds the security token")
    area = options.zone if _CODE.fullmatch(options.zone) else AREAS.get(options.zone)
    if area is None:
        known = ", ".join(AREAS)
        raise CarbonDataError(
            f"carbon source {NAME}: zone {options.zone!r} is neither a 16-character EIC code nor one of {known}"
        )
    signal = CarbonSignal(options.zone, NAME, SignalKind.AVERAGE, EmissionFactor.LIFECYCLE)
    return Entsoe(options.web, options.key, signal, area, options.base_url or HOST)


def _values(body: bytes, area: str) -> Iterator[RawValue | HeldBack | SourceError]:
    generation = Generation(NAME, ENTSOE_TYPES)
    for series in _document(body).iter("TimeSeries"):
        domain = series.findtext("inBiddingZone_Domain.mRID")
        if domain is None:
            continue  # consumption of plants, such as pumping: not generation
        plant = series.findtext("MktPSRType/psrType") or ""
        try:
            check_zone(NAME, area, domain)
        except SourceError as error:
            yield error
            continue
        for period in series.iter("Period"):
            yield from _add_period(generation, plant, period)
    yield from generation.values()


def _document(body: bytes) -> ET.Element:
    """Return the root element with namespaces removed.

    Raises:
        SourceError: the reply is not XML, or states why there is no data.
    """
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        raise SourceError(SourceProblem.NOT_PARSED, f"{NAME}: reply contains a document type declaration")
    try:
        root = ET.fromstring(body)  # noqa: S314  entities, the reason for the rule, are rejected above
    except ET.ParseError:
        raise SourceError(SourceProblem.NOT_PARSED, f"{NAME}: reply is not XML") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if root.tag == "Acknowledgement_MarketDocument":
        raise SourceError(SourceProblem.EMPTY, f"{NAME}: {refusal_sentence(body) or 'no data'}")
    if root.tag != "GL_MarketDocument":
        raise SourceError(SourceProblem.NOT_PARSED, f"{NAME}: reply is a {root.tag[:40]}, not a GL_MarketDocument")
    return root


def _add_period(generation: Generation, plant: str, period: ET.Element) -> Iterator[SourceError]:
    """Add a period of a series; yield an error for each part of it that cannot be read."""
    try:
        begin, step, num_slots = _slots(period)
    except SourceError as error:
        generation.add_unreadable(plant)
        yield error
        return
    quantities: dict[int, float | None] = {}
    for point in period.iter("Point"):
        position = point.findtext("position") or ""
        try:
            quantities[int(position)] = None  # if the value cannot be read, the previous one must not be repeated
            quantities[int(position)] = generated(NAME, point.findtext("quantity"), "megawatts")
        except (SourceError, ValueError) as error:
            generation.add_unreadable(plant)
            text = f"{NAME}: position {position!r:.20} of a point is not a number"
            yield error if isinstance(error, SourceError) else SourceError(SourceProblem.NOT_PARSED, text)
    megawatts = None
    for number in range(1, num_slots + 1):
        megawatts = quantities.get(number, megawatts)  # a position that is left out repeats the previous value
        if megawatts is not None:
            generation.add((begin + (number - 1) * step, begin + number * step), plant, megawatts)


def _slots(period: ET.Element) -> tuple[datetime, timedelta, int]:
    """Return begin, length and number of the slots of a period."""
    begin = instant(NAME, period.findtext("timeInterval/start"))
    end = instant(NAME, period.findtext("timeInterval/end"))
    matched = _RESOLUTION.fullmatch(period.findtext("resolution") or "")
    if matched is None:
        raise SourceError(
            SourceProblem.NOT_PARSED,
            f"{NAME}: resolution {period.findtext('resolution')!r:.20} is unknown; expected PT15M, PT30M or PT60M",
        )
    step = timedelta(minutes=int(matched[1]))
    num_slots = (end - begin) // step
    if not 0 < num_slots <= _MAX_POINTS:
        raise SourceError(
            SourceProblem.NOT_PARSED, f"{NAME}: period of {count_text(num_slots, 'slot')}; expected 1 to {_MAX_POINTS}"
        )
    return begin, step, num_slots
