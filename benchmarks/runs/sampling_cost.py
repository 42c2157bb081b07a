"""CPU cost of reading GPUs: GPU worker and daemon while no job runs.

    python benchmarks/runs/sampling_cost.py [--gpus 8] [--seconds 10] [--json]

GPUs are simulated: a reading costs a lock and a few formulas instead of a driver call. Needs the checkout.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.daemon_process import DaemonProcess

RATES_HZ = (10, 50, 100)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(options.gpus, rate_hz, options.seconds) for rate_hz in RATES_HZ]
    if options.json:
        print(json.dumps(rows))
    else:
        print(f"{'rate':>6}{'worker':>10}{'daemon':>10}{'total':>10}   of one CPU core, {options.gpus} GPUs")
        for row in rows:
            print(
                f"{row['rate_hz']:>4.0f}Hz{row['worker_ratio']:>10.2%}{row['daemon_ratio']:>10.2%}"
                f"{row['total_ratio']:>10.2%}"
            )
    return 0


def measure(num_gpus: int, rate_hz: float, seconds: float) -> dict[str, float]:
    """Return the CPU use of worker and daemon as a share of one CPU core."""
    with tempfile.TemporaryDirectory(prefix="sampling-cost-") as folder:
        daemon = DaemonProcess(Path(folder), num_gpus, {"sample_period_s": 1.0 / rate_hz}).start()
        try:
            pids = {"worker": daemon.status()["worker"]["pid"], "daemon": daemon.pid}
            time.sleep(3.0)  # the worker learns the update periods of the energy counters first
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            begun_s = time.monotonic()
            time.sleep(seconds)
            passed_s = time.monotonic() - begun_s
            ratios = {f"{name}_ratio": (cpu_s(pid) - before[name]) / passed_s for name, pid in pids.items()}
        finally:
            daemon.stop()
    return {"num_gpus": num_gpus, "rate_hz": rate_hz, **ratios, "total_ratio": sum(ratios.values())}


def cpu_s(pid: int) -> float:
    """Return a process's CPU time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
