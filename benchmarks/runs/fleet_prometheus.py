"""Prometheus under the load of a fleet: series, samples, their cost, and dashboard queries."""

import argparse
import gzip
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fleet_hosts import ITERATION_S, NUM_GPUS, gpu_uuid, host_name

from gpuenergyd_otlp.prometheus import metrics_text

INTERVAL_S = 15
BASELINE_J, TUNED_J = 10_000.0, 8_500.0
SAVED_W = (
    "(gpuenergyd_job_baseline_iteration_joules - gpuenergyd_job_tuned_iteration_joules)"
    " / gpuenergyd_job_tuned_iteration_seconds"
)
QUESTIONS = {
    "watts that all jobs save now": f"sum({SAVED_W})",
    "joules that they saved in an hour": f"sum(sum_over_time(({SAVED_W})[1h:{INTERVAL_S}s])) * {INTERVAL_S}",
    "power of all GPUs": "sum(gpuenergyd_gpu_power_watts)",
    "ten hosts with the highest power": "topk(10, sum by (instance) (gpuenergyd_gpu_power_watts))",
    "energy of all GPUs in five minutes": "sum(increase(gpuenergyd_gpu_energy_joules_total[5m]))",
}


def host_status(host: int, uptime_s: float) -> dict[str, Any]:
    """Return a status response with eight tuned GPUs and their job, with simulated readings."""
    noise = random.Random(1_000_000 * host + round(uptime_s * 10))
    seen = [
        {"direction": direction, "from_region": None, "low_s": 0.004, "median_s": 0.005, "high_s": 0.009}
        for direction in ("raise", "lower")
    ]
    gpus = []
    for index in range(NUM_GPUS):
        power_w = noise.uniform(180, 320)
        gpus.append(
            {"gpu_uuid": gpu_uuid(host, index), "index": index, "model_name": "NVIDIA A100-SXM4-80GB", "state": "ok",
             "sm_clock_mhz": noise.choice((1410, 1200, 1095)), "requested_sm_clock_mhz": 1200, "power_w": power_w,
             "total_energy_j": round(1e6 * index + 250.0 * uptime_s + power_w, 3),
             "temperature_celsius": 50.0 + index, "reading_age_s": round(noise.uniform(0, 0.1), 3),
             "switching": {"basis": "measured", "raise_s": 0.006, "lower_s": 0.005, "num_seen": int(uptime_s * 4),
                           "num_unseen": 2, "seen": seen}}
        )  # fmt: skip
    job = {
        "job_id": f"job-{host}", "job_name": "gpt", "phase": "tuned", "policy": "bubble-aware",
        "num_iterations": int(uptime_s / ITERATION_S), "baseline_time_s": ITERATION_S, "baseline_energy_j": BASELINE_J,
        "iteration_time_s": ITERATION_S, "energy_j": TUNED_J, "saving_ratio": 1 - TUNED_J / BASELINE_J,
        "slowdown_ratio": 0.0, "own_time_s": ITERATION_S, "max_slowdown_ratio": 0.0,
        "last_report_age_s": round(noise.uniform(0, 1.7), 3),
        "carbon": {"carbon_g": 0.4 * uptime_s, "saved_by_plan_g": 0.05 * uptime_s, "saved_by_frontier_g": 0.0,
                   "saved_by_timing_g": 0.0, "unpriced_j": 0.0},
    }  # fmt: skip
    return {
        "uptime_s": uptime_s,
        "is_degraded": False,
        "worker": {"is_alive": True, "num_restarts": 0},
        "policy_host": {"is_alive": True, "num_restarts": 0},
        "store": {"num_rows_written": int(104 * uptime_s), "num_rows_dropped": 0},
        "clock_requests": {"num_stale": 0, "num_hostile": 0},
        "gpus": gpus,
        "jobs": [job],
    }


class _Daemons(BaseHTTPRequestHandler):
    """Serves the metrics of every host: /host/17 is /v1/metrics of the daemon on host 17."""

    begun_s = time.monotonic()

    def do_GET(self) -> None:
        host = int(self.path.rpartition("/")[2])
        body = metrics_text(host_status(host, 3600.0 + time.monotonic() - self.begun_s))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True


def serve(pipe: Connection) -> None:
    """Serve the metrics of all hosts on a loopback port; yield the port."""
    with _Server(("127.0.0.1", 0), _Daemons) as server:
        pipe.send(server.server_address[1])
        server.serve_forever()


