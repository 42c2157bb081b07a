"""Measures what the client costs a program whose interpreter is busy nearly all the time.

    python benchmarks/runs/host_bound.py [--pairs N] [--seconds S] [--seed K] [--json]

Two programs on one core, launch-bound as small models on a large GPU are: a loop of 96 modules, 5 to 10 ms a step; and
a one-stage 1F1B pipeline of torch.distributed.pipelining with 16 instructions a step. Their events come from
`compiled_events.py`: they cost what CUDA's cost, and hold the interpreter's lock as torch does. Three arms: no daemon
at the socket's path; a daemon that only observes; and one whose plan asks for six changes of clock inside each
iteration of the pipeline, one for each iteration of the loop. That daemon is a scripted one in another process.
GPUENERGYD_COMPILED_THREAD=0 measures the third arm without the compiled thread.

In one process, blocks of steps follow each other as plain, client, null, null, client, plain. The client joins before
each of its blocks and leaves after it; both are not measured. Nor are the first steps after joining, in which the
client learns the program and times all instructions: a block has the steady state of a program of minutes. What these
first steps cost in all is printed beside it (`first_ms`). The null blocks are plain ones: they show the resolution
of the host. A pair is the two client blocks against the two plain ones. Medians over the pairs have a bootstrap 95 %
interval, of which half the width is given; an arm ends when that is 0.002 or after its limit of pairs or seconds. The
figure of an arm is that of the program that the client costs more. `cpu` is the same for the CPU time of the training
thread, which other work on the host affects less. Needs the checkout and gcc.
"""

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from compiled_events import CompiledDevice, missing_compiler
from paired_steps import reported
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import gpuenergyd
from gpuenergyd.client import loop
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd_trainers.torch_pipelining import attach
from tests.client.fake_daemon import FakeDaemon, plan_slice

LIMITS = {"without_daemon": 1.001, "observe": 1.005, "control": 1.01}
HALF_WIDTH = 0.002
MIN_PAIRS = 8
MODULES, WIDTH, SEQUENCES, MICROBATCHES = 96, 16, 4, 8
SETTLING_STEPS, JOINING_STEPS = 8, 48
"""Steps before each block in which caches are filled, and those after joining until the client is in a steady state."""
BLOCK_S = 0.8
CHANGES = [("F", 0, 0, 0, 1200), ("F", 3, 0, 0, 900), ("B", 2, 0, 0, 1100), ("F", 6, 0, 0, 1000),
           ("B", 5, 0, 0, 1300), ("B", 7, 0, 0, 900)]  # fmt: skip
GPU_UUID = "GPU-0"


class Nowhere:
    """A queue that keeps nothing."""

    def put(self, _item: object) -> None:
        """Drop it."""


class ScriptedDaemon(FakeDaemon):
    """Gives every rank that registers the same plan, or none."""

    def __init__(self, folder: Path, *, has_plan: bool) -> None:
        super().__init__(folder)
        self._has_plan = has_plan
        self.takes_untimed = True
        for name in ("registrations", "reports", "releases", "clock_requests"):
            setattr(self, name, Nowhere())

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the reply."""
        if path == "/v1/ranks" and self._has_plan:
            own = {(kind, microbatch, chunk) for kind, microbatch, chunk in map(tuple, body["order"])}
            self.plans_by_pp_rank[0] = [plan_slice(1, 0, [row for row in CHANGES if row[:3] in own])]
        return super().answer(method, path, body)


def serve(folder: Path, pipe: Connection, has_plan: bool) -> None:  # noqa: FBT001  a process takes no keywords here
    """Run the scripted daemon until it is stopped."""
    with ScriptedDaemon(folder, has_plan=has_plan):
        pipe.send("ready")
        pipe.recv()


@contextmanager
def daemon_for(arm: str, folder: Path) -> Iterator[str]:
    """Run the daemon of an arm; yield the socket's path."""
    if arm == "without_daemon":
        yield str(folder / "daemon.sock")
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(folder, theirs, arm == "control"))
    process.start()
    ours.recv()
    try:
        yield str(folder / "daemon.sock")
    finally:
        ours.send("end")
        process.join()


