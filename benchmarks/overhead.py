"""What attaching costs a training run: step times with and without it, in interleaved pairs of one run.

    python benchmarks/overhead.py [--pairs 40] [--steps 30] [--ranks 2] [--json]

Real torch pipelines over gloo on this machine's CPU, under a real daemon in mode `observe`: it registers, records and
reports as ever, and sets nothing, so the ratio is overhead and not slower clocks. Each pair is three blocks of steps in
random order: attached, plain, and plain again. The third is the null arm: how far from 1 two equal blocks lie is what
this machine cannot resolve. A block's figure is its median step on rank 0; ratios are told as their median over the
pairs with a bootstrap 95 % interval. Steps here take a few milliseconds, on GPUs they take hundreds: what is a constant
per instruction weighs more here. Needs the checkout.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gpuenergyd_trainers.gpt_model import build_stage, loss_of, make_batch
from gpuenergyd_trainers.torch_pipelining import attach
from tests.support.daemon_process import running_daemon
from tests.trainers.pipeline_processes import run_ranks

ATTACHED, PLAIN, NULL = "attached", "plain", "null"
NUM_MICROBATCHES = 8
WARM_UP_STEPS = 5
NUM_RESAMPLES = 4_000


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=30, help="in a block, after its warm-up")
    parser.add_argument("--ranks", type=int, default=2, help="processes, fewer than cores")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_daemon(Path(folder) / "daemon", mode="observe") as daemon:
        gpu_uuids = [str(gpu["gpu_uuid"]) for gpu in daemon.status()["gpus"]]
        arguments = (options.pairs, options.steps, str(daemon.socket_path), gpu_uuids[: options.ranks])
        medians_s = run_ranks(options.ranks, Path(folder), train, *arguments)[0]
    ratios = [pair[ATTACHED] / pair[PLAIN] for pair in medians_s]
    null_ratios = [pair[NULL] / pair[PLAIN] for pair in medians_s]
    result = {
        **told(ratios),
        "pairs": len(ratios),
        "null": told(null_ratios),
        "step_s": round(statistics.median(pair[PLAIN] for pair in medians_s), 6),
        "steps_per_block": options.steps,
        "ranks": options.ranks,
    }
    if options.json:
        print(json.dumps(result))
    else:
        for name, figures in ((ATTACHED, result), (NULL, result["null"])):
            print(f"{name:<9} {figures['median_ratio']:.4f}  [{figures['low']:.4f}, {figures['high']:.4f}] of plain")
        print(f"{len(ratios)} pairs of {options.steps} steps of {result['step_s'] * 1e3:.1f} ms, {options.ranks} ranks")
    return 0


def train(rank: int, num_pairs: int, num_steps: int, socket_path: str, gpu_uuids: list[str]) -> list[dict[str, float]]:
    """Run every block of every pair on one rank; return the blocks' median step times."""
    num_ranks = len(gpu_uuids)
    model = build_stage(rank, num_ranks, seed=3)
    stage = PipelineStage(model, rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = make_batch(0, NUM_MICROBATCHES, seed=3)

    def step() -> float:
        begin_s = time.perf_counter()
        keywords: dict[str, Any] = {"target": targets, "losses": []} if rank == num_ranks - 1 else {}
        schedule.step(*((inputs,) if rank == 0 else ()), **keywords)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin_s

    shuffled = random.Random(1)  # all ranks draw the same order
    medians_s = []
    for pair_index in range(num_pairs):
        pair = {}
        for arm in shuffled.sample((ATTACHED, PLAIN, NULL), 3):
            torch.distributed.barrier()
            handle = None
            if arm == ATTACHED:
                run_key = f"pair-{pair_index}"
                handle = attach(
                    schedule, job="overhead", run_key=run_key, gpu_uuid=gpu_uuids[rank], socket_path=socket_path
                )
            for _ in range(WARM_UP_STEPS):
                step()
            pair[arm] = statistics.median(step() for _ in range(num_steps))
            if handle is not None:
                assert handle.is_attached, "the daemon was not followed"
                assert handle.num_errors == 0
                handle.detach()
        medians_s.append(pair)
    return medians_s


def told(ratios: list[float]) -> dict[str, float]:
    """Return the median and its bootstrap 95 % interval."""
    resampled = random.Random(2)
    medians = sorted(statistics.median(resampled.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES))
    low, high = medians[round(0.025 * NUM_RESAMPLES)], medians[round(0.975 * NUM_RESAMPLES) - 1]
    return {
        "median_ratio": round(statistics.median(ratios), 5),
        "low": round(low, 5),
        "high": round(high, 5),
    }


if __name__ == "__main__":
    sys.exit(main())
