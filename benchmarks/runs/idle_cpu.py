"""CPU time of daemon and GPU worker with the service of idle GPUs, against a daemon without it.

    python benchmarks/runs/idle_cpu.py [--gpus 8] [--seconds 60] [--learning-seconds 45] [--json]

For h200 and a100-sxm in turn, three daemons run beside each other on the fake driver library, which costs what the
cards cost: without the service (`off`), with hours recorded only (`records`), and with all GPUs lowered (`lowers`). A
process holds every GPU and does nothing, for which the service does most: it lists processes, lowers and measures. CPU
time, not wall time, so other load only scatters it. Target: at most 0.5 % of a core per GPU more than `off`. Needs the
checkout and a C compiler.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sampling_cost import cpu_s

from benchmarks.report.printing import print_figures
from gpuenergyd_sim.driver.host import SimulatedHost
from tests.plugins.idle.idle_kills import SOON
from tests.support.daemon_process import DaemonProcess
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.fake_nvml.library import build_library
from tests.support.waiting import wait_until

MODELS = ("h200", "a100-sxm")
MAX_ADDED_RATIO = 0.005
WITHOUT_SERVICES = (
    "import gpuenergyd.daemon.app as app, gpuenergyd.daemon.api.server as server\n"
    "app.host_services, server.plugin_routes = dict, tuple\n"
)
DAEMONS: dict[str, tuple[str, dict[str, Any]]] = {
    "off": (WITHOUT_SERVICES, {}),
    "records": (SOON, {}),
    "lowers": (SOON, {"service_options": {"idle": {"enabled": True, "after_s": 1.0}}}),
}
"""Prologue and settings of each daemon."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--learning-seconds", type=float, default=45.0, help="until the workers know all counters")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["LD_LIBRARY_PATH"] = str(build_library())
    models = {model: measure(model, options) for model in MODELS}
    figures = {
        "gpus": options.gpus,
        "seconds": options.seconds,
        "added_cpu_max_ratio_per_gpu": max(own["lowers"]["added"] for own in models.values()),
        **{f"cpu_ratio_per_gpu_{model}": own for model, own in models.items()},
    }
    print_figures(figures, is_json=options.json)
    return 0 if figures["added_cpu_max_ratio_per_gpu"] <= MAX_ADDED_RATIO else 1


def measure(model: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the CPU time per second and GPU of daemon and worker, and what they take beyond those of `off`."""
    with ExitStack() as stack:
        daemons: dict[str, DaemonProcess] = {}
        for name, (prologue, settings) in DAEMONS.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"idle-cpu-{name}-")))
            own = {"driver": "nvml", "mode": "control", "sample_period_s": 0.1, **settings}
            daemon = DaemonProcess(folder, options.gpus, own, prologue=prologue, model=model)
            os.environ["GPUENERGYD_FAKE_NVML_WORLD"] = str(daemon.world_path)
            stack.enter_context(FakeNvmlControl(daemon.world_path)).set_privileged(True)
            host = SimulatedHost.open(daemon.world_path)
            stack.callback(host.close)
            for identity in host.identities():
                host.attach_process(identity.gpu_uuid, os.getpid())
            stack.callback(daemon.stop)
            daemons[name] = daemon.start()
        wait_until(lambda: all(lock is not None for lock in daemons["lowers"].locks_mhz()))
        time.sleep(options.learning_seconds)
        pids = {name: (daemon.pid, daemon.status()["worker"]["pid"]) for name, daemon in daemons.items()}
        before_s = {name: [cpu_s(pid) for pid in own] for name, own in pids.items()}
        begun_s = time.monotonic()
        time.sleep(options.seconds)
        after_s = {name: [cpu_s(pid) for pid in own] for name, own in pids.items()}
        gpu_s = options.gpus * (time.monotonic() - begun_s)
    found = {}
    for name in daemons:
        daemon_ratio, worker_ratio = (
            (after - before) / gpu_s for after, before in zip(after_s[name], before_s[name], strict=True)
        )
        found[name] = {"daemon": daemon_ratio, "worker": worker_ratio, "total": daemon_ratio + worker_ratio}
    for own in found.values():
        own["added"] = own["total"] - found["off"]["total"]
    return {name: {part: round(value, 5) for part, value in own.items()} for name, own in found.items()}


if __name__ == "__main__":
    sys.exit(main())
