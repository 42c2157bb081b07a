"""The dashboard shows the daemon and the history on this host only, read-only, also in a real browser."""

import http.client
import json
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd_dashboard.server import DashboardServer, HistoryView
from tests.support.chromium import CHROMIUM, Page, in_browser
from tests.support.daemon_process import DaemonProcess, running_daemon
from tests.support.sample_history import write_sample_history
from tests.support.waiting import LIMIT_S, wait_until

HOSTILE_NAME = "</script><img src=x onerror=alert(1)>"
PROMETHEUS = shutil.which("prometheus")
CONFIGURATION = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: gpuenergyd
    static_configs:
      - targets: {targets}
"""


@contextmanager
def serving(
    database: str,
    socket_path: str = "/nowhere.sock",
    *,
    has_metrics: bool = False,
    address: str = "127.0.0.1",
    host_names: Sequence[str] = (),
) -> Iterator[DashboardServer]:
    with DashboardServer(
        0, socket_path, HistoryView(database), has_metrics=has_metrics, address=address, host_names=host_names
    ) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: DashboardServer, path: str = "/", *, method: str = "GET", host: str | None = None
) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LIMIT_S)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read().decode()
    connection.close()
    return found


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_sample_history(tmp_path_factory.mktemp("history") / "history.sqlite3", job_name=HOSTILE_NAME))


FQDN = socket.getfqdn().lower()


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:{port}",
            "localhost.evil.example",
            f"{socket.gethostname()}.evil.example:{{port}}",
        ),
        *("user@localhost", "localhost@evil.example", "localhost:port", "[::1", "127.0.0.2", "", "localhost/x"),
    ],
)
def test_a_request_with_a_name_of_another_host_is_refused(host: str, database: str) -> None:
    """A page of an attacker who lets a name point to 127.0.0.1 (DNS rebinding) sends that name."""
    with serving(database, has_metrics=True) as server:
        answers = [ask(server, path, host=host.format(port=server.server_port)) for path in ("/", "/metrics")]

    for status, _, body in answers:
        assert status == 421
        assert "<html" not in body
        assert "valid: " in body


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:{port}", "localhost:{port}", "[::1]:{port}", "LOCALHOST", "localhost:9090", "localhost."),
        *(f"{socket.gethostname()}:{{port}}", FQDN, "gpu17.cluster:80", "GPU17.cluster"),
    ],
)
def test_names_of_this_host_are_served_without_cross_origin_access(host: str, database: str) -> None:
    """The port may be that of a tunnel or a proxy."""
    with serving(database, host_names=["gpu17.Cluster"]) as server:
        status, headers, body = ask(server, host=host.format(port=server.server_port))

    assert status == 200
    assert "<!doctype html>" in body
    assert "Access-Control-Allow-Origin" not in headers
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_and_head_are_allowed(method: str, database: str) -> None:
    with serving(database) as server:
        status, headers, _ = ask(server, method=method)

    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/status.json", "/nowhere"])
def test_head_returns_the_headers_of_get_without_a_body(path: str, database: str) -> None:
    with serving(database) as server:
        status, headers, body = ask(server, path, method="HEAD")
        expected_status, expected, expected_body = ask(server, path)

    assert (status, body) == (expected_status, "")
    assert headers["Content-Length"] == str(len(expected_body.encode()))
    assert headers["Content-Type"] == expected["Content-Type"]


def test_a_missing_daemon_and_a_missing_history_are_shown_on_the_page(tmp_path: Path) -> None:
    with serving(str(tmp_path / "none.sqlite3"), has_metrics=True) as server:
        assert "No history: no history at" in ask(server)[2]
        status, _, body = ask(server, "/status.json")
        metrics_status, _, metrics = ask(server, "/metrics")

    assert status == metrics_status == 503
    assert "no daemon answers on /nowhere.sock" in json.loads(body)["error"]
    assert metrics.startswith("cannot reach the daemon at /nowhere.sock")


def test_metrics_are_served_only_with_the_option(database: str) -> None:
    with serving(database) as server:
        status, _, body = ask(server, "/metrics")

    assert status == 404
    assert body == "no such page; pages: /, /status.json\n"


def test_only_the_metrics_are_served_on_an_address_of_the_network(database: str) -> None:
    with serving(database, has_metrics=True, address="0.0.0.0") as server:
        page = ask(server, "/")
        status = ask(server, "/status.json")
        metrics = ask(server, "/metrics", host=socket.gethostname())
        other = ask(server, "/metrics", host="evil.example")

    assert [answer[0] for answer in (page, status, metrics, other)] == [404, 404, 503, 421]
    assert page[2] == "no such page; pages: /metrics\n"


def test_ipv6_loopback_is_served(database: str) -> None:
    with serving(database, has_metrics=True, address="::1") as server:
        connection = http.client.HTTPConnection("::1", server.server_port, timeout=LIMIT_S)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        assert server.url == f"http://[::1]:{server.server_port}/"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--listen", "node17"], "--listen 'node17': must be an IP address, e.g. 127.0.0.1 or 0.0.0.0"),
        (["--listen", "0.0.0.0"], "--listen 0.0.0.0 needs --metrics: the page is served on a loopback address only"),
    ],
)
def test_an_address_that_cannot_be_served_is_a_usage_error(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dashboard", "--port", "0", *arguments]) == 2
    assert capsys.readouterr().err == f"gpuenergyd: {problem}\n"


def test_a_port_that_is_taken_is_one_clear_line(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUENERGYD_STATE_DIR", str(tmp_path))
    with serving(database) as server:
        port = str(server.server_port)
        assert run(["dashboard", "--port", port, "--database", database]) == 2

    expected = f"gpuenergyd: cannot serve on 127.0.0.1:{port}: Address already in use; --port 0 selects a free port\n"
    assert capsys.readouterr().err == expected


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this host")
def test_a_browser_shows_the_daemon_live_and_the_history_on_a_phone_and_in_the_dark(tmp_path: Path) -> None:
    """No complaint, no request to elsewhere, nothing wider than the window, and the keyboard reaches every table."""
    daemon = DaemonProcess(tmp_path / "daemon", num_gpus=2).start()
    try:
        database = str(write_sample_history(tmp_path / "history.sqlite3", job_name=HOSTILE_NAME))
        with serving(database, str(daemon.socket_path), has_metrics=True) as server:
            assert "gpuenergyd_gpu_power_watts{" in ask(server, "/metrics")[2]
            server.view.shown_days = 100_000

            async def look(page: Page) -> None:
                for width, is_dark in ((390, True), (1440, False)):
                    await page.open(server.url, width=width, is_dark=is_dark)
                    await page.wait_until("document.querySelectorAll('#gpus tr').length === 2")
                    await page.wait_until(
                        "(document.querySelector('#power path.line')?.getAttribute('d') || '').includes('L')"
                    )
                    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
                    assert str(await page.evaluate("document.getElementById('state').textContent")).startswith(
                        "Healthy"
                    )
                    small = "[...document.querySelectorAll('svg')].filter(s => s.clientWidth && s.clientHeight < 50)"
                    assert await page.evaluate(f"{small}.length") == 0
                    charts = "[...document.querySelectorAll('svg.timeline, svg.plane, svg.days')]"
                    assert await page.evaluate(f"{charts}.filter(s => s.clientWidth).length") == 3
                    await page.screenshot(f"live-{width}-{'dark' if is_dark else 'light'}", tmp_path)
                backgrounds = "getComputedStyle(document.body).backgroundColor"
                assert await page.evaluate(backgrounds) == "rgb(251, 251, 249)"
                regions = int(await page.evaluate("document.querySelectorAll('.scroll, summary').length"))
                reached = {await page.press_tab() for _ in range(regions)}
                assert len(reached) == regions, reached
                assert page.complaints == []
                assert {url for url in page.requests if not url.startswith(server.url)} <= {"data:,"}

            in_browser(tmp_path / "profile", look)
    finally:
        daemon.stop()


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
                    )
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
