"""Real Megatron-core and DeepSpeed over two hosts, simulated GPUs: savings and slowdowns by layout.

    python benchmarks/runs/layouts.py [--layouts NAME ...] [--iterations 120] [--scale 3] [--json]

Each layout trains twice on gloo over two hosts (network namespaces) with a daemon each: with the daemons and without.
Savings come from the exact energies of all simulated GPUs and slowdowns from the times of the steps, in the last 40
steps of both trainings. Losses must be equal bit by bit, and ranks of one stage must run at the same clocks. Needs the
environments of `make frameworks`, root, and an `ip` command that can create network namespaces.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report.printing import print_figures
from docs.site.house_map import PYTHON_PATH
from tests.support.framework_environments import ROOT, is_built, python_of

LAYOUTS = {
    "megatron PP 2 x DP 2": ("megatron", 1, 1),
    "megatron PP 2 x TP 2 x DP 2": ("megatron", 2, 1),
    "megatron PP 2 x VP 2 x DP 2": ("megatron", 1, 2),
    "deepspeed PP 2 x DP 2": ("deepspeed", 1, 1),
}
"""Framework, tensor-parallel size and virtual stages per rank, by name."""
PLAIN, TENSOR_PARALLEL = list(LAYOUTS)[:2]
TOLERATED_SLOWDOWN = TOLERATED_SAVING_LOSS = 0.01
TOLERATED_CLOCK_DIFFERENCE = 0.01
LIMIT_S = 3_000.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--scale", type=float, default=3.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    layouts: dict[str, dict[str, Any]] = {}
    for name in options.layouts:
        framework, tp, num_chunks = LAYOUTS[name]
        if not is_built(framework):
            print(f"no environment for {framework}; `make frameworks` builds one", file=sys.stderr)
            return 1
        layouts[name] = run(framework, tp, num_chunks, options.iterations, options.scale)
        print(f"{name}: {layouts[name]}", file=sys.stderr, flush=True)
    both = [layouts[name]["saving_ratio"] for name in (PLAIN, TENSOR_PARALLEL) if name in layouts]
    figures = {
        "layouts": layouts,
        "saving_lost_by_tensor_parallelism": both[0] - both[1] if len(both) == 2 else None,
        "slowdown_max_ratio": max(layout["slowdown_ratio"] for layout in layouts.values()),
        "losses_equal": all(layout["are_losses_equal"] for layout in layouts.values()),
        "num_iterations": options.iterations,
    }
    print_figures(figures, is_json=options.json)
    return 0 if are_targets_met(figures) else 1


def run(framework: str, tp: int, num_chunks: int, iterations: int, scale: float) -> dict[str, Any]:
    """Train one layout in the environment of its framework."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python_of(framework)), "-m", "benchmarks.worlds.layouts", "--framework", framework]
        command += ["--folder", folder, "--tp", str(tp), "--chunks", str(num_chunks)]
        command += ["--iterations", str(iterations), "--scale", str(scale)]
        environ = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        done = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True
        )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def are_targets_met(figures: dict[str, Any]) -> bool:
    """Return whether savings, slowdowns, clocks and losses of every layout are as they should be."""
    lost = figures["saving_lost_by_tensor_parallelism"]
    return (
        figures["losses_equal"]
        and (lost is None or lost <= TOLERATED_SAVING_LOSS)
        and figures["slowdown_max_ratio"] <= TOLERATED_SLOWDOWN
        and all(
            (layout["sibling_clock_difference_max_ratio"] or 0.0) <= TOLERATED_CLOCK_DIFFERENCE
            and layout["saving_ratio"] > 0
            for layout in figures["layouts"].values()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
