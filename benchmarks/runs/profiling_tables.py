"""Tests profiling on published tables of real GPUs: plans from five measured clocks, and errors at held-out clocks.

    python benchmarks/runs/profiling_tables.py --json

The tables are not part of this repository (see tests/support/measured_tables.py). GPT-3 on A100-SXM and A40: four
stages, eight microbatches, 1F1B, deadlines T0 to 1.2 T0. The design selects one clock after the other. A plan from the
fit is evaluated on the whole table, against the plan from the whole table with the same time; that plan knows the
table's noise and cannot be matched. For comparison: the same clocks without a fit, each inner clock moved by one step
(sensitivity), and other lowest clocks. The noise of the tables is printed beside the errors at held-out clocks.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd_policies.profiling.design import LOWEST_RATIO
from tests.support.measured_tables import (
    BLOCKING_W,
    NUM_RANKS,
    SLOWDOWNS,
    B,
    F,
    HeldOut,
    a100_fp32_errors,
    chosen_clocks,
    fit_from,
    full_table,
    held_out_errors,
    losses_of,
    path_of,
    stages_of,
    v100_errors,
    v100_sweeps,
)


def mean_loss(gpu: str, clocks: Sequence[int]) -> float:
    """Return the mean loss of plans from the fit of some clocks."""
    return mean(loss.energy_ratio for loss in losses_of(gpu, fit_from(gpu, clocks).profile))


def moved(gpu: str, clocks: Sequence[int]) -> list[list[int]]:
    """Return the clocks with each inner one moved by one supported clock up, and down."""
    supported = sorted(stages_of(gpu)[0][F], reverse=True)
    return [
        [supported[supported.index(c) + step] if k == inner else c for k, c in enumerate(clocks)]
        for inner in range(1, len(clocks) - 1)
        for step in (-1, 1)
    ]


def of_plans(gpu: str, num_clocks: int) -> dict[str, object]:
    """Return the losses of plans from the design's clocks."""
    clocks = chosen_clocks(gpu, num_clocks)
    losses = losses_of(gpu, fit_from(gpu, clocks).profile)
    return {
        "clocks_mhz": clocks,
        "loss_mean_ratio": mean(loss.energy_ratio for loss in losses),
        "loss_ratios": dict(zip(map(str, SLOWDOWNS), (loss.energy_ratio for loss in losses), strict=True)),
        "late_max_ratio": max(loss.late_ratio for loss in losses),
        "without_fit_mean_ratio": mean(loss.energy_ratio for loss in losses_of(gpu, full_table(gpu, clocks))),
    }


def of_errors(errors: HeldOut) -> dict[str, float]:
    """Return mean, root mean square, 95th percentile and maximum of both errors."""
    found: dict[str, float] = {}
    for name, values in (("time", errors.time_errors), ("power", errors.power_errors)):
        off = np.abs(values)
        found |= {
            f"{name}_points": len(off),
            f"{name}_mean_ratio": float(off.mean()),
            f"{name}_rms_ratio": float(np.sqrt(np.mean(off**2))),
            f"{name}_p95_ratio": float(np.quantile(off, 0.95)),
            f"{name}_max_ratio": float(off.max()),
        }
    return found


def powers_of(gpu: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the clocks of one stage that a plan may use, and the power of forward and backward together."""
    forward, backward = (stages_of(gpu)[rank][kind] for kind in (F, B))
    clocks = sorted(c for c in set(forward) & set(backward) if c >= LOWEST_RATIO * max(forward))
    both = [(forward[c][0] + backward[c][0], forward[c][1] + backward[c][1]) for c in clocks]
    return np.array(clocks, dtype=float), np.array([energy_j / time_s for time_s, energy_j in both])


def of_smooth_curves(gpu: str, num_parameters: int = 5) -> dict[str, float]:
    """Return the residuals of the best polynomial with as many parameters as measured clocks, fitted to every clock.

    It is a reference that five measured clocks cannot reach: it is fitted to the data that it is tested on.
    """
    off: list[float] = []
    for rank in range(NUM_RANKS):
        clocks, powers = powers_of(gpu, rank)
        at = (clocks - clocks.mean()) / clocks.std()
        curve = np.polyfit(at, powers, num_parameters - 1, w=1 / powers)
        off += list(np.abs(np.polyval(curve, at) / powers - 1))
    return {"mean_ratio": float(np.mean(off)), "p95_ratio": float(np.quantile(off, 0.95)), "max_ratio": float(max(off))}


def of_repeated_runs() -> dict[str, float]:
    """Return the spread of the V100 table's runs at the same clock: range over mean."""
    runs: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for sweep in v100_sweeps():
        runs[sweep.workload, sweep.sm_clock_mhz].append((sweep.time_s, sweep.power_w))
    repeated = [np.array(values) for values in runs.values() if len(values) > 1]
    spreads = np.array([np.ptp(values, axis=0) / values.mean(axis=0) for values in repeated])
    return {
        "repeated": len(repeated),
        "time_spread_max_ratio": float(spreads[:, 0].max()),
        "power_spread_median_ratio": float(np.median(spreads[:, 1])),
        "power_spread_max_ratio": float(spreads[:, 1].max()),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--clocks", type=int, nargs="*", default=[5, 6, 7, 8], help="numbers of measured clocks to plan from"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not path_of("profiles").exists():
        parser.exit(1, f"no measured tables at {path_of('profiles')}\n")
    plans: dict[str, object] = {}
    for gpu in BLOCKING_W:
        five = chosen_clocks(gpu, 5)
        losses = [mean_loss(gpu, clocks) for clocks in moved(gpu, five)]
        plans[gpu] = {
            "by_num_clocks": {str(n): of_plans(gpu, n) for n in arguments.clocks},
            "five_moved": {"sets": len(losses), "loss_mean_ratio": mean(losses), "loss_max_ratio": max(losses)},
            "other_lowest": {
                str(lowest): mean_loss(gpu, [*five[:-1], lowest])
                for lowest in sorted(stages_of(gpu)[0][F])
                if lowest != five[-1] and abs(lowest - five[-1]) <= 45
            },
        }
    errors = {
        "a100-sxm": of_errors(held_out_errors("a100-sxm", chosen_clocks("a100-sxm", 5))),
        "a40": of_errors(held_out_errors("a40", chosen_clocks("a40", 5))),
        "a100-pcie-fp32": of_errors(a100_fp32_errors()),
        "v100-sxm2": of_errors(v100_errors()),
    }
    noise = {
        "smooth_curves": {gpu: of_smooth_curves(gpu) for gpu in BLOCKING_W},
        "v100_repeated_runs": of_repeated_runs(),
    }
    result = {"measured_by_others": True, "plans": plans, "held_out": errors, "noise": noise}
    print(json.dumps(result, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
