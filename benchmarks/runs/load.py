"""Daemon under load: 64 clients and 16 simulated GPUs at 10 requests a second each, optionally with a flood.

    python benchmarks/runs/load.py                 # 60 s: 16 ranks report iterations, 48 clients read status
    python benchmarks/runs/load.py --gpus 64       # all 64 clients are ranks
    python benchmarks/runs/load.py --flood requests|connections|visits  # another user floods the daemon (needs root)
    python benchmarks/runs/load.py --compare       # floods with and without fair queueing, alternating
    python benchmarks/runs/load.py --profile       # CPU time per callback of the daemon's event loop

The load generator is one process with raw sockets and prepared requests; its own CPU share is printed. Latency is
measured from sending a request to the last byte of the reply, per ten-second window and overall. Inside the daemon it
is measured again from the bytes read to the reply written, together with the turns of the event loop (see
daemon_instruments.py). A batch counts as lost if it is not acknowledged or not in the history afterwards. CPU times
hardly depend on other load on the machine; latencies do.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gpuenergyd.client.connection import DaemonClient  # noqa: E402  this checkout
from tests.support.daemon_process import DaemonProcess  # noqa: E402
from tests.support.processes import child_pids  # noqa: E402
from tests.support.registration import one_stage_registration  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

PERIOD_S = 0.1
WARM_S = 130.0
"""Warm-up: every job has its baseline and a full iteration history, every GPU two minutes of raw samples."""
MEMORY_S = 60.0
"""Runs at least this long check whether memory stays flat, and therefore warm up first."""
MICROBATCHES = 8
WATCHED = (b"/v1/status", b"/v1/metrics", b"/time", b"/gpu/get_power_limit?gpu_ids=0")
FLOODER = """
import os, select, socket, sys
path, uid, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.setgroups([]); os.setgid(uid); os.setuid(uid)
ask = b"GET /v1/status HTTP/1.1\\r\\nHost: x\\r\\n"
def connected():
    s = socket.socket(socket.AF_UNIX); s.connect(path); return s
sockets = [connected() for _ in range({"requests": 8, "connections": 400, "visits": 0}[kind])]
frame = (ask + b"\\r\\n") * (8 if kind == "requests" else 1)
print("flooding", flush=True)
poller = select.epoll()
by_number = {s.fileno(): s for s in sockets}
for s in sockets:
    poller.register(s, select.EPOLLIN)
    s.sendall(frame)
while kind == "visits":
    s = connected(); s.sendall(ask + b"Connection: close\\r\\n\\r\\n"); s.recv(1 << 20); s.close()
while True:
    for number, _ in poller.poll():
        s = by_number[number]
        s.recv(1 << 20)
        s.sendall(frame)
"""
MAX_P99_MS = 20.0
"""For requests without a flood, at the client."""
FLOODS = ("requests", "connections", "visits")
"""Eight connections with eight pipelined requests each; 400 connections with one each; a new connection per request."""
WINDOW_S = 10.0
PAIRS = 3
INSTRUMENTED = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks" / "runs")!r})
sys.path.insert(0, {str(ROOT)!r})
import daemon_instruments
daemon_instruments.install()
"""


