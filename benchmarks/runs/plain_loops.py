"""Saving of plain data-parallel loops by phases: DDP, FSDP2, Hugging Face and Lightning as installed.

    python benchmarks/runs/plain_loops.py [--loops ddp fsdp2 ...] [--iterations 200] [--repeats 1]
        [--gpu-model h200] [--json]

Each loop trains on two ranks over gloo, on simulated GPUs (A100s by default) whose phases differ in memory-boundness
(tests/support/phase_training.py), three times: joined by `gpuenergyd run` with no permitted slowdown, without a daemon,
and joined with 2 %. No program marks anything. Compared are the exact energies of the GPUs and the times of the last
iterations, and all losses, bit by bit. Times are real: run it on a quiet host. Two of the loops need `make frameworks`.
Beside the savings stand those of the best plan from the exact tables, if clocks changed at once: no plan saves more.
Of other GPU models as large a share of that is wanted as of A100s.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd_sim.driver.device_model import blocking_power_w
from gpuenergyd_sim.driver.device_parameters import MODELS, device_parameters
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_sim.virtual_training.work import ModelWork
from gpuenergyd_trainers.autostart.launching import launch_environment
from tests.support.daemon_process import DaemonProcess
from tests.support.framework_environments import is_built, python_of
from tests.support.phase_ranks import NUM_RANKS, gpu_uuids, launcher_environment, run_ranks
from tests.support.phase_training import COMMUNICATION_S, DATA_S, WORK

LOOPS = {"ddp": None, "fsdp2": None, "huggingface": "huggingface", "lightning": "lightning"}
"""The environment that each loop needs; None: this one."""
SLOWDOWNS = (0.0, 0.02)
LAST_RATIO = 0.3
"""Share of the iterations that is compared; the plan has settled by then."""
NUM_JOINING = 8
"""First iterations, in which a program joins and its phases are found."""
PRODUCT_RULES = {name: getattr(JobRules(), name) for name in ("warmup_iterations", "baseline_iterations")}
"""Lengths that daemons of tests shorten, as the product has them by default."""
LIMIT_S = 900.0
GPU_MODEL = "a100-sxm"
LEAST_SAVINGS = (0.03, 0.08)
"""On that model."""
GUARD_RATIO = 0.01
"""Slowdown beyond the permitted one that the guard tolerates."""
MAX_OVERHEAD_RATIO = 0.005


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loops", nargs="+", choices=sorted(LOOPS), default=list(LOOPS))
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each kind, of which the median counts")
    parser.add_argument("--world", choices=list(WorldKind), default=WorldKind.KIND)
    parser.add_argument("--gpu-model", choices=sorted(MODELS), default=GPU_MODEL)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    conditions = WorldKind(options.world), options.gpu_model
    found: dict[str, Any] = {}
    for name in options.loops:
        environment = LOOPS[name]
        if environment is not None and not is_built(environment):
            print(f"no environment for {name}; `make frameworks` builds one", file=sys.stderr)
            continue
        runs = [measure(name, options.iterations, *conditions) for _ in range(options.repeats)]
        found[name] = {key: _combined([run[key] for run in runs]) for key in runs[0]}
        print(name, found[name], file=sys.stderr, flush=True)
    figures = summary(found, options.gpu_model)
    print(json.dumps(figures, indent=None if options.json else 2))
    return 0 if found and is_met(figures, options.loops) else 1


def summary(found: dict[str, Any], gpu_model: str = GPU_MODEL) -> dict[str, Any]:
    """Return the figures of all loops."""
    at_2 = {name: own["saving_at_2_percent_ratio"] for name, own in found.items()}
    possible = [best_possible_saving(ratio, gpu_model) for ratio in SLOWDOWNS]
    usual = [best_possible_saving(ratio) for ratio in SLOWDOWNS]
    return {
        "gpu_model": gpu_model,
        "least_saving_ratios": [
            least * own / best for least, own, best in zip(LEAST_SAVINGS, possible, usual, strict=True)
        ],
        "saving_at_0_percent_ratio_by_loop": {n: own["saving_at_0_percent_ratio"] for n, own in found.items()},
        "saving_at_2_percent_ratio_by_loop": at_2,
        "saving_at_2_percent_min_ratio": min(at_2.values(), default=None),
        "best_possible_at_0_percent_ratio": possible[0],
        "best_possible_at_2_percent_ratio": possible[1],
        "slowdown_at_0_percent_ratio_by_loop": {n: own["slowdown_at_0_percent_ratio"] for n, own in found.items()},
        "slowdown_at_2_percent_ratio_by_loop": {n: own["slowdown_at_2_percent_ratio"] for n, own in found.items()},
        "slowdown_max_ratio": max((own["slowdown_at_2_percent_ratio"] for own in found.values()), default=None),
        "losses_equal": all(own["losses_equal"] for own in found.values()),
        "overhead_ratio": max((own["overhead_ratio"] for own in found.values()), default=None),
        "joining_s_max": max((own["joining_s"] for own in found.values()), default=None),
    }


def is_met(figures: dict[str, Any], names: Collection[str] = tuple(LOOPS)) -> bool:
    """Return whether all targets are met by all loops of these names; one that could not run meets none."""
    return bool(
        set(figures["saving_at_0_percent_ratio_by_loop"]) >= set(names)
        and min(figures["saving_at_0_percent_ratio_by_loop"].values()) >= figures["least_saving_ratios"][0]
        and figures["saving_at_2_percent_min_ratio"] >= figures["least_saving_ratios"][1]
        and max(figures["slowdown_at_0_percent_ratio_by_loop"].values()) <= GUARD_RATIO
        and figures["slowdown_max_ratio"] <= SLOWDOWNS[1] + GUARD_RATIO
        and figures["losses_equal"]
        and figures["overhead_ratio"] <= MAX_OVERHEAD_RATIO
    )


def best_possible_saving(slowdown_ratio: float, gpu_model: str = GPU_MODEL) -> float:
    """Return the saving of the best plan within a slowdown, whose clocks change at once, from the exact tables."""
    gpu = device_parameters(gpu_model)
    clocks_mhz = gpu.supported_sm_clocks_mhz
    time_s, energy_j = np.zeros(1), np.zeros(1)
    for work in (ModelWork(gpu, own) for own in WORK.values()):
        own_s = np.array([work.time_s(mhz) for mhz in clocks_mhz])
        own_j = own_s * np.array([work.power_w(mhz) for mhz in clocks_mhz])
        time_s, energy_j = np.add.outer(time_s, own_s).ravel(), np.add.outer(energy_j, own_j).ravel()
    waits_s = COMMUNICATION_S + DATA_S
    fastest_s, usual_j = time_s[0] + waits_s, energy_j[0] + waits_s * blocking_power_w(gpu, clocks_mhz[0])
    waiting_j = waits_s * min(blocking_power_w(gpu, mhz) for mhz in clocks_mhz)
    is_in_time = time_s + waits_s <= (1 + slowdown_ratio) * fastest_s * (1 + 1e-9)
    return float(1 - (energy_j[is_in_time].min() + waiting_j) / usual_j)


def _combined(values: list[Any]) -> Any:
    return all(values) if isinstance(values[0], bool) else median(values)


def measure(name: str, num_iterations: int, kind: WorldKind, gpu_model: str) -> dict[str, Any]:
    """Return the figures of one loop."""
    figures: dict[str, Any] = {"losses_equal": True, "overhead_ratio": 0.0, "joining_s": 0.0}
    # The run without a daemon is the middle one: it shares what the host does with both others.
    first = train(name, num_iterations, kind, gpu_model, max_slowdown_ratio=SLOWDOWNS[0])
    plain = train(name, num_iterations, kind, gpu_model, max_slowdown_ratio=None)
    last_one = train(name, num_iterations, kind, gpu_model, max_slowdown_ratio=SLOWDOWNS[1])
    time_s, energy_j = last(plain)
    for slowdown_ratio, joined in zip(SLOWDOWNS, (first, last_one), strict=True):
        own_s, own_j = last(joined)
        percent = f"{100 * slowdown_ratio:.0f}_percent_ratio"
        figures[f"saving_at_{percent}"] = 1 - own_j / energy_j
        figures[f"slowdown_at_{percent}"] = own_s / time_s - 1
        figures["losses_equal"] &= [rank["losses"] for rank in joined] == [rank["losses"] for rank in plain]
        overhead_s, joining_s = overheads_s(joined)
        figures["overhead_ratio"] = max(figures["overhead_ratio"], overhead_s / time_s)
        figures["joining_s"] = max(figures["joining_s"], joining_s)
    return figures


def overheads_s(ranks: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the time in hooks per iteration once joined, and all of it in the iterations until then; the worse rank.

    Joining imports this package's client and connects to the daemon, once in a run.
    """
    times_s = [[ns / 1e9 for ns in rank["overheads_ns"]] for rank in ranks]
    num_joined = len(times_s[0]) - NUM_JOINING
    per_iteration_s = max((own[-1] - own[NUM_JOINING - 1]) / num_joined for own in times_s)
    return per_iteration_s, max(own[NUM_JOINING - 1] for own in times_s)


