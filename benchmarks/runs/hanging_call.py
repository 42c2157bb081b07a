"""Latency of `GET /v1/status` and delay of other GPUs' restores while a driver call of the worker does not return.

    python benchmarks/runs/hanging_call.py [--seconds 14] [--json]

Eight simulated GPUs through the real NVML binding and the tests' fake driver library, with the usual time limits of the
daemon. Needs the checkout and a C compiler.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.daemon_process import DaemonProcess, training
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.fake_nvml.library import build_library
from tests.support.waiting import wait_until

STUCK_INDEX = 2
NUM_GPUS = 8
MAX_REPLY_S = 0.1
MAX_RESTORE_S = 2.0
FULL_MHZ = 1410
HANGS_S = 60.0
_LOWERED_LIMIT_S = 120.0


def main() -> int:
    """Run and print; return 1 if a reply or a restore took too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=14.0, help="duration of the requests; the worker gives the GPU up after 10 s"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.seconds)
    print(json.dumps(figures) if options.json else "\n".join(f"{name:<20}{value}" for name, value in figures.items()))
    is_met = figures["max_s"] <= MAX_REPLY_S and figures["others_restored_max_s"] <= MAX_RESTORE_S
    return 0 if is_met else 1


def measure(seconds: float) -> dict[str, Any]:
    """Return all figures."""
    return {**measure_replies(seconds), **measure_restores()}


@contextmanager
def running_daemon() -> Iterator[tuple[DaemonProcess, FakeNvmlControl]]:
    """Run a daemon on the fake driver library."""
    with tempfile.TemporaryDirectory(prefix="hanging-call-") as folder:
        daemon = DaemonProcess(Path(folder), NUM_GPUS, {"driver": "nvml", "mode": "control"})
        os.environ["LD_LIBRARY_PATH"] = str(build_library())
        os.environ["GPUENERGYD_FAKE_NVML_WORLD"] = str(daemon.world_path)
        with FakeNvmlControl(daemon.world_path) as control:
            control.set_privileged(True)
            daemon.start()
            try:
                wait_until(lambda: all(gpu["reading_age_s"] is not None for gpu in daemon.status()["gpus"]))
                yield daemon, control
            finally:
                daemon.stop()


def measure_restores() -> dict[str, Any]:
    """Kill a training while a set call of one of its GPUs hangs; return when the last of the others was restored."""
    with running_daemon() as (daemon, control):
        options = ("--ranks", str(NUM_GPUS), "--policy", "uniform")
        with training(daemon, arguments=options) as run:
            wait_until(
                lambda: all(lock is not None and lock < FULL_MHZ for lock in daemon.locks_mhz()), _LOWERED_LIMIT_S
            )
            for function in ("nvmlDeviceSetGpuLockedClocks", "nvmlDeviceResetGpuLockedClocks"):
                control.inject(function, gpu_index=STUCK_INDEX, num_calls=1, delay_s=HANGS_S)
            killed_s = time.monotonic()
            run.kill()
            wait_until(
                lambda: all(lock is None for index, lock in enumerate(daemon.locks_mhz()) if index != STUCK_INDEX),
                _LOWERED_LIMIT_S,
            )
            restored_s = time.monotonic()
        assert daemon.locks_mhz()[STUCK_INDEX] is not None, "its call did not hang"
    return {"others_restored_max_s": round(restored_s - killed_s, 3)}


def measure_replies(seconds: float) -> dict[str, Any]:
    """Return latencies of the replies and the stuck GPU's fields in the last one."""
    with running_daemon() as (daemon, control):
        control.inject("nvmlDeviceGetFieldValues", gpu_index=STUCK_INDEX, num_calls=1, delay_s=HANGS_S)
        latencies_s = []
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            sent_s = time.perf_counter()
            status = daemon.status()
            latencies_s.append(time.perf_counter() - sent_s)
            time.sleep(0.02)
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
