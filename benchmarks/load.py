"""How the core bears its load: 64 clients and 16 simulated GPUs at 10 requests a second each, and a flood beside them.

    python benchmarks/load.py                 # 60 s: 16 ranks report iterations, 48 clients watch
    python benchmarks/load.py --gpus 64       # all 64 clients are ranks
    python benchmarks/load.py --flood         # another user asks as fast as it can (needs root)
    python benchmarks/load.py --profile       # CPU time by callback of the core's event loop

The generator is one process with raw sockets and prepared frames, and still takes its share of the same cores. Latency
runs from the write of a request to the last byte of its answer. A batch is lost when it is not acknowledged, or not in
the history afterwards. CPU times do not depend on what else runs on the machine; latencies do.
"""

import argparse
import contextlib
import heapq
import json
import os
import selectors
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gpuenergyd.client.connection import DaemonClient  # noqa: E402  the tree this file lies in
from tests.support.daemon_process import DaemonProcess  # noqa: E402

PERIOD_S = 0.1
MICROBATCHES = 8
WATCHED = (b"/v1/status", b"/v1/metrics", b"/time", b"/gpu/get_power_limit?gpu_ids=0")
FLOODER = """
import os, socket, sys
path, uid = sys.argv[1], int(sys.argv[2])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
sockets = []
for _ in range(8):
    s = socket.socket(socket.AF_UNIX); s.connect(path); sockets.append(s)
frame = b"GET /v1/status HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" * 8
print("flooding", flush=True)
while True:
    for s in sockets:
        s.sendall(frame)
    for s in sockets:
        s.recv(1 << 20)
"""
PROFILED = """
import asyncio, atexit, json, os, time
from collections import defaultdict

seen = defaultdict(lambda: [0, 0, 0, 0])
run = asyncio.events.Handle._run

def timed(handle):
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    name = getattr(callback, "__qualname__", repr(callback))
    if isinstance(owner, asyncio.Task):
        name = getattr(owner.get_coro(), "__qualname__", "task")
    begin = time.thread_time_ns()
    run(handle)
    took = time.thread_time_ns() - begin
    row = seen[name]
    row[0] += 1; row[1] += took; row[2] = max(row[2], took); row[3] += took > 5_000_000

asyncio.events.Handle._run = timed

def watched(owner, attribute):
    inner = getattr(owner, attribute)

    def outer(*arguments, **named):
        begin = time.thread_time_ns()
        try:
            return inner(*arguments, **named)
        finally:
            took = time.thread_time_ns() - begin
            row = seen["  " + attribute]
            row[0] += 1; row[1] += took; row[2] = max(row[2], took); row[3] += took > 5_000_000

    setattr(owner, attribute, outer)

import gc
import gpuenergyd.daemon.app as app
import gpuenergyd.daemon.jobs as jobs
import gpuenergyd.daemon.server as server
import gpuenergyd.daemon.job_runner as job_runner

begun = [0]

def collected(phase, info):
    if phase == "start":
        begun[0] = time.thread_time_ns()
    else:
        took = time.thread_time_ns() - begun[0]
        row = seen["  gc generation %d" % info["generation"]]
        row[0] += 1; row[1] += took; row[2] = max(row[2], took); row[3] += took > 5_000_000

gc.callbacks.append(collected)
for owner, attribute in (
    (app, "daemon_status"), (server, "metrics_text"), (jobs.Jobs, "report"), (jobs.Jobs, "take_samples"),
    (server, "decode"), (server, "encode"), (job_runner.JobRunner, "_observe"), (job_runner.JobRunner, "take"),
    (jobs, "_checked_iteration"), (job_runner, "observe_iteration"), (job_runner.JobRunner, "_note"),
):
    watched(owner, attribute)
atexit.register(lambda: open(os.environ["LOAD_PROFILE"], "w").write(json.dumps(seen)))
"""


