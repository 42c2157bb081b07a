"""Alerting and recording rules: valid, on exported metrics only, and evaluated by a real Prometheus."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from gpuenergyd_otlp.prometheus import metrics_text
from tests.plugins.otlp.test_prometheus import CARBON, GPU, JOB, STATUS, queries
from tests.support.daemon_process import ROOT
from tests.support.http_handler import QuietHandler
from tests.support.sample_status import sample_status
from tests.support.waiting import wait_until

RULES = sorted((ROOT / "deploy" / "prometheus").glob("*.yaml"))
METRICS = ROOT / "docs" / "reference" / "metrics.md"
HEALTH_CHECKS = ROOT / "docs" / "how-to" / "health-checks.md"
UNIT_TESTS = Path(__file__).with_name("prometheus_rules_test.yaml")
RUNNING = {**STATUS, **sample_status(), "is_degraded": True}
RUNNING["gpus"] = [{**GPU, **gpu, "switching": GPU["switching"]} for gpu in RUNNING["gpus"]]
RUNNING["jobs"] = [{**JOB, **job, "carbon": CARBON} for job in RUNNING["jobs"]]
"""A host with running jobs and a carbon zone."""
GRAFANA_VARIABLES = {"$host": ".*", "$job": ".*", "$__rate_interval": "1m", "$__range": "1h"}


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} (Debian package prometheus) is not installed")
    return path


def test_the_rules_fire_when_they_should() -> None:
    promtool = tool("promtool")

    checked = subprocess.run([promtool, "check", "rules", *map(str, RULES)], capture_output=True, check=False)
    tested = subprocess.run([promtool, "test", "rules", str(UNIT_TESTS)], capture_output=True, check=False)

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.name)
def test_rules_use_exported_metrics_only(path: Path) -> None:
    asked = set(
        re.findall(r"(?<![:\w])gpuenergyd_\w+", "\n".join(re.findall(r"expr: .*(?:\n {10}.*)*", path.read_text())))
    )

    assert asked
    assert asked - set(re.findall(r"`(gpuenergyd_\w+)`", METRICS.read_text())) == set()


def test_the_query_that_leaves_out_our_clocks_is_tested_as_documented() -> None:
    (query,) = re.findall(r"```text\n(DCGM.*?)```", HEALTH_CHECKS.read_text(), re.DOTALL)

    assert " ".join(query.split()) in " ".join(UNIT_TESTS.read_text().split())


class _Metrics(QuietHandler):
    """Serves the status of running jobs and a problem."""

    def do_GET(self) -> None:  # noqa: N802  the name that http.server calls
        text = metrics_text(RUNNING)
        self.send_head(200, len(text), [("Content-Type", "text/plain; version=0.0.4")])
        self.wfile.write(text)


@pytest.fixture
def exporter() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metrics)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_real_prometheus_evaluates_the_rules_and_every_query_of_the_dashboard(exporter: str, tmp_path: Path) -> None:
    prometheus = tool("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    (tmp_path / "prometheus.yml").write_text(
        json.dumps(  # which is YAML
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(path) for path in RULES],
                "scrape_configs": [{"job_name": "gpuenergyd", "static_configs": [{"targets": [exporter]}]}],
            }
        )
    )

    def answer(path: str) -> Any:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=60) as reply:
            return json.load(reply)["data"]

    def has_data(query: str) -> bool:
        for name, value in GRAFANA_VARIABLES.items():
            query = query.replace(name, value)
        return bool(answer(f"query?query={quote(query)}")["result"])

    def pending() -> set[str]:
        try:
            return {alert["labels"]["alertname"] for alert in answer("alerts")["alerts"]}
        except OSError:  # not started yet
            return set()

    process = subprocess.Popen(
        [
            prometheus,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: "GpuenergydDegraded" in pending())
        wait_until(lambda: all(map(has_data, queries())))  # rates need two scrapes
        rules = [rule for group in answer("rules")["groups"] for rule in group["rules"]]
        saved = answer("query?query=gpuenergyd_saved_power_watts")["result"]
    finally:
        process.terminate()
        process.wait()

    assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []
    assert [float(sample["value"][1]) for sample in saved] == [RUNNING["watts_saved_w"]]
