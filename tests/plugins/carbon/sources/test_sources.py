"""Carbon sources: documented replies give values, all others give errors, and no message contains a key."""

import json
import socket
from datetime import timedelta
from typing import Any

import pytest

from gpuenergyd.core.carbon.intensity import EmissionFactor, SampleStatus, SignalKind
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.sources import entsoe
from gpuenergyd_carbon.sources.checking import instant, rows
from gpuenergyd_carbon.sources.source import (
    CarbonSource,
    PastSource,
    SourceOptions,
    default_source_name,
    make_source,
    source_names,
)
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem, Web, WebLimits
from tests.plugins.carbon.sources.documented import (
    EIA,
    ELECTRICITY_MAPS,
    ENTSOE,
    HOUR_AT,
    NESO,
    NOW_AT,
    PROVIDERS,
    SECRET,
    WATTTIME,
    Documented,
    electricity_maps_reply,
    electricity_maps_v4_reply,
    entsoe_document,
    watttime_reply,
)
from tests.plugins.carbon.sources.scripted_server import Asked, Reply, json_reply, serving

every_provider = pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p.name)


class Pauses:
    """Counts pauses instead of taking them."""

    def __init__(self) -> None:
        self.taken_s: list[float] = []

    def __call__(self, pause_s: float) -> None:
        """Take a pause in no time."""
        self.taken_s.append(pause_s)


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@pytest.fixture
def web(pauses: Pauses) -> Web:
    limits = WebLimits(connect_s=5.0, read_s=5.0, total_s=60.0, size_bytes=1_000_000)
    return Web(limits, pause=pauses, jitter=lambda: 0.5)


def failure(source: CarbonSource) -> SourceError:
    """Return how a fetch fails; the message never holds the key or the address's query."""
    with pytest.raises(SourceError) as caught:
        source.fetch(NOW_AT)
    assert "s3cret" not in str(caught.value)
    assert "?" not in str(caught.value)
    return caught.value


@every_provider
def test_a_documented_reply_gives_its_value_in_g_per_kwh(provider: Documented, web: Web) -> None:
    with serving(provider.script(provider.reply(provider.good, HOUR_AT))) as server:
        reply = provider.source(server.url, web).fetch(NOW_AT)

    assert reply.samples[-1].carbon_intensity_g_per_kwh == pytest.approx(provider.good_g_per_kwh)
    assert reply.samples[-1].valid_from_at == HOUR_AT
    assert not reply.is_stale
    assert reply.rejected == ()


@every_provider
def test_a_past_week_is_asked_for_by_its_begin_and_end(provider: Documented, web: Web) -> None:
    begin_at, end_at = HOUR_AT - timedelta(days=14), HOUR_AT - timedelta(days=7)
    with serving(provider.script(provider.reply(provider.good, end_at - timedelta(hours=1)))) as server:
        source = provider.source(server.url, web)
        assert isinstance(source, PastSource)
        reply = source.fetch_past(begin_at, end_at)

    asked = f"{server.asked[-1].path} {server.asked[-1].query}".replace("-", "")
    assert f"{begin_at:%Y%m%d}" in asked
    assert f"{end_at:%Y%m%d}" in asked
    assert source.past_window <= timedelta(days=10)
    assert reply.samples[-1].valid_from_at == end_at - timedelta(hours=1)
    assert reply.samples[-1].carbon_intensity_g_per_kwh == pytest.approx(provider.good_g_per_kwh)


@pytest.mark.fault(23)
@every_provider
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", SourceProblem.NOT_PARSED),
        (b"<html><body>Service unavailable</body></html>", SourceProblem.NOT_PARSED),
        (b"null", SourceProblem.NOT_PARSED),
        (b"{}", SourceProblem.NOT_PARSED),
        (b"[]", SourceProblem.NOT_PARSED),
        (b'{"data": NaN}', SourceProblem.NOT_PARSED),
        (b"\xff\xfe\x00", SourceProblem.NOT_PARSED),
        (b"[" * 100_000, SourceProblem.NOT_PARSED),
    ],
    ids=["nothing", "html", "null", "empty-object", "list", "nan", "binary", "deep"],
)
def test_an_undocumented_reply_is_reported_with_its_problem(
    provider: Documented, web: Web, body: bytes, problem: SourceProblem
) -> None:
    with serving(provider.script(Reply(body))) as server:
        assert failure(provider.source(server.url, web)).problem is problem


