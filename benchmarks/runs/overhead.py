"""Measures the overhead of attaching: step times with and without it, in short alternating segments of one run.

    python benchmarks/runs/overhead.py [--pairs 40] [--steps 3] [--microbatches 8] [--compute-bound] [--json]

A real torch pipeline over gloo, four ranks of the demo's GPT, under a real daemon in mode `observe`: it registers,
records and reports as usual but sets no clocks, so the ratio is overhead alone. Each instruction takes as long as on a
simulated GPU, so that steps are as regular as on a GPU, and the host waits for each of them: any time added between two
instructions lengthens the step, whereas a real GPU would still have queued work. With --compute-bound two ranks compute
on two cores instead, in competition with the daemon and other processes; such steps vary by percents, as the null arm
shows.

One attachment lasts for the whole run. Between segments its wrappers are removed from the schedule and added again, so
that a plain segment runs torch's own methods only. Each pair is three segments in random order: attached, plain, and
plain again. The third is the null arm: the ratio of two equal segments shows the resolution of this machine. A segment
is summarised by its median step on rank 0; ratios are medians over the pairs with a bootstrap 95 % interval, and
`added_us` is the same for differences, which are the cost of a step of any length.

CPU time is measured too: that of all ranks' processes in attached steps relative to plain ones, which other work on the
machine affects less, and that of the daemon with all its processes per iteration of the job. The daemon shares the
ranks' cores here, which it need not on a GPU host. Needs the checkout.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from paired_steps import ATTACHED, NULL, PLAIN, US_PER_S, Switch, reported
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.training.gpt_pipeline import GptRank
from gpuenergyd_sim.training.timers import SimulatedTimer
from gpuenergyd_trainers.torch_pipelining import attach
from tests.support.daemon_process import running_daemon
from tests.support.processes import child_pids
from tests.trainers.pipeline_processes import run_ranks

SETTLING_STEPS = 1
"""Steps left out at the start of a segment: the first after attaching is not an iteration, and caches are cold."""
FIRST_STEPS = 30
"""Attached steps before the measurement, in which the daemon completes its baseline and its prediction."""
DURATION_SCALE = 0.5
"""Factor on the demo's instructions: steps take 0.7 s; those of pipelines on GPUs take 1 s or more."""
WIDTH, TOKENS, SEQUENCES, LAYERS = 256, 64, 8, 2
"""Settings of compute-bound steps, about as long on one core each."""
RUN_LIMIT_S = 3_600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3, help="measured steps per segment")
    parser.add_argument("--compute-bound", action="store_true", help="compute on the CPU, without simulated GPUs")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings: dict[str, Any] = {"mode": "observe", "sample_period_s": 0.1}
    with tempfile.TemporaryDirectory() as folder, running_daemon(Path(folder) / "daemon", **settings) as daemon:
        num_ranks = 2 if options.compute_bound else 4
        world = None if options.compute_bound else str(daemon.world_path)
        gpu_uuids = [str(gpu["gpu_uuid"]) for gpu in daemon.status()["gpus"]][:num_ranks]
        sizes = (options.pairs, options.steps, options.microbatches)
        arguments = (*sizes, world, str(daemon.socket_path), gpu_uuids, daemon.pid)
        ranks = run_ranks(num_ranks, Path(folder), train, *arguments, limit_s=RUN_LIMIT_S)
    steps = ranks[0]["segments"]
    cpu = [{arm: sum(rank["cpu"][k][arm] for rank in ranks) for arm in pair} for k, pair in enumerate(ranks[0]["cpu"])]
    plain_cores, attached_cores = (ranks[0]["daemon_cores"][arm] for arm in (PLAIN, ATTACHED))
    step_s = statistics.median(pair[PLAIN] for pair in steps)
    result = {
        **reported([pair[ATTACHED] / pair[PLAIN] for pair in steps], "ratio"),
        "pairs": len(steps),
        "null": reported([pair[NULL] / pair[PLAIN] for pair in steps], "ratio"),
        "added_us": reported([US_PER_S * (pair[ATTACHED] - pair[PLAIN]) for pair in steps], "us"),
        "cpu": reported([pair[ATTACHED] / pair[PLAIN] for pair in cpu], "ratio"),
        "cpu_null": reported([pair[NULL] / pair[PLAIN] for pair in cpu], "ratio"),
        "added_cpu_us": reported([US_PER_S * (pair[ATTACHED] - pair[PLAIN]) for pair in cpu], "us"),
        "daemon_cpu_us": round(US_PER_S * (attached_cores - plain_cores) * step_s, 1),
        "step_s": round(step_s, 6),
        "steps_per_segment": options.steps,
        "ranks": num_ranks,
        "is_simulated": world is not None,
        "instructions_per_step": 2 * options.microbatches,
        "load_average": round(os.getloadavg()[0], 1),
    }
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