def last(ranks: list[dict[str, Any]]) -> tuple[float, float]:
    """Return time and energy per iteration of the last iterations, all GPUs together."""
    num = round(LAST_RATIO * len(ranks[0]["times_s"]))
    time_s = median(b - a for a, b in zip(ranks[0]["times_s"][-num - 1 :], ranks[0]["times_s"][-num:], strict=False))
    return time_s, sum((rank["energies_j"][-1] - rank["energies_j"][-num - 1]) / num for rank in ranks)


def train(
    name: str, num_iterations: int, kind: WorldKind, gpu_model: str, *, max_slowdown_ratio: float | None
) -> list[dict[str, Any]]:
    """Train once, joined to a daemon if a slowdown is given; return what each rank measured."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        daemon = DaemonProcess(
            folder / "daemon", num_gpus=NUM_RANKS, kind=kind, model=gpu_model, overrides=PRODUCT_RULES
        )
        if max_slowdown_ratio is not None:
            daemon.start()
        try:
            ranks = _run_ranks(name, num_iterations, daemon, folder, max_slowdown_ratio)
            if max_slowdown_ratio is not None:
                for job in daemon.status()["jobs"]:
                    print({key: job.get(key) for key in ("phase", "phase_reason", "outcome")}, file=sys.stderr)
        finally:
            if daemon.process is not None:
                daemon.stop()
        return ranks


def _run_ranks(
    name: str, num_iterations: int, daemon: DaemonProcess, folder: Path, max_slowdown_ratio: float | None
) -> list[dict[str, Any]]:
    environment = LOOPS[name]
    environ = {
        **launcher_environment(folder),
        "GPUENERGYD_GPU_UUID": gpu_uuids(daemon.world_path),
        "GPUENERGYD_SOCKET": str(daemon.socket_path),
        "GPUENERGYD_JOB": name,
    }
    if max_slowdown_ratio is not None:
        environ = launch_environment({**environ, "GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO": f"{max_slowdown_ratio}"})
    return run_ranks(
        name,
        folder,
        daemon.world_path,
        ["--iterations", f"{num_iterations}"],
        environ,
        limit_s=LIMIT_S,
        python=sys.executable if environment is None else str(python_of(environment)),
    )


if __name__ == "__main__":
    sys.exit(main())
