"""Intensities of generation mixes: storage, unknown plant types, incomplete hours, and series of different lengths."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd_carbon.sources import entsoe
from gpuenergyd_carbon.sources.mix import BIOMASS, COAL, GAS, GEOTHERMAL, HYDRO, NUCLEAR, SOLAR, WIND
from gpuenergyd_carbon.sources.source import SourceReply
from gpuenergyd_carbon.sources.web import SourceError, Web
from tests.plugins.carbon.sources.documented import EIA, ENTSOE, HOUR_AT, NOW_AT
from tests.plugins.carbon.sources.scripted_server import Reply, json_reply, serving

AREA = entsoe.AREAS["FR"]


class ReplyOnce(Web):
    """Returns one body for every address."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        object.__setattr__(self, "body", body)

    def get(self, *_: Any, **__: Any) -> bytes:
        return self.body  # type: ignore[attr-defined,no-any-return]  # set in __init__


def eia_hours(hours: Sequence[Mapping[str, Any]]) -> Reply:
    """Return a reply with these mixes; the last one is that of the hour before `HOUR_AT`."""
    rows = [
        {
            "period": f"{HOUR_AT - timedelta(hours=len(hours) - 1 - k):%Y-%m-%dT%H}",
            "respondent": "CISO",
            "fueltype": fuel,
            "value": value,
            "value-units": "megawatthours",
        }
        for k, mix in enumerate(hours)
        for fuel, value in mix.items()
    ]
    return json_reply({"response": {"data": rows}})


def fetch_eia(*hours: Mapping[str, Any]) -> SourceReply:
    return EIA.source("http://eia", ReplyOnce(eia_hours(hours).body)).fetch(NOW_AT)


def entsoe_series(plant: str, quantities: Sequence[Any], minutes: int, *, direction: str = "in") -> str:
    end = HOUR_AT
    begin = end - len(quantities) * timedelta(minutes=minutes)
    points = "".join(
        f"<Point><position>{k}</position><quantity>{escape(str(q))}</quantity></Point>"
        for k, q in enumerate(quantities, start=1)
    )
    domain = f"{direction}BiddingZone_Domain.mRID"
    return (
        f"<TimeSeries><{domain}>{AREA}</{domain}><MktPSRType><psrType>{escape(plant)}</psrType></MktPSRType>"
        f"<Period><timeInterval><start>{begin:%Y-%m-%dT%H:%MZ}</start><end>{end:%Y-%m-%dT%H:%MZ}</end></timeInterval>"
        f"<resolution>PT{minutes}M</resolution>{points}</Period></TimeSeries>"
    )


def fetch_entsoe(*series: str) -> SourceReply:
    body = f"<GL_MarketDocument>{''.join(series)}</GL_MarketDocument>".encode()
    return ENTSOE.source("http://entsoe", ReplyOnce(body)).fetch(NOW_AT)


def intensities(reply: SourceReply) -> list[float]:
    return [sample.carbon_intensity_g_per_kwh for sample in reply.samples]


@pytest.mark.fault(57)
@pytest.mark.parametrize("code", ["BAT", "PS", "OES", "UES"])
def test_storage_is_not_generation(code: str) -> None:
    assert intensities(fetch_eia({"NG": 600, "SUN": 400, code: 900})) == [pytest.approx(0.6 * GAS + 0.4 * SOLAR)]


@pytest.mark.fault(57)
@pytest.mark.parametrize("code", ["B10", "B25"])
def test_storage_is_not_generation_in_europe(code: str) -> None:
    reply = fetch_entsoe(entsoe_series("B14", [300], 60), entsoe_series(code, [500], 60))

    assert intensities(reply) == [NUCLEAR]


@pytest.mark.parametrize(("code", "factor"), [("GEO", GEOTHERMAL), ("SNB", SOLAR), ("WNB", WIND)])
def test_each_listed_plant_type_has_its_factor(code: str, factor: float) -> None:
    assert intensities(fetch_eia({"NUC": 500, code: 500})) == [(NUCLEAR + factor) / 2]


@pytest.mark.fault(57)
@pytest.mark.parametrize("code", ["UNK", "XYZ", ""])
def test_a_little_of_an_unknown_plant_type_is_named_and_not_counted(code: str) -> None:
    reply = fetch_eia({"NG": 970, code: 30})

    assert intensities(reply) == [GAS]
    assert reply.rejected == (f"eia: plant types of unknown intensity are not counted: {code!r}",)


@pytest.mark.fault(57)
def test_an_hour_with_much_of_an_unknown_plant_type_is_held_back() -> None:
    reply = fetch_eia({"NG": 900, "WND": 100}, {"NG": 500, "WND": 100, "NEW": 400})
    with pytest.raises(SourceError, match="'NEW'"):
        fetch_eia({"NG": 500, "NEW": 500})

    assert intensities(reply) == [pytest.approx(0.9 * GAS + 0.1 * WIND)]


@pytest.mark.fault(57)
@pytest.mark.parametrize(
    "newest", [{"COL": 300}, {"COL": 300, "NG": None, "WAT": 5200}, {"COL": 300, "NG": "x"}], ids=str
)
def test_an_hour_without_a_fuel_that_matters_is_held_back(newest: dict[str, Any]) -> None:
    mix = {"COL": 300, "WAT": 5200, "NG": 1400}

    assert intensities(fetch_eia(mix, newest)) == [pytest.approx((300 * COAL + 5200 * HYDRO + 1400 * GAS) / 6900)]


def test_a_fuel_that_does_not_matter_may_be_missing() -> None:
    assert len(fetch_eia({"NG": 1000, "OIL": 2}, {"NG": 1000}).samples) == 2