@pytest.mark.fault(23)
@every_provider
@pytest.mark.parametrize("value", [-5, 10**9, float("nan"), "abc", [], True], ids=str)
def test_an_out_of_range_value_is_rejected(provider: Documented, web: Web, value: object) -> None:
    if provider in (ENTSOE, EIA) and value in (-5, True):
        pytest.skip("negative generation is pumping: it counts as none, and XML has no booleans")
    with serving(provider.script(provider.reply(value, HOUR_AT))) as server:
        problem = failure(provider.source(server.url, web)).problem

    assert problem in {SourceProblem.BAD_VALUE, SourceProblem.NOT_PARSED}


@pytest.mark.parametrize("provider", [NESO, ELECTRICITY_MAPS, WATTTIME], ids=lambda p: p.name)
def test_a_null_value_is_never_zero(provider: Documented, web: Web) -> None:
    with serving(provider.script(provider.reply(None, HOUR_AT))) as server:
        assert failure(provider.source(server.url, web)).problem is SourceProblem.BAD_VALUE


@pytest.mark.fault(23)
@pytest.mark.parametrize("provider", [p for p in PROVIDERS if p.other_zone is not None], ids=lambda p: p.name)
def test_a_reply_for_another_zone_is_rejected(provider: Documented, web: Web) -> None:
    assert provider.other_zone is not None
    with serving(provider.script(provider.other_zone())) as server:
        assert failure(provider.source(server.url, web)).problem is SourceProblem.WRONG_ZONE


@every_provider
@pytest.mark.parametrize(
    ("status", "problem", "num_asked"),
    [
        (401, SourceProblem.UNAUTHORIZED, 1),
        (403, SourceProblem.FORBIDDEN, 1),
        (404, SourceProblem.NOT_FOUND, 1),
        (418, SourceProblem.BAD_STATUS, 1),
        (500, SourceProblem.SERVER_ERROR, 3),
        (503, SourceProblem.SERVER_ERROR, 3),
    ],
)
def test_each_status_has_its_problem_and_only_temporary_ones_are_retried(
    provider: Documented, web: Web, status: int, problem: SourceProblem, num_asked: int
) -> None:
    with serving(provider.script(Reply(b'{"error":"x"}', status))) as server:
        found = failure(provider.source(server.url, web))
        asked = [one for one in server.asked if one.path != "/login"]

    assert found.problem is problem
    assert len(asked) == num_asked


@pytest.mark.fault(25)
@every_provider
def test_retry_after_is_honoured_and_a_long_one_is_passed_on(provider: Documented, web: Web, pauses: Pauses) -> None:
    with serving(provider.script(Reply(b"", 429, (("Retry-After", "5"),)))) as server:
        short = failure(provider.source(server.url, web))
    with serving(provider.script(Reply(b"", 429, (("Retry-After", "900"),)))) as server:
        long = failure(provider.source(server.url, web))
        asked = [one for one in server.asked if one.path != "/login"]

    assert short.problem is long.problem is SourceProblem.RATE_LIMITED
    assert pauses.taken_s == [5.0, 5.0]
    assert len(asked) == 1
    assert long.retry_after_s == 900.0


@pytest.mark.fault(25)
@every_provider
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"error": "Bad Request", "message": "Invalid region: ATLANTIS"}', "Invalid region: ATLANTIS"),
        (b'{"status":"error","message":"Request unauthorized for zoneKey=FR"}', "Request unauthorized for zoneKey=FR"),
        (b'{"error": {"code": "API_KEY_INVALID", "message": "No such key."}}', "No such key."),
        (b'{"errors": [{"detail": "one\\n\\u001b[2J\\u202etwo"}]}', r"one \x1b[2J\u202etwo"),
        (b"Forbidden\r\nfor now", "Forbidden for now"),
        (
            b"<a:Doc xmlns:a='b'><a:Reason><a:text>No data &amp; none later</a:text></a:Reason></a:Doc>",
            "No data & none",
        ),
    ],
)
def test_a_refusal_shows_the_providers_own_sentence(provider: Documented, web: Web, body: bytes, sentence: str) -> None:
    with serving(provider.script(Reply(body, 400))) as server:
        found = failure(provider.source(server.url, web))

    assert found.problem is SourceProblem.BAD_STATUS
    assert f"{provider.name}: HTTP 400: " in str(found)
    assert sentence in str(found)
    assert str(found).isprintable()