class LoopProgram:
    """A plain loop."""

    def __init__(self, device: CompiledDevice) -> None:
        setattr(loop, "loaded_cuda_device", lambda: device)  # noqa: B010  a double, which type checkers would refuse
        self._model = deep_model(MODULES)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=False)
        self._batch = torch.randn(SEQUENCES, WIDTH)

    def step(self) -> None:
        """Run a step."""
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @contextmanager
    def joined(self, socket_path: str) -> Iterator[Callable[[], None]]:
        """Join a job; yield the step in it."""
        with gpuenergyd.job("host-bound", gpu_uuid=GPU_UUID, socket_path=socket_path, run_key="r") as job:

            def step() -> None:
                with job.iteration():
                    self.step()

            yield step


class PipelineProgram:
    """A pipeline of one stage: 16 instructions a step."""

    def __init__(self, device: CompiledDevice) -> None:
        self._device = device
        model = deep_model(MODULES)
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        self._batch = torch.randn(MICROBATCHES * SEQUENCES, WIDTH)

    def step(self) -> None:
        """Run a step."""
        self._schedule.step(self._batch, target=self._batch, losses=[], return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @contextmanager
    def joined(self, socket_path: str) -> Iterator[Callable[[], None]]:
        """Attach the schedule; yield the step in the job."""
        timer = DeviceRecorder(self._device, 4 * MICROBATCHES + 1)
        handle = attach(self._schedule, job="host-bound", gpu_uuid=GPU_UUID, socket_path=socket_path, timer=timer,
                        run_key="r")  # fmt: skip
        try:
            yield self.step
        finally:
            handle.detach()


PROGRAMS: dict[str, Callable[[CompiledDevice], LoopProgram | PipelineProgram]] = {
    "loop": LoopProgram,
    "pipeline": PipelineProgram,
}


def deep_model(num_modules: int) -> nn.Module:
    """Return many small modules."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(num_modules // 4)]
    return nn.Sequential(*blocks)


@dataclass(slots=True)
class Pairs:
    """Ratios of one program in one arm."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    null: list[float] = field(default_factory=list)
    null_cpu: list[float] = field(default_factory=list)
    plain: list[tuple[float, float]] = field(default_factory=list)
    """Wall and CPU time of plain blocks."""
    joining_s: list[float] = field(default_factory=list)
    """Wall time of the first steps after joining."""

    def figures(self, num_steps: int) -> dict[str, Any]:
        """Return medians with the half-widths of their intervals."""
        wall_s, cpu_s = (sum(times) for times in zip(*self.plain, strict=True))
        return {
            **{name: spread(getattr(self, name)) for name in ("wall", "cpu", "null", "null_cpu")},
            "pairs": len(self.wall),
            "step_ms": round(1e3 * wall_s / len(self.plain) / num_steps, 3),
            "first_ms": round(1e3 * (median(self.joining_s) - JOINING_STEPS * wall_s / len(self.plain) / num_steps), 1),
            "busy_ratio": round(cpu_s / wall_s, 3),
        }


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and half the width of its 95 % interval, with the quartiles."""
    figures, ranked = reported(values, "ratio"), sorted(values)
    return {
        "ratio": figures["median_ratio"],
        "half_width": round((figures["high"] - figures["low"]) / 2, 6),
        "p25": round(ranked[len(ranked) // 4], 6),
        "p75": round(ranked[-1 - len(ranked) // 4], 6),
    }


def measure(program: Any, socket_path: str, *, max_pairs: int, limit_s: float) -> dict[str, Any]:
    """Run blocks by turns until the median is known well enough."""
    for _ in range(3 * SETTLING_STEPS):
        program.step()
    began_s = time.perf_counter()
    for _ in range(SETTLING_STEPS):
        program.step()
    num_steps = max(8, round(BLOCK_S * SETTLING_STEPS / (time.perf_counter() - began_s)))
    pairs, end_s = Pairs(), time.monotonic() + limit_s

    def block(*, is_joined: bool) -> tuple[float, float]:
        joined: AbstractContextManager[Callable[[], None]]
        joined = program.joined(socket_path) if is_joined else contextlib.nullcontext(program.step)
        with joined as step:
            began_s = time.perf_counter()
            for _ in range(JOINING_STEPS if is_joined else SETTLING_STEPS):
                step()
            if is_joined:
                pairs.joining_s.append(time.perf_counter() - began_s)
            wall_s, cpu_s = time.perf_counter(), time.thread_time()
            for _ in range(num_steps):
                step()
            return time.perf_counter() - wall_s, time.thread_time() - cpu_s

    while len(pairs.wall) < max_pairs:
        order = ("plain", "client", "null", "null", "client", "plain")
        order = order if random.random() < 0.5 else ("client", "null", "plain", "plain", "null", "client")
        blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in order}
        for name in order:
            blocks[name].append(block(is_joined=name == "client"))
        sums = {name: [sum(times) for times in zip(*both, strict=True)] for name, both in blocks.items()}
        for ratios, name, which in ((pairs.wall, "client", 0), (pairs.cpu, "client", 1), (pairs.null, "null", 0),
                                    (pairs.null_cpu, "null", 1)):  # fmt: skip
            ratios.append(sums[name][which] / sums["plain"][which])
        pairs.plain += blocks["plain"]
        if len(pairs.wall) >= MIN_PAIRS and spread(pairs.wall)["half_width"] <= HALF_WIDTH:
            break
        if time.monotonic() > end_s:
            break
    return pairs.figures(num_steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=120, help="at most, of each program in each arm")
    parser.add_argument("--seconds", type=float, default=240.0, help="at most, of each program in each arm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=LIMITS, default=list(LIMITS), help="arms")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    reason = missing_compiler()
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return 0
    random.seed(options.seed)
    quiet = logging.getLogger("gpuenergyd")  # the client joins for each block
    quiet.setLevel(logging.INFO)
    quiet.addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/group"
        dist.init_process_group("gloo", rank=0, world_size=1, init_method=store)
        device = CompiledDevice(Path(folder))
        programs = {name: make(device) for name, make in PROGRAMS.items()}
        for arm in options.only:
            own = Path(folder) / arm
            own.mkdir()
            with daemon_for(arm, own) as socket_path:
                figures = {
                    name: measure(program, socket_path, max_pairs=options.pairs, limit_s=options.seconds)
                    for name, program in programs.items()
                }
            result[arm] = figures
            show(arm, figures)
        dist.destroy_process_group()
    worst = {
        arm: max(figures.values(), key=lambda each: float(each["wall"]["ratio"])) for arm, figures in result.items()
    }
    summary: dict[str, Any] = {}
    for arm, figures in worst.items():
        summary |= {f"{arm}_ratio": figures["wall"]["ratio"], f"{arm}_half_width": figures["wall"]["half_width"]}
        summary |= {
            f"{arm}_pairs": figures["pairs"],
            f"{arm}_cpu_ratio": max(p["cpu"]["ratio"] for p in result[arm].values()),
        }
    summary["is_met"] = all(worst[arm]["wall"]["ratio"] <= LIMITS[arm] for arm in worst)
    summary["load_average"] = round(os.getloadavg()[0], 1)
    if options.json:
        print(json.dumps({**summary, "arms": result}))
    return 0 if summary["is_met"] else 1


def show(arm: str, figures: dict[str, dict[str, Any]]) -> None:
    for name, each in figures.items():
        ratios = "; ".join(f"{key} {each[key]['ratio']:.4f} +- {each[key]['half_width']:.4f}" for key in
                           ("wall", "null", "cpu", "null_cpu"))  # fmt: skip
        print(f"{arm:<15} {name:<9} {ratios}; {each['pairs']} pairs, step {each['step_ms']:.2f} ms,"
              f" busy {each['busy_ratio']:.2f}, first {JOINING_STEPS} steps {each['first_ms']:+.0f} ms")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