def train(
    rank: int,
    num_pairs: int,
    num_steps: int,
    num_microbatches: int,
    world: str | None,
    socket_path: str,
    gpu_uuids: list[str],
    daemon_pid: int,
) -> dict[str, Any]:
    """Run every segment of every pair on one rank; return their median step times and their CPU time per step."""
    timer = None
    if world is None:
        step, schedule = computing(rank, len(gpu_uuids), num_microbatches)
    else:
        step, schedule, timer = simulated(rank, gpu_uuids, num_microbatches, world)
    step()  # torch infers shapes in it
    names: dict[str, Any] = {"job": "overhead", "run_key": "r", "gpu_uuid": gpu_uuids[rank], "socket_path": socket_path}
    handle = attach(schedule, **names, timer=timer)
    for _ in range(FIRST_STEPS):
        step()
    shuffled = random.Random(1)  # all ranks draw the same order
    segments: list[dict[str, float]] = []
    cpu: list[dict[str, float]] = []
    daemon_cpu: dict[str, list[float]] = {ATTACHED: [], PLAIN: [], NULL: []}
    switch = Switch(handle)
    for _ in range(num_pairs):
        segments.append({})
        cpu.append({})
        for arm in shuffled.sample((ATTACHED, PLAIN, NULL), 3):
            switch.turn(is_on=arm == ATTACHED)
            for _ in range(SETTLING_STEPS):
                step()
            dist.barrier()
            began_s, cpu_began_s = time.perf_counter(), time.process_time()
            daemon_began_s = cpu_s(daemon_pid) if rank == 0 else 0.0
            segments[-1][arm] = statistics.median(step() for _ in range(num_steps))
            cpu[-1][arm] = (time.process_time() - cpu_began_s) / num_steps
            if rank == 0:
                daemon_cpu[arm].append((cpu_s(daemon_pid) - daemon_began_s) / (time.perf_counter() - began_s))
    switch.turn(is_on=True)
    assert handle.is_attached, "the daemon was not followed"
    assert handle.num_errors == 0
    handle.detach()
    daemon_cores = {arm: statistics.mean(shares) for arm, shares in daemon_cpu.items()} if rank == 0 else {}
    return {"segments": segments, "cpu": cpu, "daemon_cores": daemon_cores}


def simulated(
    rank: int, gpu_uuids: list[str], num_microbatches: int, world: str, *, duration_scale: float = DURATION_SCALE
) -> tuple[Callable[[], float], Any, SimulatedTimer]:
    """Return a function that trains one timed step on a simulated GPU, the schedule, and the timer of instructions."""
    training = GptRank("1f1b", rank, len(gpu_uuids), num_microbatches)
    training.simulate_on(SimulatedHost.open(Path(world)), gpu_uuids[rank], duration_scale=duration_scale)
    indices = itertools.count()

    def step() -> float:
        began_s = time.perf_counter()
        training.step(next(indices))
        return time.perf_counter() - began_s

    assert isinstance(training.timer, SimulatedTimer)
    return step, training.schedule, training.timer


def computing(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Callable[[], float], Schedule1F1B]:
    """Return a function that trains one timed step on the CPU, and the schedule."""
    torch.manual_seed(rank)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    stage = PipelineStage(model, rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(num_microbatches * SEQUENCES, TOKENS, WIDTH)

    def step() -> float:
        began_s = time.perf_counter()
        keywords: dict[str, Any] = {"target": batch, "losses": []} if rank == num_ranks - 1 else {}
        schedule.step(*((batch,) if rank == 0 else ()), return_outputs=False, **keywords)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began_s

    return step, schedule


def cpu_s(pid: int) -> float:
    """Return the CPU time, user and system, of a process and its running children."""
    ticks = 0
    for one in (pid, *child_pids(pid)):
        fields = Path(f"/proc/{one}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def show(result: dict[str, Any]) -> None:
    for name, figures in ((ATTACHED, result), (NULL, result["null"]), ("cpu", result["cpu"]), ("", result["cpu_null"])):
        print(f"{name:<9} {figures['median_ratio']:.4f}  [{figures['low']:.4f}, {figures['high']:.4f}] of plain")
    for name in ("added_us", "added_cpu_us"):
        figures = result[name]
        print(f"{name:<13} {figures['median_us']:8.0f}  [{figures['low']:.0f}, {figures['high']:.0f}] per step")
    print(
        f"{result['pairs']} pairs of {result['steps_per_segment']} steps of {result['step_s'] * 1e3:.1f} ms,"
        f" {result['ranks']} ranks, {result['instructions_per_step']} instructions per rank and step;"
        f" the daemon used {result['daemon_cpu_us']:.0f} us for each; load {result['load_average']}"
    )


if __name__ == "__main__":
    sys.exit(main())
