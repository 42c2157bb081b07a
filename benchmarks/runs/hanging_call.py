"""Latency of `GET /v1/status` while a driver call of the GPU worker does not return.

    python benchmarks/runs/hanging_call.py [--seconds 14] [--json]

Eight simulated GPUs through the real NVML binding and the tests' fake driver library. Needs the checkout and a C
compiler.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.daemon_process import DaemonProcess
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.fake_nvml.library import build_library
from tests.support.waiting import wait_until

STUCK_INDEX = 2
MAX_REPLY_S = 0.1


def main() -> int:
    """Run and print; return 1 if a reply took too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=14.0, help="duration; the worker abandons the call after 10 s")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.seconds)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:<20}{value}" for name, value in figures.items()))
    return 0 if figures["max_s"] <= MAX_REPLY_S else 1


def measure(seconds: float) -> dict[str, Any]:
    """Return latencies of the replies and the stuck GPU's fields in the last one."""
    with tempfile.TemporaryDirectory(prefix="hanging-call-") as folder:
        daemon = DaemonProcess(Path(folder), 8, {"driver": "nvml", "mode": "control"})
        os.environ["LD_LIBRARY_PATH"] = str(build_library())
        os.environ["GPUENERGYD_FAKE_NVML_WORLD"] = str(daemon.world_path)
        with FakeNvmlControl(daemon.world_path) as control:
            control.set_privileged(True)
            daemon.start()
            try:
                wait_until(lambda: all(gpu["reading_age_s"] is not None for gpu in daemon.status()["gpus"]))
                control.inject("nvmlDeviceGetFieldValues", gpu_index=STUCK_INDEX, num_calls=1, delay_s=60.0)
                latencies_s = []
                until_s = time.monotonic() + seconds
                while time.monotonic() < until_s:
                    sent_s = time.perf_counter()
                    status = daemon.status()
                    latencies_s.append(time.perf_counter() - sent_s)
                    time.sleep(0.02)
            finally:
                daemon.stop()
    stuck = status["gpus"][STUCK_INDEX]
    return {
        "num_answers": len(latencies_s),
        "median_s": round(statistics.median(latencies_s), 4),
        "p99_s": round(statistics.quantiles(latencies_s, n=100)[98], 4),
        "max_s": round(max(latencies_s), 4),
        "state": stuck["state"],
        "reading_age_s": round(stuck["reading_age_s"], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