@pytest.mark.parametrize("provider", [ELECTRICITY_MAPS, ENTSOE, EIA], ids=lambda p: p.name)
def test_a_sentence_that_repeats_the_key_is_shown_without_it(provider: Documented, web: Web) -> None:
    with serving(provider.script(Reply(b'{"message": "key user:s3cret-k3y is unknown"}', 403))) as server:
        assert str(failure(provider.source(server.url, web))).endswith("HTTP 403: key *** is unknown")


@every_provider
@pytest.mark.parametrize("body", [b"", b"{}", b"[[[[[1]]]]]", b"<html><title>401</title></html>", b"\xff" * 9999])
def test_without_a_sentence_no_reason_is_made_up(provider: Documented, web: Web, body: bytes) -> None:
    with serving(provider.script(Reply(body, 401))) as server:
        text = str(failure(provider.source(server.url, web)))

    assert "key was rejected" not in text
    assert len(text) < 200


@pytest.mark.fault(25)
@pytest.mark.parametrize("provider", [NESO, WATTTIME], ids=lambda p: p.name)
def test_a_failed_forecast_does_not_discard_the_past(provider: Documented, web: Web) -> None:
    good = provider.script(provider.reply(provider.good, HOUR_AT))

    def script(asked: Asked) -> Reply:
        is_forecast = "forecast" in asked.path or asked.path.endswith("fw48h")
        return Reply(b'{"message": "Requested resource not found."}', 400) if is_forecast else good(asked)

    with serving(script) as server:
        reply = provider.source(server.url, web).fetch(NOW_AT)

    assert reply.samples[-1].carbon_intensity_g_per_kwh == pytest.approx(provider.good_g_per_kwh)
    assert reply.rejected == (f"{provider.name}: HTTP 400: Requested resource not found.",)


@pytest.mark.fault(23)
@pytest.mark.parametrize("bad", [{}, None, {"datetime": "9999-12-31T23:00:00.000Z", "carbonIntensity": 1}], ids=str)
def test_one_row_that_cannot_be_read_does_not_discard_the_reply(web: Web, bad: Any) -> None:
    good = json.loads(ELECTRICITY_MAPS.reply(302, HOUR_AT).body)
    good["history"].append(bad)
    with serving(ELECTRICITY_MAPS.script(json_reply(good))) as server:
        reply = ELECTRICITY_MAPS.source(server.url, web).fetch(NOW_AT)

    assert [sample.carbon_intensity_g_per_kwh for sample in reply.samples] == [302.0]
    assert len(reply.rejected) == 1


@pytest.mark.fault(58)
@pytest.mark.parametrize("mark", [{"_disclaimer": "random, for Sandbox use"}, {"method": "SANDBOX_MODE_DATA"}], ids=str)
def test_made_up_values_of_a_sandbox_key_are_refused(web: Web, mark: dict[str, str]) -> None:
    made_up = json.loads(electricity_maps_reply(302, HOUR_AT, estimated=True).body)
    made_up["history"][0]["estimationMethod"] = mark.pop("method", "TIME_SLICER_AVERAGE")
    with serving(ELECTRICITY_MAPS.script(json_reply({**made_up, **mark}))) as server:
        refused = failure(ELECTRICITY_MAPS.source(server.url, web))

    assert refused.problem is SourceProblem.SANDBOX
    assert "made up" in str(refused)


@every_provider
def test_a_burst_of_server_errors_is_retried(provider: Documented, web: Web, pauses: Pauses) -> None:
    good = provider.script(provider.reply(provider.good, HOUR_AT))
    failed: list[Asked] = []

    def script(asked: Asked) -> Reply:
        if asked.path != "/login" and not failed:
            failed.append(asked)
            return Reply(b"", 502)
        return good(asked)

    with serving(script) as server:
        reply = provider.source(server.url, web).fetch(NOW_AT)

    assert reply.samples
    assert pauses.taken_s == [1.0]


@pytest.mark.fault(24)
@every_provider
def test_a_too_large_body_is_not_read_to_its_end(provider: Documented, web: Web) -> None:
    with serving(provider.script(Reply(b" " * 10_000_000))) as server:
        assert failure(provider.source(server.url, web)).problem is SourceProblem.TOO_LARGE


