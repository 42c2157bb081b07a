"""`gpuenergyd otlp` exports the same metrics as Prometheus reads, and only on request."""

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuenergyd.cli.main import run
from gpuenergyd.client.connection import HttpConnection
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.http_handler import QuietHandler
from tests.support.tools_environment import OPENTELEMETRY, tools_environment
from tests.support.waiting import LIMIT_S, wait_until


class Collector(ThreadingHTTPServer):
    """What was posted to it; it answers with one status."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.status = status
        self.seen: list[tuple[str, str, Any]] = []

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.server_port}"


class _Requests(QuietHandler):
    server: Collector  # pyright: ignore[reportIncompatibleVariableOverride]  http.server names it so

    def do_POST(self) -> None:  # noqa: N802  the name that http.server calls it by
        content = self.rfile.read(int(self.headers["Content-Length"]))
        body = json.loads(content) if self.headers["Content-Type"] == "application/json" else content
        self.server.seen.append((self.path, self.headers["Content-Type"], body))
        self.send_json(b"{}", self.server.status)


@pytest.fixture(params=[200])
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    with Collector(request.param) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon that has read every GPU, its energy counter twice: metrics say nothing of what is not known yet."""
    with running_daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        wait_until(lambda: metrics_of(daemon).count("gpuenergyd_gpu_energy_joules_total{") == daemon.num_gpus)
        yield daemon


def metrics_of(daemon: DaemonProcess) -> str:
    connection = HttpConnection(str(daemon.socket_path))
    _, text = connection.request("GET", "/v1/metrics", limit_s=LIMIT_S)
    connection.close()
    return text.decode()


def test_a_collector_receives_the_metrics_of_prometheus(daemon: DaemonProcess, collector: Collector) -> None:
    """The same names and labels; counters are cumulative sums, joules are joules, and what is unknown is absent."""
    assert run(["otlp", "--once", "--endpoint", collector.url, "--socket", str(daemon.socket_path)]) == 0
    text = metrics_of(daemon)

    ((path, content_type, body),) = collector.seen
    assert (path, content_type) == ("/v1/metrics", "application/json")
    ((scope,),) = ((each for each in part["scopeMetrics"]) for part in body["resourceMetrics"])
    sent = {metric["name"]: metric for metric in scope["metrics"]}
    families = [family for family in text_string_to_metric_families(text) if family.samples]
    own = {sample.name for family in families for sample in family.samples if sample.name.startswith("gpuenergyd_")}
    conventional = {name for name in sent if name.startswith("hw.")}
    assert {name for name in own if not name.endswith("_created")} == set(sent) - conventional
    energy = sent["gpuenergyd_gpu_energy_joules_total"]
    assert (energy["unit"], energy["sum"]["isMonotonic"], energy["sum"]["aggregationTemporality"]) == ("J", True, 2)
    uuids = {
        attribute["value"]["stringValue"]
        for point in energy["sum"]["dataPoints"]
        for attribute in point["attributes"]
        if attribute["key"] == "gpu_uuid"
    }
    assert uuids == {gpu["gpu_uuid"] for gpu in daemon.status()["gpus"]}
    assert all(point["asDouble"] >= 0 for point in energy["sum"]["dataPoints"])
    assert sent["gpuenergyd_gpu_power_watts"]["unit"] == "W"


def test_gpus_are_exported_by_the_hardware_conventions_of_opentelemetry(
    daemon: DaemonProcess, collector: Collector
) -> None:
    """https://opentelemetry.io/docs/specs/semconv/hardware: names, units and the attributes that they demand."""
    assert run(["otlp", "--once", "--endpoint", collector.url, "--socket", str(daemon.socket_path)]) == 0

    body = collector.seen[0][2]
    sent = {each["name"]: each for each in body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]}
    uuids = {gpu["gpu_uuid"] for gpu in daemon.status()["gpus"]}
    for name, unit, kind in (("hw.energy", "J", "sum"), ("hw.power", "W", "gauge"), ("hw.temperature", "Cel", "gauge")):
        points = [
            {each["key"]: each["value"]["stringValue"] for each in point["attributes"]}
            for point in sent[name][kind]["dataPoints"]
        ]
        assert sent[name]["unit"] == unit
        assert {point["hw.id"] for point in points} == uuids
        assert {(point["hw.type"], point["hw.vendor"]) for point in points} == {("gpu", "NVIDIA")}
    assert sent["hw.energy"]["sum"]["isMonotonic"] is True