@dataclass(slots=True)
class Client:
    """One connection and what it asks each time."""

    connection: socket.socket
    is_rank: bool
    frames: tuple[bytes, ...] = ()
    token: str = ""
    index: int = 0
    due_s: float = 0.0
    sent_s: float = 0.0
    received: bytearray = field(default_factory=bytearray)
    is_waiting: bool = False

    def frame(self) -> bytes:
        """Return the next request."""
        self.index += 1
        if not self.is_rank:
            return self.frames[self.index % len(self.frames)]
        end_ns = time.monotonic_ns()
        step_ns = round(PERIOD_S * 1e9 / (2 * MICROBATCHES + 1))
        begin_ns = end_ns - step_ns * 2 * MICROBATCHES
        rows = ",".join(
            f'["{"FB"[k % 2]}",{k // 2},0,{begin_ns + k * step_ns},{begin_ns + (k + 1) * step_ns}]'
            for k in range(2 * MICROBATCHES)
        )
        body = (
            f'{{"rank_token":"{self.token}","iteration_index":{self.index},"plan_epoch":0,"begin_mono_ns":{begin_ns},'
            f'"end_mono_ns":{end_ns},"next_begin_mono_ns":{end_ns},"instructions":[{rows}]}}'
        ).encode()
        return b"POST /v1/iterations HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def has_answer(self) -> int | None:
        """Return the status of a complete answer and forget it."""
        head, separator, rest = self.received.partition(b"\r\n\r\n")
        if not separator:
            return None
        lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        if len(rest) < int(lengths[0].split(b":")[1]):
            return None
        self.received.clear()
        return int(head[9:12])


@dataclass(slots=True)
class Result:
    """What came of one run."""

    latencies_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    num_sent: int = 0
    num_batches_sent: int = 0
    num_batches_acknowledged: int = 0
    num_skipped: int = 0


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


def register(daemon: DaemonProcess, number: int) -> str:
    client = DaemonClient(str(daemon.socket_path))
    answer = client.post(
        "/v1/ranks",
        {
            "protocol_version": 1,
            "job_name": f"load-{number}",
            "run_key": "1",
            "pp_rank": 0,
            "num_pp_ranks": 1,
            "dp_rank": 0,
            "schedule_name": "1f1b",
            "num_microbatches": MICROBATCHES,
            "num_chunks": 1,
            "order": [["FB"[k % 2], k // 2, 0] for k in range(2 * MICROBATCHES)],
            "gpu_uuid": daemon.status()["gpus"][number]["gpu_uuid"],
            "policy": "full-speed",
        },
    )
    client.close()
    return str(answer["rank_token"])


def clients_of(daemon: DaemonProcess, num_clients: int, num_gpus: int) -> list[Client]:
    clients = []
    for number in range(num_clients):
        is_rank = number < num_gpus
        watched = WATCHED[number % len(WATCHED)]
        frame = b"GET " + watched + b" HTTP/1.1\r\nHost: x\r\n\r\n"
        client = Client(connect(daemon.socket_path), is_rank, (frame,))
        if is_rank:
            client.token = register(daemon, number)
        client.connection.setblocking(False)
        clients.append(client)
    return clients


def drive(clients: list[Client], seconds: float) -> Result:
    """Let every client ask ten times a second, spread over the period; one that still waits skips its turn."""
    result = Result()
    selector = selectors.EpollSelector()
    for client in clients:
        selector.register(client.connection, selectors.EVENT_READ, client)
    start_s = time.perf_counter()
    heap = [(start_s + PERIOD_S * k / len(clients), k) for k in range(len(clients))]
    heapq.heapify(heap)
    num_waiting = 0
    while heap or num_waiting:
        now_s = time.perf_counter()
        while heap and heap[0][0] <= now_s:
            due_s, k = heapq.heappop(heap)
            client = clients[k]
            if client.is_waiting:
                result.num_skipped += 1
            else:
                frame = client.frame()
                client.sent_s = time.perf_counter()
                result.late_s.append(client.sent_s - due_s)
                client.connection.sendall(frame)
                client.is_waiting = True
                num_waiting += 1
                result.num_sent += 1
                result.num_batches_sent += client.is_rank
            if due_s + PERIOD_S < start_s + seconds:
                heapq.heappush(heap, (due_s + PERIOD_S, k))
        pause_s = heap[0][0] - time.perf_counter() if heap else 1.0
        for key, _ in selector.select(max(0.0, pause_s)):
            client = key.data
            client.received += client.connection.recv(1 << 20)
            status = client.has_answer()
            if status is not None:
                result.latencies_s.append(time.perf_counter() - client.sent_s)
                result.statuses[status] = result.statuses.get(status, 0) + 1
                result.num_batches_acknowledged += client.is_rank and status == 200
                client.is_waiting = False
                num_waiting -= 1
    selector.close()
    return result


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, round(q * (len(values) - 1)))]