def test_a_night_without_solar_is_complete() -> None:
    day = [{"NUC": 1000, "SUN": sun} for sun in (900, 400, 20)]

    reply = fetch_eia(*day, *[{"NUC": 1000}] * 8, *day[::-1])

    assert len(reply.samples) == 14
    assert reply.rejected == ()


@pytest.mark.fault(57)
def test_a_fuel_of_which_nothing_can_be_read_leaves_no_hour_complete() -> None:
    with pytest.raises(SourceError, match="generation 'many' is not a number"):
        fetch_eia({"NG": "many", "WND": 100}, {"NG": 1e9, "WND": 100})


def test_one_row_that_cannot_be_read_costs_its_hour_only() -> None:
    reply = fetch_eia({"NG": 1000, "WND": 1000}, {"NG": "?", "WND": 1000}, {"NG": 1000, "WND": 1000})

    assert [sample.valid_to_at for sample in reply.samples] == [HOUR_AT - timedelta(hours=2), HOUR_AT]
    assert reply.rejected == ("eia: generation '?' is not a number of megawatt hours in range",)


@pytest.mark.fault(57)
def test_series_of_different_lengths_are_mixed_on_the_finest() -> None:
    quarters = [1000, 2000, 3000, 2000]
    reply = fetch_entsoe(entsoe_series("B14", [4000], 60), entsoe_series("B04", quarters, 15))

    assert intensities(reply) == [pytest.approx((4000 * NUCLEAR + q * GAS) / (4000 + q)) for q in quarters]
    assert {sample.valid_to_at - sample.valid_from_at for sample in reply.samples} == {timedelta(minutes=15)}


def test_a_point_that_cannot_be_read_is_not_the_one_before() -> None:
    reply = fetch_entsoe(entsoe_series("B14", [4000] * 4, 15), entsoe_series("B01", [400, "n/a", 400, 400], 15))

    assert len(reply.samples) == 3
    assert intensities(reply) == [pytest.approx((4000 * NUCLEAR + 400 * BIOMASS) / 4400)] * 3
    assert len(reply.rejected) == 1


def test_a_period_that_cannot_be_read_holds_back_what_it_was_for() -> None:
    broken = entsoe_series("B04", [400], 60).replace("PT60M", "P1Y")
    with pytest.raises(SourceError, match="resolution 'P1Y' is unknown"):
        fetch_entsoe(entsoe_series("B14", [4000], 60), broken)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
eia_rows = st.fixed_dictionaries(
    {
        "period": st.sampled_from([f"{HOUR_AT - timedelta(hours=k):%Y-%m-%dT%H}" for k in range(4)]) | json_values,
        "respondent": st.just("CISO") | json_values,
        "fueltype": st.sampled_from(["NG", "SUN", "BAT", "UNK", "ZZZ"]) | json_values,
        "value": st.integers(-10, 2000) | json_values,
    },
    optional={"value-units": st.just("megawatthours") | json_values},
)


def check_outcome(body: bytes, *, is_eia: bool) -> None:
    """Check that a reply gives values of known plant types, or a refusal with a reason."""
    provider = EIA if is_eia else ENTSOE
    reason, found = "", [SOLAR]
    try:
        found = intensities(provider.source("http://provider", ReplyOnce(body)).fetch(NOW_AT))
    except SourceError as error:
        reason = str(error)
    assert not reason or reason.startswith(provider.name)
    assert all(SOLAR <= value <= GAS for value in found)


@pytest.mark.fault(23)
@given(st.lists(eia_rows | json_values, max_size=12))
def test_any_rows_give_values_of_known_plants_or_a_reason(rows: list[Any]) -> None:
    check_outcome(json.dumps({"response": {"data": rows}}).encode(), is_eia=True)


def instants(hours: int) -> st.SearchStrategy[str]:
    at: datetime = HOUR_AT + timedelta(hours=hours)
    return st.sampled_from([f"{at:%Y-%m-%dT%H:%MZ}"]) | st.text("0123456789-T:Z", max_size=18)


@st.composite
def entsoe_texts(draw: st.DrawFn) -> str:
    points = draw(
        st.lists(st.tuples(st.integers(-2, 9) | st.text(max_size=3), st.integers(-9, 99) | st.text(max_size=4)))
    )
    written = "".join(
        f"<Point><position>{escape(str(p))}</position><quantity>{escape(str(q))}</quantity></Point>" for p, q in points
    )
    plant = draw(st.sampled_from(["B04", "B16", "B25", "B99"]))
    resolution = draw(st.sampled_from(["PT15M", "PT60M", "P1D"]))
    zone = draw(st.sampled_from([AREA, AREA, "10Y"]))
    return (
        f"<TimeSeries><inBiddingZone_Domain.mRID>{zone}</inBiddingZone_Domain.mRID>"
        f"<MktPSRType><psrType>{plant}</psrType></MktPSRType><Period><timeInterval><start>{draw(instants(-2))}</start>"
        f"<end>{draw(instants(0))}</end></timeInterval><resolution>{resolution}</resolution>{written}</Period></TimeSeries>"
    )


@pytest.mark.fault(23)
@given(st.lists(entsoe_texts(), max_size=4))
def test_any_document_gives_values_of_known_plants_or_a_reason(series: list[str]) -> None:
    text = "".join(c for c in "".join(series) if c.isprintable())
    check_outcome(f"<GL_MarketDocument>{text}</GL_MarketDocument>".encode(), is_eia=False)


def test_the_reply_is_read_from_the_network_as_it_is_here() -> None:
    with serving(EIA.script(eia_hours([{"NG": 1}]))) as server:
        assert intensities(EIA.source(server.url, Web()).fetch(NOW_AT)) == [GAS]
