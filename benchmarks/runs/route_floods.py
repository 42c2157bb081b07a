"""Latency of other users, and heartbeats lost, while one user or 40 flood every route of the daemon.

    python benchmarks/runs/route_floods.py [--seconds 20] [--ranks 16] [--period 0.5] [--json]

The flood is one process with eight connections per user id, limited to half a core; as root it connects with 40 user
ids, else with its own. Another user's ranks report meanwhile, and as many clients read (load.py); with 200 ranks use
`--period 5`. Latencies include the time in which other programs have the CPUs: the load is printed.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import load

from gpuenergyd.daemon.api.routes import ROUTES
from tests.support.daemon_process import DaemonProcess

MAX_P99_MS = 100.0
FLOODING_UIDS = {"one user": 1, "40 users": 40}
FIRST_UID = 20_000
CONNECTIONS_PER_UID = 8
MAX_CPU_RATIO = 0.5
LOST = ("does not answer", "no heartbeat from the daemon", "did not answer within", "did not reply to Ping")
FLOODER = f"""
import json, os, select, signal, socket, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started this in the background
path, num_uids, frames = sys.argv[1], int(sys.argv[2]), [f.encode() for f in json.loads(sys.argv[3])]
sockets = {{}}
poller = select.epoll()
for k in range(num_uids):
    if os.getuid() == 0:
        os.seteuid({FIRST_UID} + k)
    for _ in range({CONNECTIONS_PER_UID}):
        s = socket.socket(socket.AF_UNIX); s.connect(path); sockets[s.fileno()] = [s, len(sockets)]
        poller.register(s, select.EPOLLIN)
    os.seteuid(os.getuid())
num_replies, began_s, cpu_before_s = 0, time.monotonic(), time.process_time()
def send(entry):
    entry[1] += 1
    entry[0].sendall(frames[entry[1] % len(frames)])
for entry in sockets.values():
    send(entry)
print("flooding", flush=True)
try:
    while True:
        ahead_s = (time.process_time() - cpu_before_s) / {MAX_CPU_RATIO} - (time.monotonic() - began_s)
        if ahead_s > 0:
            time.sleep(ahead_s)
        for number, _ in poller.poll(0.1):
            entry = sockets[number]
            if entry[0].recv(1 << 20):
                num_replies += 1
                send(entry)
            else:  # the daemon closes a connection after some errors
                poller.unregister(number)
        if not num_replies % 100 and os.getppid() == 1:
            break
except KeyboardInterrupt:
    print(num_replies, round((time.process_time() - cpu_before_s) / (time.monotonic() - began_s), 2), flush=True)
"""


def main() -> int:
    """Run and print; return 1 if another user waited too long or a heartbeat was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each flood")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--period", type=float, default=0.5, help="time between a client's requests, in s")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    load.PERIOD_S = options.period
    figures = measure(options.seconds, options.ranks)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:<24}{value}" for name, value in figures.items()))
    return 0 if figures["flood_p99_ms"] <= MAX_P99_MS and not figures["heartbeats_lost"] else 1


def measure(seconds: float, num_ranks: int) -> dict[str, Any]:
    """Return the figures without a flood and under each one."""
    with tempfile.TemporaryDirectory(prefix="route-floods-") as folder:
        daemon = DaemonProcess(Path(folder), num_ranks, {"sample_period_s": 0.1})
        daemon.start()
        try:
            clients = load.clients_of(daemon, 2 * num_ranks, num_ranks)
            quiet = load.drive(clients, seconds / 2)
            floods = {name: flooded(daemon, clients, num_uids, seconds) for name, num_uids in FLOODING_UIDS.items()}
            status = daemon.status()
            lost = sum(daemon.log.count(text) for text in LOST)
            for client in clients:
                client.connection.close()
        finally:
            daemon.stop()
    return {
        "ranks": num_ranks,
        "quiet_p99_ms": load.ms(load.quantile(quiet.all_s(), 0.99)),
        "flood_p99_ms": max(flood["p99_ms"] for flood in floods.values()),
        "heartbeats_lost": lost + status["worker"]["num_restarts"] + status["policy_host"]["num_restarts"],
        "floods": floods,
        "load_average": [round(average, 1) for average in os.getloadavg()],
        "cpus": os.cpu_count(),
    }


def flooded(daemon: DaemonProcess, clients: list[load.Client], num_uids: int, seconds: float) -> dict[str, Any]:
    """Return another user's latencies during a flood."""
    with flooding(daemon, num_uids) as flooder:
        result = load.drive(clients, seconds)
        flooder.send_signal(signal.SIGINT)
        assert flooder.stdout is not None
        num_replies, cpu_ratio = flooder.stdout.readline().split()
    return {
        "uids": num_uids if os.getuid() == 0 else 1,
        "p50_ms": load.ms(load.quantile(result.all_s(), 0.5)),
        "p99_ms": load.ms(load.quantile(result.all_s(), 0.99)),
        "max_ms": load.ms(max(result.all_s())),
        "requests": result.num_sent,
        "skipped": result.num_skipped,
        "statuses": result.statuses,
        "flood_replies": int(num_replies),
        "flood_cpu_ratio": float(cpu_ratio),
    }


@contextlib.contextmanager
def flooding(daemon: DaemonProcess, num_uids: int) -> Iterator[subprocess.Popen[str]]:
    """Let users send requests to every route as fast as half a core permits."""
    for path in (daemon.socket_path, *list(daemon.socket_path.parents)[:-1]):
        path.chmod(path.stat().st_mode | (0o066 if path.is_socket() else 0o011))
    flooder = subprocess.Popen(
        [sys.executable, "-I", "-c", FLOODER, str(daemon.socket_path), str(num_uids), json.dumps(frames(daemon))],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert flooder.stdout is not None
    try:
        assert flooder.stdout.readline() == "flooding\n"
        yield flooder
    finally:
        flooder.kill()
        flooder.wait()
        flooder.stdout.close()


def frames(daemon: DaemonProcess) -> list[str]:
    """Return a request to every route, and to some of zeusd's and to none."""
    job_id = daemon.status()["jobs"][0]["job_id"]
    calls = [("GET", path, "") for path in ("/time", "/gpu/get_power_limit?gpu_ids=0", "/v1/none")]
    for route in ROUTES:
        path = route.path.replace("{job_id}", job_id).replace("{calibration_id}", "none")
        calls.append((route.method, path, "" if route.request is None else "{}"))
    return [
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        for method, path, body in calls
    ]


if __name__ == "__main__":
    sys.exit(main())
