"""Kill, hang, restart and stop the installed units under a real systemd: time until every GPU is restored.

    python benchmarks/runs/systemd_faults.py --rounds 5 [--json]

Boots a systemd in namespaces (needs root, the Debian package systemd and the checkout) with the units as `gpuenergyd
install` writes them, simulated GPUs and a job that holds clocks lowered. Each figure is the time from the fault to the
last GPU restored, read from the shared simulated world; it includes `enter`, the time to get a signal into the host.
Limits:
0.5 s after a kill, WatchdogSec + 1 s after a hang.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.installed_daemon import CORE, WORKER, InstalledDaemon, installed_daemon
from tests.support.systemd_host import why_not
from tests.support.waiting import wait_until

_KILL_LIMIT_S = 0.5
_WATCHDOG_S = {CORE: 10.0, WORKER: 5.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    times_s: dict[str, list[float]] = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        started_s = time.monotonic()
        with installed_daemon(Path(folder)) as daemon:
            times_s["boot to the first answer"] = [time.monotonic() - started_s]
            for name, fault in _faults(daemon).items():
                times_s[name] = [_one(daemon, fault) for _ in range(options.rounds)]
    limits_s = {
        "core killed": _KILL_LIMIT_S,
        "worker killed": _KILL_LIMIT_S,
        "core hangs": _WATCHDOG_S[CORE] + 1.0,
        "worker hangs": _WATCHDOG_S[WORKER] + 1.0,
    }
    rows: list[dict[str, Any]] = [
        {
            "what": name,
            "median_s": median(values),
            "max_s": max(values),
            "rounds": len(values),
            "limit_s": limits_s.get(name),
        }
        for name, values in times_s.items()
    ]
    if options.json:
        print(json.dumps({"machine": platform.platform(), "load": load, "rows": rows}))
    else:
        print(f"{platform.platform()}, {os.cpu_count()} CPUs, load {load:.1f} at the start")
        for row in rows:
            limit = f", limit {row['limit_s']:g} s" if row["limit_s"] else ""
            print(f"{row['what']}: median {row['median_s']:.3f} s, max {row['max_s']:.3f} s of {row['rounds']}{limit}")
    return 1 if any(row["limit_s"] is not None and row["max_s"] > row["limit_s"] for row in rows) else 0


def _faults(daemon: InstalledDaemon) -> dict[str, Callable[[], float]]:
    def signalled(unit: str, number: signal.Signals) -> float:
        return daemon.seconds_until_restored(daemon.kill(unit, number), 60.0)

    def enter() -> float:
        before_ns = time.monotonic_ns()
        daemon.host.run("kill", "-0", "1")
        return (time.monotonic_ns() - before_ns) / 1e9

    def restart() -> float:
        """Return how long the daemon was down; clocks must not change."""
        before_ns = time.monotonic_ns()
        run = subprocess.Popen(daemon.host.command("systemctl", "restart", CORE))
        is_kept = True
        while run.poll() is None:
            is_kept &= daemon.is_lowered()
        daemon.status()
        if not is_kept:
            raise SystemExit("a restart restored clocks")
        return (time.monotonic_ns() - before_ns) / 1e9

    def stop() -> float:
        before_ns = time.monotonic_ns()
        daemon.host.systemctl("stop", CORE)
        return daemon.seconds_until_restored(before_ns)

    return {
        "enter": enter,
        "core killed": lambda: signalled(CORE, signal.SIGKILL),
        "worker killed": lambda: signalled(WORKER, signal.SIGKILL),
        "core hangs": lambda: signalled(CORE, signal.SIGSTOP),
        "worker hangs": lambda: signalled(WORKER, signal.SIGSTOP),
        "restart that keeps lease and plan, until it answers": restart,
        "stop": stop,
    }


def _one(daemon: InstalledDaemon, fault: Callable[[], float]) -> float:
    daemon.host.systemctl("reset-failed")
    wait_until(lambda: daemon.is_ready() and daemon.is_as_found(), 60)
    with daemon.lowered():
        return fault()


if __name__ == "__main__":
    sys.exit(main())
