"""Outside meters: replies of real management controllers and servers, and refusals that name the value."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.carbon.sources.web import WebLimits
from gpuenergyd.errors import UsageError
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.meters import IpmiMeter, Meter, PowercapMeter, RedfishMeter, open_meter
from gpuenergyd_prove.proof.measurements import PowerSample
from gpuenergyd_prove.proof.outside_meter import alignment
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm, MeterFacts
from tests.plugins.prove.virtual_training import VirtualMeter, VirtualTraining
from tests.support.http_handler import QuietHandler


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for a reply than a proof does: on a busy machine the servers of these tests are slow."""
    patient = WebLimits(connect_s=60.0, read_s=60.0, total_s=120.0, max_retries=0)
    monkeypatch.setattr("gpuenergyd_prove.meters._LIMITS", patient)


@contextmanager
def server(*replies: Any) -> Iterator[tuple[str, list[str]]]:
    """Serve JSON replies one after the other, the last one again and again; yield the URL and the requests."""
    requests: list[str] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802  the name that http.server calls it by
            requests.append(f"{self.path} {self.headers.get('Authorization', '')}".strip())
            self.send_json(json.dumps(replies[min(len(requests), len(replies)) - 1]).encode())

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}", requests
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


@pytest.mark.parametrize(
    "reply",
    [
        {"PowerControl": [{"PowerConsumedWatts": 1234}]},
        {"PowerWatts": {"Reading": 1234.0}},
    ],
)
def test_redfish_power_is_read_from_both_resources(reply: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDFISH_USER", "reader")
    monkeypatch.setenv("REDFISH_PASSWORD", "secret")
    with server(reply) as (url, requests):
        meter = open_meter(f"redfish:{url}/redfish/v1/Chassis/1/Power")
        reading = meter.read()

    assert reading is not None
    assert reading.power_w == 1234.0
    assert requests[0].startswith("/redfish/v1/Chassis/1/Power Basic ")
    assert meter.facts == MeterFacts("redfish", "node")


def test_prometheus_value_has_the_servers_time_and_is_not_read_twice() -> None:
    def reply(at_s: float) -> dict[str, Any]:
        return {"data": {"result": [{"value": [at_s, "820.5"]}]}}

    with server(reply(100.0), reply(100.0), reply(101.0)) as (url, requests):
        meter = open_meter(f"prometheus:{url},sum(pdu_watts)", covers="node-and-network")
        readings = [meter.read() for _ in range(3)]

    assert [None if r is None else (r.at_s, r.power_w) for r in readings] == [(100.0, 820.5), None, (101.0, 820.5)]
    assert requests[0] == "/api/v1/query?query=sum%28pdu_watts%29"


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
    with server(reply) as (url, _), pytest.raises(ProofError, match=message):
        open_meter(meter.format(url)).read()


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


def test_mock_controllers_with_known_lag_and_gain_are_aligned_within_their_stated_errors() -> None:
    """The controller of a virtual host, read over HTTP once per virtual second; also with its readings on a PDU."""
    training = VirtualTraining(seed=8, meter=VirtualMeter(lag_s=4.4, gain=1.08, noise_w=8.0))
    block = training.run_block(Arm(BASELINE_ARM, "full-speed"), num_iterations=120)
    replies = [{"PowerControl": [{"PowerConsumedWatts": sample.power_w}]} for sample in block.meter_power]
    series = [{"data": {"result": [{"value": [s.at_s, f"{s.power_w}"]}]}} for s in block.meter_power]
    times_s = iter([sample.at_s for sample in block.meter_power for _ in range(2)])

    with server(*replies) as (url, _), server(*series) as (prometheus_url, _):
        redfish = RedfishMeter(MeterFacts("redfish", "node"), url, now_s=lambda: next(times_s))
        pdu = open_meter(f"prometheus:{prometheus_url},pdu_watts", covers="node-and-network")
        readings = [(redfish.read(), pdu.read()) for _ in block.meter_power]

    for column in zip(*readings, strict=True):
        series_read: list[PowerSample] = [reading for reading in column if reading is not None]
        found = alignment([(block.gpu_power, series_read)])
        assert found is not None
        assert found.is_aligned
        assert abs(found.lag_s - 4.4) <= found.lag_error_s < 0.5
        assert abs(found.gain - 1.08) <= found.gain_error < 0.05