@pytest.mark.fault(24)
@every_provider
def test_a_slow_body_exceeds_the_total_time_limit(provider: Documented) -> None:
    ticks = iter(range(10**9))
    dripping = Web(WebLimits(total_s=20.0), pause=lambda _: None, clock_s=lambda: float(next(ticks)))
    with serving(provider.script(Reply(b" " * 10_000, drip=True))) as server:
        assert failure(provider.source(server.url, dripping)).problem is SourceProblem.TIMEOUT


@every_provider
def test_a_silent_server_exceeds_the_read_limit(provider: Documented) -> None:
    impatient = Web(WebLimits(connect_s=0.2, read_s=0.05, max_retries=0))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(8)
        source = provider.source(f"http://127.0.0.1:{listening.getsockname()[1]}", impatient)

        assert failure(source).problem is SourceProblem.TIMEOUT


@pytest.mark.fault(22)
@every_provider
def test_a_refused_connection_is_reported_as_unreachable(provider: Documented, web: Web) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    assert failure(provider.source(f"http://127.0.0.1:{port}", web)).problem is SourceProblem.UNREACHABLE


@pytest.mark.fault(24)
@every_provider
def test_a_redirect_loop_ends_and_another_host_is_never_followed(provider: Documented, web: Web) -> None:
    with serving(provider.script(Reply(b"", 302, (("Location", "/again"),)))) as server:
        assert failure(provider.source(server.url, web)).problem is SourceProblem.REDIRECT
    with serving(lambda _: json_reply({})) as other:
        with serving(provider.script(Reply(b"", 307, (("Location", other.url + "/steal"),)))) as server:
            assert failure(provider.source(server.url, web)).problem is SourceProblem.REDIRECT
        assert other.asked == []


@every_provider
def test_future_values_are_not_accepted_as_measured(provider: Documented, web: Web) -> None:
    later = HOUR_AT + timedelta(hours=6)
    history = provider.script(provider.reply(provider.good, later))

    with serving(lambda asked: Reply(b"", 403) if asked.path.endswith("forecast") else history(asked)) as server:
        assert failure(provider.source(server.url, web)).problem is SourceProblem.CLOCK


@pytest.mark.fault(23)
@every_provider
def test_old_values_are_kept_and_marked_stale(provider: Documented, web: Web) -> None:
    earlier = HOUR_AT - timedelta(days=40)
    with serving(provider.script(provider.reply(provider.good, earlier))) as server:
        reply = provider.source(server.url, web).fetch(NOW_AT)

    assert reply.is_stale
    assert reply.samples[-1].valid_from_at == earlier


def test_neso_distinguishes_measured_estimated_and_forecast_slots(web: Web) -> None:
    def row(hours: float, actual: int | None) -> dict[str, object]:
        begin = HOUR_AT + timedelta(hours=hours)
        return {
            "from": f"{begin:%Y-%m-%dT%H:%MZ}",
            "to": f"{begin + timedelta(minutes=30):%Y-%m-%dT%H:%MZ}",
            "intensity": {"forecast": 200, "actual": actual, "index": "low"},
        }

    rows = [row(-1.0, 180), row(-0.5, None), row(0.5, None)]
    with serving(NESO.script(json_reply({"data": rows}))) as server:
        reply = NESO.source(server.url, web).fetch(NOW_AT)

    assert [s.status for s in reply.samples] == [SampleStatus.MEASURED] * 2 + [SampleStatus.ESTIMATED] * 2
    assert {s.status for s in reply.forecast} == {SampleStatus.FORECAST}


def test_electricity_maps_requests_no_fallback_zone_and_marks_estimates(web: Web) -> None:
    with serving(ELECTRICITY_MAPS.script(electricity_maps_reply(302, HOUR_AT, estimated=True))) as server:
        reply = ELECTRICITY_MAPS.source(server.url, web).fetch(NOW_AT)
        asked = server.asked[0]

    assert reply.samples[0].status is SampleStatus.ESTIMATED
    assert asked.query["zone"] == ["DE"]
    assert asked.query["disableCallerLookup"] == ["true"]
    assert asked.headers["auth-token"] == SECRET