def test_a_collector_that_wants_protobuf_gets_it(daemon: DaemonProcess, collector: Collector) -> None:
    arguments = ["otlp", "--once", "--endpoint", collector.url, "--socket", str(daemon.socket_path)]

    assert run([*arguments, "--protocol", "http/protobuf"]) == 0

    ((path, content_type, body),) = collector.seen
    assert (path, content_type) == ("/v1/metrics", "application/x-protobuf")
    assert b"gpuenergyd_gpu_energy_joules_total" in body
    assert all(gpu["gpu_uuid"].encode() in body for gpu in daemon.status()["gpus"])


@pytest.mark.parametrize("collector", [415], indirect=True)
def test_a_collector_that_rejects_the_encoding_names_the_other_one(
    daemon: DaemonProcess, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["otlp", "--once", "--endpoint", collector.url, "--socket", str(daemon.socket_path)]) == 1

    assert capsys.readouterr().err.endswith("returned 415 Unsupported Media Type; try --protocol http/protobuf\n")


PARSE = """
import json, sys
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
request, body = ExportMetricsServiceRequest(), sys.stdin.buffer.read()
Parse(body, request) if sys.argv[1] == "http/json" else request.ParseFromString(body)
(scope,) = request.resource_metrics[0].scope_metrics
print(json.dumps({each.name: len(getattr(each, each.WhichOneof("data")).data_points) for each in scope.metrics}))
"""


@pytest.mark.parametrize("protocol", ["http/json", "http/protobuf"])
def test_the_export_is_valid_by_the_schema_of_opentelemetry(
    daemon: DaemonProcess, collector: Collector, protocol: str
) -> None:
    """With the unmodified package that holds the schema; an unknown field or a value of another type is an error."""
    arguments = ["otlp", "--once", "--endpoint", collector.url, "--socket", str(daemon.socket_path)]
    assert run([*arguments, "--protocol", protocol]) == 0
    ((_, _, body),) = collector.seen
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    python = tools_environment(OPENTELEMETRY) / "python"

    command = [str(python), "-c", PARSE, protocol]
    parsed = subprocess.run(command, input=encoded, capture_output=True, timeout=LIMIT_S, check=False)

    assert parsed.returncode == 0, parsed.stderr
    num_points = json.loads(parsed.stdout)
    assert num_points["gpuenergyd_gpu_power_watts"] == daemon.num_gpus
    assert num_points["gpuenergyd_gpu_energy_joules_total"] == daemon.num_gpus


@pytest.mark.parametrize("collector", [503], indirect=True)
def test_a_rejecting_collector_is_one_line_and_a_failure(
    daemon: DaemonProcess, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["otlp", "--once", "--endpoint", collector.url, "--socket", str(daemon.socket_path)]) == 1

    expected = f"gpuenergyd: the collector at {collector.url}/v1/metrics returned 503 Service Unavailable\n"
    assert capsys.readouterr().err == expected


def test_no_collector_and_no_daemon_are_one_line_with_its_exit_code(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = "http://127.0.0.1:1/v1/metrics"
    assert run(["otlp", "--once", "--endpoint", nobody, "--socket", str(daemon.socket_path)]) == 1
    assert capsys.readouterr().err.startswith(f"gpuenergyd: cannot reach the collector at {nobody}: ")
    assert run(["otlp", "--once", "--endpoint", nobody, "--socket", str(tmp_path / "none.sock")]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://host/x", "http://", "http://host:notaport/"])
def test_an_invalid_endpoint_is_a_usage_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["otlp", "--once", "--endpoint", url]) == 2
    assert capsys.readouterr().err.startswith(
        f"gpuenergyd: --endpoint {url!r}: must be a URL such as http://127.0.0.1:4318"
    )