class Prometheus:
    """A Prometheus server with its own configuration and data."""

    def __init__(self, folder: Path, program: str, daemons_port: int, num_hosts: int) -> None:
        self.data = folder / "data"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        labels = [{"__metrics_path__": f"/host/{host}", "instance": host_name(host)} for host in range(num_hosts)]
        targets = [{"targets": [f"127.0.0.1:{daemons_port}"], "labels": own} for own in labels]
        config = {
            "global": {"scrape_interval": f"{INTERVAL_S}s", "scrape_timeout": "10s"},
            "scrape_configs": [{"job_name": "gpuenergyd", "static_configs": targets}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        self.process = subprocess.Popen(
            [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={self.data}",
             f"--web.listen-address=127.0.0.1:{self.port}", "--web.enable-admin-api", "--log.level=error"],
            stdout=subprocess.DEVNULL, stderr=(folder / "log").open("wb"),
        )  # fmt: skip

    def request(self, path: str, *, is_post: bool = False) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method="POST" if is_post else "GET")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def await_ready(self, limit_s: float = 60.0) -> None:
        until = time.monotonic() + limit_s
        while True:
            try:
                self.request("/-/ready")
            except OSError:
                if time.monotonic() > until or self.process.poll() is not None:
                    raise
                time.sleep(0.2)
            else:
                return

    def ask(self, query: str) -> tuple[float | None, float]:
        """Return the first value of a query result, None if empty, and the duration of the query."""
        begin = time.perf_counter()
        answer = json.loads(self.request(f"/api/v1/query?{urllib.parse.urlencode({'query': query})}"))
        took_s = time.perf_counter() - begin
        found = answer["data"]["result"]
        return (float(found[0]["value"][1]) if found else None), took_s

    def own_figure(self, name: str) -> float:
        """Return a metric of the server itself."""
        for line in self.request("/metrics").decode().splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * 1024

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stored(self) -> tuple[int, int]:
        """Return the bytes of chunks and index in a snapshot, in which the head block is written out."""
        answer = json.loads(self.request("/api/v1/admin/tsdb/snapshot", is_post=True))
        folder = self.data / "snapshots" / answer["data"]["name"]
        chunks = sum(path.stat().st_size for path in folder.glob("*/chunks/*"))
        return chunks, sum(path.stat().st_size for path in folder.glob("*/index"))

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def prometheus_figures(options: argparse.Namespace) -> dict[str, Any]:
    """Return all results, or the reason why there are none."""
    program = shutil.which("prometheus")
    if program is None:
        return {"absent": "no Prometheus server is installed here"}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    daemons = context.Process(target=serve, args=(theirs,), daemon=True)
    daemons.start()
    folder = Path(tempfile.mkdtemp(prefix="gpuenergyd-prometheus-"))
    try:
        server = Prometheus(folder, program, ours.recv(), options.hosts)
        try:
            server.await_ready()
            return _figures(server, options)
        finally:
            server.stop()
    finally:
        daemons.terminate()
        daemons.join()
        shutil.rmtree(folder, ignore_errors=True)


def _figures(server: Prometheus, options: argparse.Namespace) -> dict[str, Any]:
    time.sleep(INTERVAL_S + 1)  # every target has been scraped once
    begin = (time.monotonic(), _samples(server), server.cpu_s())
    time.sleep(max(0.0, options.scrape_seconds - INTERVAL_S - 1))
    elapsed_s = time.monotonic() - begin[0]
    samples_per_s = (_samples(server) - begin[1]) / elapsed_s
    cores = (server.cpu_s() - begin[2]) / elapsed_s
    answers = {name: [server.ask(query) for _ in range(5)] for name, query in QUESTIONS.items()}
    saved_w = answers["watts that all jobs save now"][-1][0]
    expected_w = options.hosts * (BASELINE_J - TUNED_J) / ITERATION_S
    memory, num_series = server.memory_bytes(), server.own_figure("prometheus_tsdb_head_series")
    scraped = {name: server.ask(query)[0] for name, query in _OF_SCRAPES.items()}
    num_samples = _samples(server)
    chunks, index = server.stored()
    body = metrics_text(host_status(0, 3600.0))
    return {
        "version": _version(),
        "interval_s": INTERVAL_S,
        "scrape_seconds": options.scrape_seconds,
        **scraped,
        "num_series": round(num_series),
        "samples_per_s": round(samples_per_s),
        "due_samples_per_s": round((scraped["samples_per_scrape"] or 0) * options.hosts / INTERVAL_S),
        "bytes_per_scrape": len(body),
        "compressed_bytes_per_scrape": len(gzip.compress(body)),
        "memory_bytes": memory,
        "memory_per_series_bytes": round(memory / num_series),
        "cores": round(cores, 2),
        "chunk_bytes_per_sample": round(chunks / num_samples, 2),
        "samples_per_series": round(num_samples / num_series, 1),
        "index_bytes_per_series": round(index / num_series),
        "questions_s": {name: sorted(round(took_s, 4) for _, took_s in took) for name, took in answers.items()},
        "saved_w": saved_w,
        "saved_difference_ratio": None if saved_w is None else abs(saved_w / expected_w - 1),
    }


_OF_SCRAPES: Mapping[str, str] = {
    "num_up": "sum(up)",
    "samples_per_scrape": "avg(scrape_samples_scraped)",
    "scrape_p50_s": "quantile(0.5, scrape_duration_seconds)",
    "scrape_p99_s": "quantile(0.99, scrape_duration_seconds)",
}


def _samples(server: Prometheus) -> float:
    return server.own_figure("prometheus_tsdb_head_samples_appended_total")


def _version() -> str:
    reported = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=False)
    return (reported.stdout + reported.stderr).split("version ")[-1].split()[0].rstrip(",")
