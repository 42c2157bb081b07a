"""A daemon's status with three jobs, and a Unix socket that serves it to the dashboard."""

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

from tests.support.http_handler import QuietHandler

_CLOCKS_MHZ = (1080, 1140, 1230, 1410, 1410, 1365, 1410, None)
_BASELINE_S = 1.98
_POWERS_W = (211.0, 224.0, 236.0, 271.0, 264.0, 258.0, 342.0, 57.0)


def sample_status(elapsed_s: float = 0.0) -> dict[str, Any]:
    """Return the status of eight simulated GPUs: a pipeline that saves, a loop that does not, one being profiled."""
    jobs = [
        _job(
            "gpt-2.6b", "tuned", "slack on 3 of 4 stages", num_ranks=4, num_iterations=1460,
            saving=(0.134, 0.131, 0.137), slowdown=(-0.002, -0.004, 0.000),
        ),
        _job(
            "llama-ddp", "tuned", "1365 MHz within the permitted slowdown", num_ranks=2, num_iterations=612,
            saving=(0.006, -0.003, 0.015), slowdown=(0.008, 0.003, 0.013), max_slowdown=0.01,
        ),
        _job("resnet", "trial", "trying 1230 MHz", num_ranks=1, num_iterations=37),
    ]  # fmt: skip
    owners = [0, 0, 0, 0, 1, 1, 2, None]
    gpus = [
        {
            "gpu_uuid": f"GPU-{index}",
            "index": index,
            "model_name": "NVIDIA A100-SXM4-40GB (simulated)",
            "is_simulated": True,
            "state": "ok",
            "sm_clock_mhz": clock_mhz or 210,
            "requested_sm_clock_mhz": clock_mhz if clock_mhz != 1410 else None,
            "power_w": power_w * (1.0 + 0.13 * math.sin(elapsed_s / 4.0) + 0.03 * math.sin(elapsed_s + index)),
            "total_energy_j": 1e6 * (index + 1),
            "temperature_celsius": 41.0 + power_w / 12.0,
            "reading_age_s": 0.1,
            "switching": {"basis": "measured", "raise_s": 0.0061, "lower_s": 0.0053},
            "job_id": jobs[owner]["job_id"] if owner is not None else None,
            "administrator_lease": None,
            "zeusd_client_lease": None,
            "calibration_lease": None,
        }
        for index, (clock_mhz, power_w, owner) in enumerate(zip(_CLOCKS_MHZ, _POWERS_W, owners, strict=True))
    ]
    return {
        "version": "0.3.0",
        "pid": 4711,
        "uptime_s": 5400.0 + elapsed_s,
        "is_degraded": False,
        "degraded_reasons": [],
        "driver": "simulated",
        "mode": "control",
        "gpus": gpus,
        "jobs": jobs,
        "ended_jobs": [
            {
                "job_id": "bert-1",
                "job_name": "bert",
                "ended_age_s": 95.0 + elapsed_s,
                "outcome": "too_early",
                "outcome_reason": "ended while trying settings, after 21 iterations",
                "summary": "ended while trying settings, after 21 iterations",
            }
        ],
        "carbon": None,
        "watts_saved_w": jobs[0]["watts_saved"],
        "watts_saved_interval": jobs[0]["watts_saved_interval"],
    }


def _job(
    name: str,
    phase: str,
    reason: str,
    *,
    num_ranks: int,
    num_iterations: int,
    saving: tuple[float, float, float] | None = None,
    slowdown: tuple[float, float, float] | None = None,
    max_slowdown: float = 0.0,
) -> dict[str, Any]:
    def estimate(of: tuple[float, float, float] | None) -> float | None:
        return of[0] if of else None

    baseline_j = 540.0 * num_ranks
    saved_w = None
    if saving and slowdown:
        power_w = baseline_j / (_BASELINE_S * (1 + slowdown[0]))
        saved_w = (power_w * saving[0], power_w * saving[1], power_w * saving[2])
    return {
        "job_id": f"{name}-1",
        "job_name": name,
        "phase": phase,
        "phase_reason": None,
        "policy": "bubble-aware",
        "schedule": "1f1b" if num_ranks > 2 else "loop",
        "num_ranks": num_ranks,
        "num_microbatches": 8 if num_ranks > 2 else 1,
        "num_iterations": num_iterations,
        "plan_id": "plan-1",
        "plan_reason": reason,
        "baseline_time_s": _BASELINE_S,
        "baseline_energy_j": baseline_j,
        "num_baseline_iterations": 40,
        "iteration_time_s": _BASELINE_S * (1 + slowdown[0]) if slowdown else None,
        "energy_j": baseline_j * (1 - saving[0]) if saving else None,
        "num_tuned_iterations": num_iterations - 120 if saving else 0,
        "num_profile_iterations": 0,
        "num_trial_iterations": 24,
        "saving_ratio": estimate(saving),
        "saving_interval": saving[1:] if saving else None,
        "slowdown_ratio": estimate(slowdown),
        "slowdown_interval": slowdown[1:] if slowdown else None,
        "is_saving_significant": (saving[1] > 0 or saving[2] < 0) if saving else None,
        "watts_saved": estimate(saved_w),
        "watts_saved_interval": saved_w[1:] if saved_w else None,
        "max_slowdown_ratio": max_slowdown,
        "predicted_energy_j": None,
        "predicted_saving_ratio": None,
        "lower_bound_j": None,
    }


@contextmanager
def status_socket(folder: Path) -> Iterator[str]:
    """Serve the sample status on a Unix socket as a daemon does; yield the path of the socket."""
    begun_s = time.monotonic()

    class Handler(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802  the name that http.server calls it by
            self.send_json(json.dumps(sample_status(time.monotonic() - begun_s)).encode())

    path = str(folder / "daemon.sock")
    with ThreadingUnixStreamServer(path, Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield path
        finally:
            server.shutdown()
            thread.join()