@pytest.mark.parametrize("key", ["history", "data"])
def test_electricity_maps_v4_is_asked_for_hours_by_its_base_url(web: Web, key: str) -> None:
    with serving(ELECTRICITY_MAPS.script(electricity_maps_v4_reply(302, HOUR_AT, key=key))) as server:
        reply = ELECTRICITY_MAPS.source(f"{server.url}/v4", web).fetch(NOW_AT)
        asked = server.asked[0]

    assert asked.path == "/v4/carbon-intensity/history"
    assert asked.query["temporalGranularity"] == ["hourly"]
    assert [(s.carbon_intensity_g_per_kwh, s.status) for s in reply.samples] == [(302.0, SampleStatus.MEASURED)]


def test_electricity_maps_refuses_intervals_that_are_not_hours(web: Web) -> None:
    with serving(ELECTRICITY_MAPS.script(electricity_maps_v4_reply(302, HOUR_AT, granularity="5_minutes"))) as server:
        assert failure(ELECTRICITY_MAPS.source(server.url, web)).problem is SourceProblem.WRONG_UNIT


@pytest.mark.parametrize("document", [None, 3, "data", ["data"]])
def test_electricity_maps_refuses_a_reply_that_is_no_object(web: Web, document: Any) -> None:
    with serving(ELECTRICITY_MAPS.script(json_reply(document))) as server:
        assert failure(ELECTRICITY_MAPS.source(server.url, web)).problem is SourceProblem.NOT_PARSED


def test_watttime_converts_pounds_and_rejects_unknown_units(web: Web) -> None:
    with serving(WATTTIME.script(watttime_reply(1000.0, HOUR_AT, units="percentile"))) as server:
        assert failure(WATTTIME.source(server.url, web)).problem is SourceProblem.WRONG_UNIT


def test_watttime_logs_in_again_once_when_its_token_has_expired(web: Web) -> None:
    good = WATTTIME.script(watttime_reply(1000.0, HOUR_AT))
    logins: list[Asked] = []
    expired: list[bool] = []

    def script(asked: Asked) -> Reply:
        if asked.path == "/login":
            logins.append(asked)
        elif expired:
            expired.clear()
            return Reply(b"{}", 401)
        return good(asked)

    with serving(script) as server:
        source = WATTTIME.source(server.url, web)
        source.fetch(NOW_AT)
        expired.append(True)
        reply = source.fetch(NOW_AT)

    assert reply.samples
    assert len(logins) == 2
    assert all(one.headers["authorization"].startswith("Basic ") for one in logins)


def test_watttime_without_a_forecast_in_its_plan_returns_the_past(web: Web) -> None:
    good = WATTTIME.script(watttime_reply(1000.0, HOUR_AT))

    with serving(lambda asked: Reply(b"{}", 403) if asked.path.endswith("forecast") else good(asked)) as server:
        reply = WATTTIME.source(server.url, web).fetch(NOW_AT)

    assert reply.samples
    assert reply.forecast == ()


def test_entsoe_repeats_missing_positions_and_ignores_consumption(web: Web) -> None:
    document = entsoe_document({"B14": 600, "B04": 200}, HOUR_AT - timedelta(hours=1), resolution="PT15M").body
    pumping = b"<TimeSeries><outBiddingZone_Domain.mRID>X</outBiddingZone_Domain.mRID></TimeSeries></GL_MarketDocument>"
    with serving(ENTSOE.script(Reply(document.replace(b"</GL_MarketDocument>", pumping)))) as server:
        reply = ENTSOE.source(server.url, web).fetch(NOW_AT)

    assert len(reply.samples) == 4
    assert {s.carbon_intensity_g_per_kwh for s in reply.samples} == {(600 * 12.0 + 200 * 490.0) / 800}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"<Acknowledgement_MarketDocument></Acknowledgement_MarketDocument>", SourceProblem.EMPTY),
        (b'<!DOCTYPE a [<!ENTITY b "c">]><GL_MarketDocument>&b;</GL_MarketDocument>', SourceProblem.NOT_PARSED),
        (b"<GL_MarketDocument></GL_MarketDocument>", SourceProblem.EMPTY),
    ],
    ids=["no-data", "entities", "empty"],
)
def test_entsoe_names_documents_without_data(web: Web, body: bytes, problem: SourceProblem) -> None:
    with serving(ENTSOE.script(Reply(body))) as server:
        assert failure(ENTSOE.source(server.url, web)).problem is problem