@dataclass(slots=True)
class Client:
    """A connection and the request that it repeats."""

    connection: socket.socket
    is_rank: bool
    frames: tuple[bytes, ...] = ()
    path: str = "/v1/iterations"
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
        """Return the status code of a complete reply and drop the reply."""
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
    """Measurements of one run."""

    latencies_s: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the start, latency in seconds) of each reply."""
    of_path_s: dict[str, list[float]] = field(default_factory=dict)
    """Latencies by the path of the request."""
    late_s: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    num_sent: int = 0
    num_batches_sent: int = 0
    num_batches_acknowledged: int = 0
    num_skipped: int = 0
    generator_cpu_s: float = 0.0
    resident_kib: list[int] = field(default_factory=list)
    """The daemon's memory at the start of each window."""

    def all_s(self) -> list[float]:
        return [latency_s for _, latency_s in self.latencies_s]

    def windows_s(self) -> list[list[float]]:
        """Return the latencies of each window with enough replies for a percentile."""
        windows: dict[int, list[float]] = {}
        for at_s, latency_s in self.latencies_s:
            windows.setdefault(int(at_s // WINDOW_S), []).append(latency_s)
        return [window for _, window in sorted(windows.items()) if len(window) >= 100]


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


def register(daemon: DaemonProcess, number: int) -> str:
    client = DaemonClient(str(daemon.socket_path))
    answer = client.post(
        "/v1/ranks",
        one_stage_registration(
            daemon.status()["gpus"][number]["gpu_uuid"],
            f"load-{number}",
            num_microbatches=MICROBATCHES,
            order=[["FB"[k % 2], k // 2, 0] for k in range(2 * MICROBATCHES)],
            policy="full-speed",
        ),
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
        else:
            client.path = watched.partition(b"?")[0].decode()
        client.connection.setblocking(False)
        clients.append(client)
    return clients


def drive(clients: list[Client], seconds: float, watched_pid: int | None = None) -> Result:
    """Let every client send ten requests a second, evenly spread; a client that still waits skips one."""
    result = Result()
    cpu_before_s = time.process_time()
    selector = selectors.EpollSelector()
    for client in clients:
        selector.register(client.connection, selectors.EVENT_READ, client)
    start_s = time.perf_counter()
    heap = [(start_s + PERIOD_S * k / len(clients), k) for k in range(len(clients))]
    heapq.heapify(heap)
    num_waiting = 0
    while heap or num_waiting:
        now_s = time.perf_counter()
        if watched_pid is not None and now_s - start_s >= WINDOW_S * len(result.resident_kib):
            result.resident_kib.append(resident_kib(watched_pid))
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
                now_s = time.perf_counter()
                result.latencies_s.append((now_s - start_s, now_s - client.sent_s))
                result.of_path_s.setdefault(client.path, []).append(now_s - client.sent_s)
                result.statuses[status] = result.statuses.get(status, 0) + 1
                result.num_batches_acknowledged += client.is_rank and status == 200
                client.is_waiting = False
                num_waiting -= 1
    selector.close()
    result.generator_cpu_s = time.process_time() - cpu_before_s
    return result


def cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_by_part_s(pid: int) -> dict[str, float]:
    """Return the CPU time so far of the daemon's event loop, its other threads and its child processes."""
    loop_s = cpu_s(Path(f"/proc/{pid}/task/{pid}/stat"))
    children_s = sum(cpu_s(Path(f"/proc/{child}/stat")) for child in child_pids(pid))
    return {"loop": loop_s, "threads": cpu_s(Path(f"/proc/{pid}/stat")) - loop_s, "children": children_s}


def resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, round(q * (len(values) - 1)))]


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def iterations_recorded(daemon: DaemonProcess) -> int:
    with contextlib.closing(sqlite3.connect(daemon.database_path)) as database:
        return int(database.execute("SELECT count(*) FROM iterations").fetchone()[0])


@contextlib.contextmanager
def flooded(daemon: DaemonProcess, kind: str) -> Iterator[None]:
    """Let user 12345 send requests without pause."""
    for path in (daemon.socket_path, *list(daemon.socket_path.parents)[:-1]):
        path.chmod(path.stat().st_mode | (0o006 if path.is_socket() else 0o001))
    flooder = subprocess.Popen(
        [sys.executable, "-I", "-c", FLOODER, str(daemon.socket_path), "12345", kind], stdout=subprocess.PIPE
    )
    assert flooder.stdout is not None
    flooder.stdout.readline()
    try:
        yield
    finally:
        flooder.send_signal(signal.SIGKILL)
        flooder.wait()


def look_inside(daemon: DaemonProcess, path: Path) -> dict[str, Any]:
    """Return the instruments' figures since they were last read."""
    path.unlink(missing_ok=True)
    os.kill(daemon.pid, signal.SIGUSR2)
    wait_until(path.exists, 60)
    seen: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return seen


def measure(options: argparse.Namespace, folder: Path, *, flood: str | None, prologue: str = "") -> dict[str, Any]:
    """Run one daemon under load; return the figures."""
    daemon = DaemonProcess(folder, num_gpus=options.gpus, overrides={"sample_period_s": 0.1})
    daemon.prologue = INSTRUMENTED + prologue
    os.environ["LOAD_INSTRUMENTS"] = str(folder / "instruments.json")
    daemon.start()
    clients = clients_of(daemon, options.clients, options.gpus)
    drive(clients, WARM_S if options.seconds >= MEMORY_S else options.seconds)
    look_inside(daemon, folder / "instruments.json")
    memory_before, cpu_before, at_s = resident_kib(daemon.pid), cpu_by_part_s(daemon.pid), time.perf_counter()
    recorded_before = sum(client.index for client in clients if client.is_rank)
    with flooded(daemon, flood) if flood else contextlib.nullcontext():
        result = drive(clients, options.seconds, daemon.pid)
    cpu_after, elapsed_s = cpu_by_part_s(daemon.pid), time.perf_counter() - at_s
    memory_after = resident_kib(daemon.pid)
    inside = look_inside(daemon, folder / "instruments.json")
    for client in clients:
        client.connection.close()
    daemon.stop()
    if options.profile:
        print(daemon.log[daemon.log.find("callback  ") :], file=sys.stderr)
    num_recorded = iterations_recorded(daemon) - recorded_before
    cpu = {part: cpu_after[part] - cpu_before[part] for part in cpu_before}
    of_windows = [ms(quantile(window, 0.99)) for window in result.windows_s()]
    return {
        "clients": options.clients,
        "gpus": options.gpus,
        "flood": flood,
        "seconds": round(elapsed_s, 1),
        "requests": result.num_sent,
        "turns_skipped": result.num_skipped,
        "statuses": result.statuses,
        "batches_sent": result.num_batches_sent,
        "batches_acknowledged": result.num_batches_acknowledged,
        "batches_recorded": num_recorded,
        "p50_ms": ms(quantile(result.all_s(), 0.5)),
        "p99_ms": ms(quantile(result.all_s(), 0.99)),
        "p99_ms_of_windows": of_windows,
        "p99_ms_median_window": median(of_windows) if of_windows else None,
        "p99_ms_of_paths": {path: ms(quantile(own, 0.99)) for path, own in sorted(result.of_path_s.items())},
        "max_ms": ms(max(result.all_s())),
        **inside,
        "generator_late_p99_ms": ms(quantile(result.late_s, 0.99)),
        "generator_cpu_ratio": round(result.generator_cpu_s / elapsed_s, 3),
        **{f"core_{part}_cpu_ratio": round(used_s / elapsed_s, 3) for part, used_s in cpu.items()},
        "core_cpu_ms_per_request": round(1e3 * (cpu["loop"] + cpu["threads"]) / result.num_sent, 3),
        "memory_growth_kib": memory_after - memory_before,
        "memory_kib_of_windows": [*result.resident_kib, memory_after],
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "cpus": os.cpu_count(),
    }


def is_complete(figures: Mapping[str, Any]) -> bool:
    """Return whether no batch was lost."""
    return bool(figures["batches_sent"] == figures["batches_acknowledged"] == figures["batches_recorded"])


def show(figures: Mapping[str, Any], *, as_json: bool) -> None:
    print(json.dumps(figures) if as_json else "\n".join(f"{key:26} {value}" for key, value in figures.items()))
    load = figures["load_average"][0]
    if load > figures["cpus"] + 1:
        print(f"load average {load}: other processes affect the latencies", file=sys.stderr)


def of_inside(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [run[name]["p99_ms"] for run in runs]


def compare(options: argparse.Namespace, folder: Path) -> int:
    """Flood daemons with and without fair queueing, alternating, and show how long another user waits."""
    ways = {"with": "", "without": "daemon_instruments.disable_fair_queueing()\n"}
    options.seconds = min(options.seconds, WINDOW_S)
    are_complete = True
    for kind in FLOODS if options.flood is None else (options.flood,):
        figures: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for pair in range(PAIRS):
            for way, prologue in ways.items():
                run = measure(options, folder / f"{kind}-{way}-{pair}", flood=kind, prologue=prologue)
                are_complete &= is_complete(run)
                figures[way].append(run)
        summary = {
            "flood": kind,
            "pairs": PAIRS,
            "seconds_each": options.seconds,
            **{f"p99_ms_{way}": [run["p99_ms"] for run in runs] for way, runs in figures.items()},
            **{f"p50_ms_{way}": [run["p50_ms"] for run in runs] for way, runs in figures.items()},
            **{f"inside_cpu_p99_ms_{way}": of_inside(runs, "requests_inside_cpu") for way, runs in figures.items()},
            **{f"turn_cpu_p99_ms_{way}": of_inside(runs, "turns_cpu") for way, runs in figures.items()},
            **{
                f"others_answered_first_p99_{way}": [run["others_answered_first"]["p99"] for run in runs]
                for way, runs in figures.items()
            },
            "load_average": [round(load, 1) for load in os.getloadavg()],
            "cpus": os.cpu_count(),
        }
        show(summary, as_json=options.json)
    return 0 if are_complete else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--flood", choices=FLOODS)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        if options.compare:
            return compare(options, Path(folder))
        profiling = "daemon_instruments.profile_callbacks()\n" if options.profile else ""
        figures = measure(options, Path(folder), flood=options.flood, prologue=profiling)
    show(figures, as_json=options.json)
    is_fast = options.flood is not None or figures["p99_ms"] <= MAX_P99_MS
    return 0 if is_complete(figures) and is_fast else 1


if __name__ == "__main__":
    sys.exit(main())
