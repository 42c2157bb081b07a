"""Outside meters: replies of real management controllers and servers, and refusals that name the value."""

import sys
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.errors import UsageError
from gpuenergyd_carbon.sources.web import WebLimits
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.meters import IpmiMeter, Meter, PowercapMeter, open_meter
from gpuenergyd_prove.proof.registration import MeterFacts
from tests.plugins.carbon.sources.scripted_server import json_reply, serving


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for a reply than a proof does: on a busy machine the servers of these tests are slow."""
    patient = WebLimits(connect_s=60.0, read_s=60.0, total_s=120.0, max_retries=0)
    monkeypatch.setattr("gpuenergyd_prove.meters._LIMITS", patient)


@pytest.mark.parametrize(
    "reply", [{"PowerControl": [{"PowerConsumedWatts": 1234}]}, {"PowerWatts": {"Reading": 1234.0}}]
)
def test_redfish_power_is_read_from_both_resources(reply: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDFISH_USER", "reader")
    monkeypatch.setenv("REDFISH_PASSWORD", "secret")
    with serving(lambda _: json_reply(reply)) as server:
        meter = open_meter(f"redfish:{server.url}/redfish/v1/Chassis/1/Power")
        reading = meter.read()

    assert reading is not None
    assert reading.power_w == 1234.0
    assert server.asked[0].path == "/redfish/v1/Chassis/1/Power"
    assert server.asked[0].headers["authorization"].startswith("Basic ")
    assert meter.facts == MeterFacts("redfish", "node")


def test_prometheus_value_has_the_servers_time_and_is_not_read_twice() -> None:
    times_s = iter((100.0, 100.0, 101.0))

    with serving(lambda _: json_reply({"data": {"result": [{"value": [next(times_s), "820.5"]}]}})) as server:
        meter = open_meter(f"prometheus:{server.url},sum(pdu_watts)", covers="node-and-network")
        readings = [meter.read() for _ in range(3)]

    assert [None if r is None else (r.at_s, r.power_w) for r in readings] == [(100.0, 820.5), None, (101.0, 820.5)]
    assert (server.asked[0].path, server.asked[0].query) == ("/api/v1/query", {"query": ["sum(pdu_watts)"]})


@pytest.mark.parametrize(
    ("meter", "reply", "message"),
    [
        ("redfish:{}/Power", {"PowerControl": []}, "no number of watts but None"),
        ("redfish:{}/Power", {"PowerControl": [{"PowerConsumedWatts": "much"}]}, "no number of watts but 'much'"),
        ("redfish:{}/Power", [], "not a JSON object"),
        ("prometheus:{},up", {"data": {"result": []}}, "gives 0 series; it must give one"),
        ("prometheus:{},up", {"data": {"result": [{"value": [1.0]}]}}, "no instant value"),
    ],
)
def test_reply_without_a_value_fails_with_the_reason(meter: str, reply: Any, message: str) -> None:
    with serving(lambda _: json_reply(reply)) as server, pytest.raises(ProofError, match=message):
        open_meter(meter.format(server.url)).read()


def test_unreachable_controller_fails_without_its_address() -> None:
    with pytest.raises(ProofError, match="Redfish: cannot be reached"):
        open_meter("redfish:http://127.0.0.1:9/Power").read()


def test_ipmi_reading_is_parsed() -> None:
    text = "\\n    Instantaneous power reading:                   212 Watts\\n"
    meter = IpmiMeter(MeterFacts("ipmi", "node"), (sys.executable, "-c", f"print('{text}')"))

    reading = meter.read()

    assert reading is not None
    assert reading.power_w == 212.0


def test_ipmi_without_a_reading_fails() -> None:
    with pytest.raises(ProofError, match="printed no instantaneous power reading"):
        IpmiMeter(MeterFacts("ipmi", "node"), (sys.executable, "-c", "")).read()
    with pytest.raises(ProofError, match="FileNotFoundError"):
        IpmiMeter(MeterFacts("ipmi", "node"), ("/no/such/program",)).read()


def domain(root: Path, name: str, kind: str, energy_uj: int) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{kind}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text("1000000000\n")


def test_powercap_adds_packages_and_memory_and_survives_the_wrap(tmp_path: Path) -> None:
    times_s = iter((10.0, 12.0))
    meter: Meter = PowercapMeter(MeterFacts("powercap", "components"), tmp_path, now_s=lambda: next(times_s))
    domain(tmp_path, "intel-rapl:0", "package-0", 990_000_000)
    domain(tmp_path, "intel-rapl:0:0", "core", 5_000_000)
    domain(tmp_path, "intel-rapl:0:1", "dram", 7_000_000)
    assert meter.read() is None

    domain(tmp_path, "intel-rapl:0", "package-0", 90_000_000)
    domain(tmp_path, "intel-rapl:0:0", "core", 65_000_000)
    domain(tmp_path, "intel-rapl:0:1", "dram", 27_000_000)
    reading = meter.read()

    assert reading is not None
    assert (reading.at_s, reading.power_w) == (12.0, (100.0 + 20.0) / 2)


def test_powercap_without_counters_fails(tmp_path: Path) -> None:
    with pytest.raises(ProofError, match="no CPU energy counters"):
        PowercapMeter(MeterFacts("powercap", "components"), tmp_path).read()


@pytest.mark.parametrize(
    ("text", "covers", "message"),
    [
        ("multimeter", None, "must be redfish:URL, prometheus:URL,QUERY, ipmi or powercap"),
        ("redfish:bmc", None, "must be redfish:URL"),
        ("prometheus:http://p", None, "must be redfish:URL"),
        ("ipmi", "rack", "--meter-covers 'rack': must be one of node"),
        ("powercap", "node", "powercap covers components only"),
    ],
)
def test_unknown_meter_is_refused(text: str, covers: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_meter(text, covers=covers)