def iterations_recorded(daemon: DaemonProcess) -> int:
    with contextlib.closing(sqlite3.connect(daemon.database_path)) as database:
        return int(database.execute("SELECT count(*) FROM iterations").fetchone()[0])


@contextlib.contextmanager
def flooded(daemon: DaemonProcess) -> Iterator[None]:
    """Let user 12345 ask without pause."""
    for path in (daemon.socket_path, *list(daemon.socket_path.parents)[:-1]):
        path.chmod(path.stat().st_mode | (0o006 if path.is_socket() else 0o001))
    flooder = subprocess.Popen(
        [sys.executable, "-I", "-c", FLOODER, str(daemon.socket_path), "12345"], stdout=subprocess.PIPE
    )
    assert flooder.stdout is not None
    flooder.stdout.readline()
    try:
        yield
    finally:
        flooder.send_signal(signal.SIGKILL)
        flooder.wait()


def measure(options: argparse.Namespace, folder: Path) -> int:
    daemon = DaemonProcess(folder, num_gpus=options.gpus, overrides={"sample_period_s": 0.1})
    profile_path = folder / "profile.json"
    daemon.prologue = PROFILED if options.profile else ""
    os.environ["LOAD_PROFILE"] = str(profile_path)
    daemon.start()
    clients = clients_of(daemon, options.clients, options.gpus)
    drive(clients, min(5.0, options.seconds))  # warm: buffers at their size, baselines measured
    memory_before, cpu_before, at_s = resident_kib(daemon.pid), cpu_s(daemon.pid), time.perf_counter()
    recorded_before = sum(client.index for client in clients if client.is_rank)
    with flooded(daemon) if options.flood else contextlib.nullcontext():
        result = drive(clients, options.seconds)
    cpu, elapsed_s = cpu_s(daemon.pid) - cpu_before, time.perf_counter() - at_s
    memory_after = resident_kib(daemon.pid)
    for client in clients:
        client.connection.close()
    daemon.stop()
    num_recorded = iterations_recorded(daemon) - recorded_before
    summary = {
        "clients": options.clients,
        "gpus": options.gpus,
        "seconds": round(elapsed_s, 1),
        "requests": result.num_sent,
        "turns_skipped": result.num_skipped,
        "statuses": result.statuses,
        "batches_sent": result.num_batches_sent,
        "batches_acknowledged": result.num_batches_acknowledged,
        "batches_recorded": num_recorded,
        "p50_ms": round(1e3 * quantile(result.latencies_s, 0.5), 2),
        "p99_ms": round(1e3 * quantile(result.latencies_s, 0.99), 2),
        "max_ms": round(1e3 * max(result.latencies_s), 2),
        "generator_late_p99_ms": round(1e3 * quantile(result.late_s, 0.99), 2),
        "core_cpu_ratio": round(cpu / elapsed_s, 3),
        "core_cpu_ms_per_request": round(1e3 * cpu / result.num_sent, 3),
        "memory_growth_kib": memory_after - memory_before,
        "is_flooded": options.flood,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "cpus": os.cpu_count(),
    }
    print(json.dumps(summary) if options.json else "\n".join(f"{key:26} {value}" for key, value in summary.items()))
    if options.profile:
        rows = sorted(json.loads(profile_path.read_text()).items(), key=lambda row: -row[1][1])
        print(f"\n{'callback':60} {'times':>8} {'ms each':>8} {'ms in all':>10} {'ms at most':>10} {'> 5 ms':>7}")
        for name, (count, total_ns, most_ns, num_long) in rows[:24]:
            print(
                f"{name[:60]:60} {count:8} {total_ns / count / 1e6:8.3f} {total_ns / 1e6:10.1f} {most_ns / 1e6:10.2f}"
                f" {num_long:7}"
            )
    is_complete = result.num_batches_sent == result.num_batches_acknowledged == num_recorded
    return 0 if is_complete else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--flood", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        return measure(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
