"""What each provider is documented to send, as functions of the values and times a test wants in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from gpuenergyd_carbon.sources import eia, electricity_maps, entsoe, neso, watttime
from gpuenergyd_carbon.sources.source import CarbonSource, SourceFactory, SourceOptions
from gpuenergyd_carbon.sources.web import Web
from tests.plugins.carbon.sources.scripted_server import Asked, Reply, Script, json_reply

NOW_AT = datetime(2026, 5, 4, 12, 10, tzinfo=UTC)
HOUR_AT = NOW_AT.replace(minute=0)
SECRET = "user:s3cret-k3y"


@dataclass(frozen=True, slots=True)
class Documented:
    """A provider: how to make its source, and its reply when its newest interval has a value and begins at a time."""

    name: str
    zone: str
    make: SourceFactory
    reply: Callable[[Any, datetime], Reply]
    good: Any
    good_g_per_kwh: float
    needs_key: bool = True
    other_zone: Callable[[], Reply] | None = None

    def source(self, url: str, web: Web) -> CarbonSource:
        """Return the source at a local address."""
        return self.make(SourceOptions(self.zone, web, key=SECRET if self.needs_key else None, base_url=url))

    def script(self, reply: Reply) -> Script:
        """Return a script that sends a reply wherever data are asked for; logins succeed."""

        def answer(asked: Asked) -> Reply:
            return json_reply({"token": "t0k3n"}) if asked.path == "/login" else reply

        return answer


def neso_reply(value: Any, begin: datetime) -> Reply:
    row = {
        "from": f"{begin:%Y-%m-%dT%H:%MZ}",
        "to": f"{begin + timedelta(minutes=30):%Y-%m-%dT%H:%MZ}",
        "intensity": {"forecast": value, "actual": value, "index": "moderate"},
    }
    return json_reply({"data": [row]})


def electricity_maps_reply(value: Any, begin: datetime, *, zone: str = "DE", estimated: bool = False) -> Reply:
    entry = {
        "zone": zone,
        "carbonIntensity": value,
        "datetime": f"{begin:%Y-%m-%dT%H:%M:%S.000Z}",
        "updatedAt": "2026-05-04T11:59:00.000Z",
        "createdAt": "2026-05-01T11:59:00.000Z",
        "emissionFactorType": "lifecycle",
        "isEstimated": estimated,
        "estimationMethod": "TIME_SLICER_AVERAGE" if estimated else None,
    }
    return json_reply({"zone": zone, "history": [entry], "data": [entry]})


def electricity_maps_v4_reply(
    value: Any, begin: datetime, *, zone: str = "DE", granularity: str = "hourly", key: str = "data"
) -> Reply:
    """As v4 answers its other clients; the service documents it to customers only."""
    entry = {
        "carbonIntensity": value,
        "datetime": f"{begin:%Y-%m-%dT%H:%M:%S.000Z}",
        "updatedAt": "2026-05-04T11:59:00.000Z",
        "isEstimated": False,
        "estimationMethod": None,
        "temporalGranularity": granularity,
    }
    return json_reply({"zone": zone, "temporalGranularity": granularity, key: [entry]})


def watttime_reply(
    value: Any, begin: datetime, *, region: str = "CAISO_NORTH", units: str = "lbs_co2_per_mwh"
) -> Reply:
    meta = {
        "region": region,
        "signal_type": "co2_moer",
        "units": units,
        "data_point_period_seconds": 300,
        "generated_at": "2026-05-04T12:05:00+00:00",
        "warnings": [],
    }
    return json_reply({"data": [{"point_time": f"{begin:%Y-%m-%dT%H:%M:%S+00:00}", "value": value}], "meta": meta})


def entsoe_document(
    quantities: Mapping[str, Any], begin: datetime, *, area: str = entsoe.AREAS["FR"], resolution: str = "PT60M"
) -> Reply:
    series = "".join(
        f"<TimeSeries><inBiddingZone_Domain.mRID codingScheme='A01'>{area}</inBiddingZone_Domain.mRID>"
        f"<curveType>A03</curveType><MktPSRType><psrType>{plant}</psrType></MktPSRType>"
        f"<Period><timeInterval><start>{begin:%Y-%m-%dT%H:%MZ}</start>"
        f"<end>{begin + timedelta(hours=1):%Y-%m-%dT%H:%MZ}</end></timeInterval><resolution>{resolution}</resolution>"
        f"<Point><position>1</position><quantity>{quantity}</quantity></Point></Period></TimeSeries>"
        for plant, quantity in quantities.items()
    )
    namespace = "urn:iec62325.351:tc57wg16:451-6:generationloaddocument:3:0"
    return Reply(f'<?xml version="1.0"?><GL_MarketDocument xmlns="{namespace}">{series}</GL_MarketDocument>'.encode())


def entsoe_reply(value: Any, begin: datetime) -> Reply:
    return entsoe_document({"B14": value, "B04": value}, begin)


def eia_reply(value: Any, begin: datetime, *, respondent: str = "CISO", unit: str = "megawatthours") -> Reply:
    end = begin + timedelta(hours=1)
    rows = [
        {
            "period": f"{end:%Y-%m-%dT%H}",
            "respondent": respondent,
            "fueltype": fuel,
            "value": value,
            "value-units": unit,
        }
        for fuel in ("NG", "SUN")
    ]
    return json_reply({"response": {"total": len(rows), "data": rows}, "request": {}})


NESO = Documented("neso", "GB", neso.make, neso_reply, 263, 263.0, needs_key=False)
ELECTRICITY_MAPS = Documented(
    "electricity-maps",
    "DE",
    electricity_maps.make,
    electricity_maps_reply,
    302,
    302.0,
    other_zone=lambda: electricity_maps_reply(302, HOUR_AT, zone="FR"),
)
WATTTIME = Documented(
    "watttime",
    "CAISO_NORTH",
    watttime.make,
    watttime_reply,
    1000.0,
    453.59237,
    other_zone=lambda: watttime_reply(1000.0, HOUR_AT, region="PJM_DC"),
)
ENTSOE = Documented(
    "entsoe",
    "FR",
    entsoe.make,
    entsoe_reply,
    1000,
    (12.0 + 490.0) / 2,
    other_zone=lambda: entsoe_document({"B14": 1000}, HOUR_AT, area=entsoe.AREAS["ES"]),
)
EIA = Documented(
    "eia",
    "CISO",
    eia.make,
    eia_reply,
    "1000",
    (490.0 + 45.0) / 2,
    other_zone=lambda: eia_reply("1000", HOUR_AT, respondent="PJM"),
)
PROVIDERS = (NESO, ELECTRICITY_MAPS, WATTTIME, ENTSOE, EIA)