def test_a_netrc_file_adds_no_credentials(web: Web, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path  # noqa: PLC0415  one use

    netrc = Path(str(tmp_path)) / "netrc"
    netrc.write_text("machine 127.0.0.1 login a password b\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with serving(NESO.script(NESO.reply(200, HOUR_AT))) as server:
        NESO.source(server.url, web).fetch(NOW_AT)

        assert all("authorization" not in asked.headers for asked in server.asked)


def test_an_unknown_source_error_lists_the_installed_ones() -> None:
    assert {"neso", "electricity-maps", "watttime", "entsoe", "eia", "fixed", "csv"} <= set(source_names())
    with pytest.raises(CarbonDataError, match=r"no carbon source 'nope'; installed: .*neso"):
        make_source("nope", SourceOptions("GB", Web()))


def test_only_great_britain_has_a_default_source() -> None:
    assert default_source_name("GB") == "neso"
    with pytest.raises(CarbonDataError, match="'FR' requires a source"):
        default_source_name("FR")


@pytest.mark.parametrize("provider", [p for p in PROVIDERS if p.needs_key], ids=lambda p: p.name)
def test_a_source_without_its_required_key_is_rejected(provider: Documented) -> None:
    with pytest.raises(CarbonDataError, match="needs a key"):
        provider.make(SourceOptions(provider.zone, Web()))


def test_a_fixed_value_is_static_and_checked() -> None:
    source = make_source("fixed", SourceOptions("XX", Web(), g_per_kwh=321.0))

    assert source.fetch(NOW_AT).samples[0].status is SampleStatus.STATIC
    assert source.fetch(NOW_AT).samples[0].carbon_intensity_g_per_kwh == 321.0


def test_each_source_declares_its_signal() -> None:
    marginal = make_source("watttime", SourceOptions("CAISO_NORTH", Web(), key=SECRET)).signal
    british = make_source("neso", SourceOptions("GB", Web())).signal

    assert (marginal.kind, marginal.factor) == (SignalKind.MARGINAL, EmissionFactor.DIRECT)
    assert (british.kind, british.factor) == (SignalKind.AVERAGE, EmissionFactor.OPERATIONAL)
    assert SECRET not in repr(SourceOptions("GB", Web(), key=SECRET))
    assert len(entsoe.AREAS["FR"]) == 16


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("neso", {"zone": "DE"}, "supports only zone GB, got 'DE'"),
        ("entsoe", {"zone": "XX", "key": "t"}, "zone 'XX' is neither a 16-character EIC code nor one of"),
        ("electricity-maps", {"key": "t", "kind": SignalKind.MARGINAL}, "offers average values"),
        ("watttime", {"key": SECRET, "factor": EmissionFactor.LIFECYCLE}, "offers direct factors only"),
        ("fixed", {}, "requires a value in g/kWh"),
        ("csv", {}, "requires the path of a file"),
    ],
)
def test_a_source_rejects_unsupported_options(name: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(CarbonDataError, match=message):
        make_source(name, SourceOptions(**{"zone": "GB", "web": Web(), **given}))


@pytest.mark.parametrize("text", ["2026-05-04T12:00", "noon", 5, None])
def test_a_time_without_time_zone_is_rejected(text: object) -> None:
    with pytest.raises(SourceError, match="is no time with zone") as refused:
        instant("here", text)
    assert refused.value.problem is SourceProblem.NOT_PARSED


@pytest.mark.parametrize(
    ("held", "problem"), [({"data": 1}, SourceProblem.NOT_PARSED), ({"data": []}, SourceProblem.EMPTY)]
)
def test_rows_are_a_non_empty_list(held: dict[str, Any], problem: SourceProblem) -> None:
    with pytest.raises(SourceError) as refused:
        rows("here", held, "data")
    assert refused.value.problem is problem


def test_electricity_maps_rejects_other_factors_than_requested(web: Web) -> None:
    with serving(ELECTRICITY_MAPS.script(electricity_maps_reply(100, HOUR_AT))) as server:
        direct = SourceOptions("DE", web, key=SECRET, factor=EmissionFactor.DIRECT, base_url=server.url)
        refused = failure(ELECTRICITY_MAPS.make(direct))

    assert refused.problem is SourceProblem.WRONG_UNIT
    assert "requested direct factors, got 'lifecycle'" in str(refused)
