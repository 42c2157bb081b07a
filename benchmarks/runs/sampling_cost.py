"""CPU cost of reading GPUs: GPU worker and daemon while no job runs.

    python benchmarks/runs/sampling_cost.py [--gpus 8] [--seconds 10] [--learning-seconds 25] [--json]

GPUs are simulated. In the kind world a reading costs a lock and a few formulas instead of a driver call, so that this
package's own cost is measured, which the targets are for. In the unkind world a reading takes as long as with a driver,
and the worker learns the update periods of the energy counters one GPU after the other, each within some seconds: what
that costs is measured apart. Needs the checkout.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.daemon_process import DaemonProcess

RATES_HZ = {WorldKind.KIND: (10, 50, 100), WorldKind.UNKIND: (10,)}
LEARNING_RATIOS = {WorldKind.KIND: 0.3, WorldKind.UNKIND: 1.0}
"""Of the time for learning: where readings are fast, all counters are learned at once."""
MAX_RATIOS = {10: 0.03, 100: 0.15}
"""Of one CPU core, in the kind world."""


def main() -> int:
    """Run and print; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--learning-seconds", type=float, default=25.0, help="until the worker knows all counters")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(kind, rate_hz, options) for kind, rates_hz in RATES_HZ.items() for rate_hz in rates_hz]
    if options.json:
        print(json.dumps(rows))
    else:
        print(f"{'world':<8}{'rate':>6}{'learning':>10}{'worker':>10}{'daemon':>10}{'total':>10}   of one CPU core")
        for row in rows:
            print(
                f"{row['world']:<8}{row['rate_hz']:>4.0f}Hz{row['learning_ratio']:>10.2%}{row['worker_ratio']:>10.2%}"
                f"{row['daemon_ratio']:>10.2%}{row['total_ratio']:>10.2%}"
            )
    return 0 if all(row["total_ratio"] <= row["max_total_ratio"] for row in rows if row["max_total_ratio"]) else 1


def measure(kind: WorldKind, rate_hz: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the CPU use of worker and daemon as a share of one CPU core, of both together at first and later."""
    with tempfile.TemporaryDirectory(prefix="sampling-cost-") as folder:
        overrides = {"sample_period_s": 1.0 / rate_hz}
        daemon = DaemonProcess(Path(folder), options.gpus, overrides, kind=kind).start()
        try:
            pids = {"worker": daemon.status()["worker"]["pid"], "daemon": daemon.pid}
            learning = _used_ratios(pids, LEARNING_RATIOS[kind] * options.learning_seconds)
            ratios = _used_ratios(pids, options.seconds)
        finally:
            daemon.stop()
    return {
        "world": kind.value,
        "num_gpus": options.gpus,
        "rate_hz": rate_hz,
        "learning_ratio": sum(learning.values()),
        **{f"{name}_ratio": ratio for name, ratio in ratios.items()},
        "total_ratio": sum(ratios.values()),
        "max_total_ratio": MAX_RATIOS.get(rate_hz) if kind is WorldKind.KIND else None,
    }


def _used_ratios(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Return the share of a core that each process uses in the next seconds."""
    before, begun_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - begun_s
    return {name: (cpu_s(pid) - before[name]) / passed_s for name, pid in pids.items()}


def cpu_s(pid: int) -> float:
    """Return a process's CPU time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
