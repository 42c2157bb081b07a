"""An unmodified Prometheus scrapes `gpuenergyd dashboard --metrics`, by address and by name."""

import json
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gpuenergyd_dashboard.server import DashboardServer, HistoryView
from tests.support.daemon_process import running_daemon
from tests.support.waiting import LIMIT_S, wait_until

PROMETHEUS = shutil.which("prometheus")
CONFIGURATION = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: gpuenergyd
    static_configs:
      - targets: {targets}
"""


def names_of_this_host() -> list[str]:
    """Return the names that lead to 127.0.0.1: on many hosts, not on all, the host's own is among them."""
    names = ["127.0.0.1", "localhost", socket.gethostname()]
    return [name for name in names if socket.gethostbyname(name) == "127.0.0.1"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def prometheus(folder: Path, scraped_port: int) -> Iterator[int]:
    """Run Prometheus and return its port."""
    assert PROMETHEUS is not None
    port = free_port()
    targets = json.dumps([f"{name}:{scraped_port}" for name in names_of_this_host()])
    (folder / "prometheus.yml").write_text(CONFIGURATION.format(targets=targets))
    options = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROMETHEUS, *options], stdout=log, stderr=log)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def query(port: int, text: str) -> list[dict[str, Any]]:
    """Return the samples of a query; none while Prometheus starts."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/api/v1/query?query={quote(text)}", timeout=LIMIT_S
        ) as reply:
            found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
            return found
    except OSError:
        return []


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus here: install the Debian package prometheus")
def test_prometheus_scrapes_every_gpu_by_address_and_by_name(tmp_path: Path) -> None:
    with (
        running_daemon(tmp_path / "daemon") as daemon,
        DashboardServer(0, str(daemon.socket_path), HistoryView(str(daemon.database_path)), has_metrics=True) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            with prometheus(tmp_path, server.server_port) as port:
                wait_until(
                    lambda: (
                        len(query(port, "gpuenergyd_gpu_power_watts")) == len(names_of_this_host()) * daemon.num_gpus
                    ),
                )
                power = query(port, "gpuenergyd_gpu_power_watts")
                up = {sample["metric"]["instance"]: sample["value"][1] for sample in query(port, "up")}
                gpus = {gpu["gpu_uuid"] for gpu in daemon.status()["gpus"]}
        finally:
            server.shutdown()
            thread.join()

    assert up == {f"{name}:{server.server_port}": "1" for name in names_of_this_host()}
    assert {sample["metric"]["gpu_uuid"] for sample in power} == gpus
    assert all(float(sample["value"][1]) > 0 for sample in power)
