"""Savings of the loop of plain_loops.py in virtual time, by seeds.

    python benchmarks/runs/plain_loops_virtual.py [--gpu-model h200] [--seeds 20] [--first-seed 1] [--json]

The phases of plain_loops.py on two ranks that wait for each other, with the real state machine of a job and the default
policy, but without framework, daemon and worker: how phases of a framework are found does not depend on the GPU model,
and plain_loops.py measures it. Instructions scatter, clocks change late and counters are updated as on the GPU model in
the kind simulated world; energies scatter by 0.5 %. Compared are the last iterations with those of the same ranks at
full speed. Targets are those of plain_loops.py: of the largest possible saving, the share that A100s must reach.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from plain_loops import GPU_MODEL, GUARD_RATIO, LAST_RATIO, LEAST_SAVINGS, SLOWDOWNS, best_possible_saving
from threadpoolctl import threadpool_limits

from benchmarks.report.printing import print_figures
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_sim.driver.device_model import blocking_power_w
from gpuenergyd_sim.driver.device_parameters import MODELS, device_parameters
from gpuenergyd_sim.virtual_training.work import ModelWork, Work
from tests.support.phase_ranks import NUM_RANKS
from tests.support.phase_training import COMMUNICATION_S, DATA_S, WORK
from tests.support.virtual_loop import DataParallelLoops, VirtualLoop, Wait

NUM_ITERATIONS = 200
ENERGY_NOISE_RATIO = 0.005
ASSUMED_LATENCY_S = 0.03


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu-model", choices=sorted(MODELS), default=GPU_MODEL)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows = []
    with ProcessPoolExecutor(options.processes, initializer=threadpool_limits, initargs=(1,)) as pool:
        for row in pool.map(partial(measured, gpu_model=options.gpu_model), seeds):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    figures = summary(rows, options.gpu_model) | {"first_seed": options.first_seed}
    print_figures(figures, is_json=options.json, left_out="seeds")
    return 0 if is_met(figures) else 1


def measured(seed: int, gpu_model: str) -> dict[str, float]:
    """Return the savings and slowdowns of the loop with one seed."""
    time_s, energy_j = last(train(seed, gpu_model, FullSpeed(), 0.0))
    row: dict[str, float] = {"seed": seed}
    for slowdown_ratio in SLOWDOWNS:
        own_s, own_j = last(train(seed, gpu_model, BubbleAware(), slowdown_ratio))
        percent = f"{100 * slowdown_ratio:.0f}_percent_ratio"
        row |= {f"saving_at_{percent}": 1 - own_j / energy_j, f"slowdown_at_{percent}": own_s / time_s - 1}
    return row


def train(seed: int, gpu_model: str, policy: ClockPolicy, max_slowdown_ratio: float) -> Sequence[VirtualLoop]:
    """Train all ranks; each is a job of its own, as under plain_loops.py's launcher."""
    gpu = device_parameters(gpu_model)
    waiting_power_w = partial(blocking_power_w, gpu)
    waits_s = {InstructionKind("C"): COMMUNICATION_S, InstructionKind("D"): DATA_S}
    work: dict[tuple[int, InstructionKind], Work] = {
        **{(0, InstructionKind(kind)): ModelWork(gpu, own) for kind, own in WORK.items()},
        **{(0, kind): Wait(own_s, waiting_power_w) for kind, own_s in waits_s.items()},
    }
    loops = tuple(
        VirtualLoop(
            work=work,
            policy=policy if rank == 0 else type(policy)(),
            max_slowdown_ratio=max_slowdown_ratio,
            noise_ratio=gpu.time_noise_ratio,
            energy_noise_ratio=ENERGY_NOISE_RATIO,
            counter_period_s=gpu.energy_update_s,
            clocks_mhz=gpu.supported_sm_clocks_mhz,
            model_name=gpu.model_name,
            waiting_power_w=waiting_power_w,
            switch_latency_s=gpu.settle_mean_s,
            assumed_latency_s=ASSUMED_LATENCY_S,
            num_dp_ranks=NUM_RANKS,
            seed=NUM_RANKS * seed + rank,
        )
        for rank in range(NUM_RANKS)
    )
    DataParallelLoops(loops).run(NUM_ITERATIONS)
    return loops


def last(loops: Sequence[VirtualLoop]) -> tuple[float, float]:
    """Return time and energy per iteration of the last iterations, all GPUs together."""
    num = round(LAST_RATIO * NUM_ITERATIONS)
    ends = [own for loop in loops for own in loop.history[-num:]]
    return fmean(time_s for time_s, _, _ in ends), len(loops) * fmean(energy_j for _, energy_j, _ in ends)


def summary(rows: Sequence[dict[str, float]], gpu_model: str) -> dict[str, Any]:
    """Return mean, standard deviation and worst figure over the seeds, beside what is possible."""
    figures: dict[str, Any] = {"gpu_model": gpu_model, "num_seeds": len(rows)}
    for slowdown_ratio, least in zip(SLOWDOWNS, LEAST_SAVINGS, strict=True):
        percent = f"at_{100 * slowdown_ratio:.0f}_percent"
        possible = best_possible_saving(slowdown_ratio, gpu_model)
        for name, worst in (("saving", min), ("slowdown", max)):
            values = [row[f"{name}_{percent}_ratio"] for row in rows]
            figures |= {
                f"{name}_{percent}_ratio": fmean(values),
                f"{name}_{percent}_sd_ratio": stdev(values) if len(values) > 1 else 0.0,
                f"{name}_{percent}_worst_ratio": worst(values),
            }
        figures[f"best_possible_{percent}_ratio"] = possible
        figures[f"least_saving_{percent}_ratio"] = least * possible / best_possible_saving(slowdown_ratio)
    return figures | {"seeds": list(rows)}


def is_met(figures: dict[str, Any]) -> bool:
    """Return whether the mean savings and slowdowns over the seeds meet the targets."""
    return all(
        figures[f"saving_{percent}_ratio"] >= figures[f"least_saving_{percent}_ratio"]
        and figures[f"slowdown_{percent}_ratio"] <= permitted + GUARD_RATIO
        for percent, permitted in zip(("at_0_percent", "at_2_percent"), SLOWDOWNS, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
