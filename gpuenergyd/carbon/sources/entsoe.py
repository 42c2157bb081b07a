"""ENTSO-E transparency platform: Europe's generation per plant type, turned into intensities with our own factors.

Production-based: imports do not count, so levels differ from consumption-based sources.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from xml.etree import ElementTree as ET

from gpuenergyd.carbon.sources.checking import RawValue, check_zone, checked_reply, instant
from gpuenergyd.carbon.sources.mix import ENTSOE_FACTORS, mix_intensity
from gpuenergyd.carbon.sources.source import SourceOptions, SourceReply
from gpuenergyd.carbon.sources.web import Problem, SourceError, Web
from gpuenergyd.core.carbon.intensity import HOUR, CarbonSignal, EmissionFactor, SampleStatus, SignalKind
from gpuenergyd.errors import CarbonDataError

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
"""Energy identification codes of bidding zones; a zone may also be given as its code."""
_CODE = re.compile(r"10Y[0-9A-Z-]{13}")
_RESOLUTION = re.compile(r"PT(15|30|60)M")
_HISTORY = timedelta(hours=30)
_MAX_POINTS = 200


@dataclass(frozen=True, slots=True)
class Entsoe:
    """Actual generation per type; values lag by hours and are revised."""

    web: Web
    key: str = field(repr=False)
    signal: CarbonSignal
    area: str
    base_url: str = HOST
    period_s: float = HOUR.total_seconds()

    def fetch(self, now_at: datetime) -> SourceReply:
        """Return the last 30 hours as far as they are published.

        Raises:
            CarbonSourceError: nothing usable came.
        """
        end = now_at.replace(minute=0, second=0, microsecond=0) + HOUR
        body = self.web.get(
            NAME,
            self.base_url,
            parameters={
                "securityToken": self.key,
                "documentType": "A75",
                "processType": "A16",
                "in_Domain": self.area,
                "periodStart": f"{end - _HISTORY:%Y%m%d%H%M}",
                "periodEnd": f"{end:%Y%m%d%H%M}",
            },
        )
        return checked_reply(self.signal, _values(body, self.area), now_at)


def make(options: SourceOptions) -> Entsoe:
    """Return the source; it needs a token and a zone it knows.

    Raises:
        CarbonDataError: either is missing.
    """
    if not options.key:
        raise CarbonDataError(f"carbon source {NAME} needs a key file that holds the security token")
    area = options.zone if _CODE.fullmatch(options.zone) else AREAS.get(options.zone)
    if area is None:
        known = ", ".join(AREAS)
        raise CarbonDataError(
            f"carbon source {NAME}: zone {options.zone!r} is no 16-character code and none of {known}"
        )
    signal = CarbonSignal(options.zone, NAME, SignalKind.AVERAGE, EmissionFactor.LIFECYCLE)
    return Entsoe(options.web, options.key, signal, area, options.base_url or HOST)


def _values(body: bytes, area: str) -> Iterator[RawValue]:
    energy: dict[tuple[datetime, datetime], dict[str, float]] = {}
    for series in _document(body).iter("TimeSeries"):
        domain = series.findtext("inBiddingZone_Domain.mRID")
        if domain is None:
            continue  # consumption of plants, such as pumping: not generation
        check_zone(NAME, area, domain)
        plant = series.findtext("MktPSRType/psrType") or ""
        for period in series.iter("Period"):
            for begin, end, megawatts in _points(period):
                energy.setdefault((begin, end), {})
                energy[begin, end][plant] = energy[begin, end].get(plant, 0.0) + megawatts
    if energy:  # plant types are published one after the other: an hour with a few of them is no mix yet
        fullest = max(len(mix) for mix in energy.values())
        energy = {slot: mix for slot, mix in energy.items() if len(mix) * 2 > fullest}
    for (begin, end), mix in sorted(energy.items()):
        yield RawValue(begin, end, mix_intensity(mix, ENTSOE_FACTORS), SampleStatus.ESTIMATED)


def _document(body: bytes) -> ET.Element:
    """Return the root without namespaces.

    Raises:
        SourceError: no XML, or a reply that says why there is no data.
    """
    if b"<!DOCTYPE" in body or b"<!ENTITY" in body:
        raise SourceError(Problem.NOT_PARSED, f"{NAME}: reply is no generation document")
    try:
        root = ET.fromstring(body)  # noqa: S314  entities, the reason for the rule, were refused above
    except ET.ParseError:
        raise SourceError(Problem.NOT_PARSED, f"{NAME}: reply is no XML") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if root.tag == "Acknowledgement_MarketDocument":
        raise SourceError(Problem.EMPTY, f"{NAME}: {(root.findtext('Reason/text') or 'no data')[:80]}")
    if root.tag != "GL_MarketDocument":
        raise SourceError(Problem.NOT_PARSED, f"{NAME}: reply is a {root.tag[:40]}, not a GL_MarketDocument")
    return root


def _points(period: ET.Element) -> Iterator[tuple[datetime, datetime, float]]:
    """Yield every slot of a period; a position that is left out repeats the one before it."""
    begin = instant(NAME, period.findtext("timeInterval/start"))
    end = instant(NAME, period.findtext("timeInterval/end"))
    matched = _RESOLUTION.fullmatch(period.findtext("resolution") or "")
    if matched is None:
        raise SourceError(Problem.NOT_PARSED, f"{NAME}: resolution {period.findtext('resolution')!r:.20} is unknown")
    step = timedelta(minutes=int(matched[1]))
    num_slots = (end - begin) // step
    if not 0 < num_slots <= _MAX_POINTS:
        raise SourceError(Problem.NOT_PARSED, f"{NAME}: a period of {num_slots} slots makes no sense")
    given: dict[int, float] = {}
    for point in period.iter("Point"):
        try:
            given[int(point.findtext("position") or "")] = float(point.findtext("quantity") or "")
        except ValueError:
            raise SourceError(Problem.NOT_PARSED, f"{NAME}: a point has no position or no quantity") from None
    megawatts = None
    for number in range(1, num_slots + 1):
        megawatts = given.get(number, megawatts)
        if megawatts is not None:
            yield begin + (number - 1) * step, begin + number * step, megawatts
