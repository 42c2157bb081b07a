"""Accuracy of instruction times and energies of a pipeline on a real GPU: four processes on one GPU, observe only.

    python benchmarks/runs/gpu_pipeline.py [--gpu 0] [--steps 20] [--json]

Trains a GPT-like pipeline over gloo (which carries no CUDA tensors, so activations travel through host memory) under
its own daemon in mode `observe`. Instruction times from the adapter's CUDA events are compared with the spans that
torch.profiler records on the GPU for the same instructions: they should agree within 2 %. The job's energy per
iteration from NVML's counter is compared with the integral of NVML's power: within 3 %. Changes no clock, limit or
mode. Not yet run on a GPU. Needs the checkout, torch with CUDA, and NVML; without them it names what is missing and
exits with status 1.
"""

import argparse
import json
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pynvml
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile, record_function

from gpuenergyd.client.environment import find_gpu_uuid
from gpuenergyd.client.timing.cuda import CudaDevice
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.recorder import IterationTimes, RecordedIteration
from gpuenergyd.store import open_history
from gpuenergyd_trainers.torch_pipelining import attach
from tests.support.daemon_process import running_daemon
from tests.trainers.pipeline_processes import run_ranks

NUM_RANKS, NUM_MICROBATCHES = 4, 8
WIDTH, TOKENS, SEQUENCES, LAYERS = 1024, 512, 4, 4
WARM_UP_STEPS, PROFILED_STEPS = 5, 3
TIME_TOLERANCE, ENERGY_TOLERANCE = 0.02, 0.03
POWER_PERIOD_S = 0.01
KNOWN_WITHIN_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", type=int, default=0, help="GPU index in CUDA and NVML")
    parser.add_argument("--steps", type=int, default=20, help="iterations whose energy is compared")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Through NVML: a parent that has initialised CUDA cannot fork ranks that use it.
    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(options.gpu)
    except pynvml.NVMLError as error:
        print(f"cannot use GPU {options.gpu}: {error}", file=sys.stderr)
        return 1
    if torch.version.cuda is None:
        print(f"torch {torch.__version__} is built without CUDA", file=sys.stderr)
        return 1
    power = PowerLog(gpu)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_daemon(folder / "daemon", driver="nvml", mode="observe") as daemon, power:
            arguments = (options.gpu, options.steps, str(daemon.socket_path))
            ranks = run_ranks(NUM_RANKS, folder, train, *arguments)
            database_path = daemon.database_path
        first, last = ranks[0]["iterations"]
        with open_history(database_path) as history:
            (job,) = history.job_summaries()
            energies_j = [row.energy_j for row in history.iterations(job.job_id) if first <= row.iteration_index < last]
    time_ratios = {
        kind: statistics.median(ratio for rank in ranks for ratio in rank["time_ratios"][kind]) for kind in "FB"
    }
    known_j = [energy_j for energy_j in energies_j if energy_j is not None]
    integral_j = power.integral_j(*ranks[0]["window_s"])
    energy_ratio = sum(known_j) / integral_j if len(known_j) == len(energies_j) and integral_j else None
    result = {
        "gpu": pynvml.nvmlDeviceGetName(gpu),
        "event_over_profiler_time": {kind: round(ratio, 4) for kind, ratio in time_ratios.items()},
        "counter_over_integral_energy": None if energy_ratio is None else round(energy_ratio, 4),
        "iterations": len(energies_j),
        "iterations_without_energy": len(energies_j) - len(known_j),
        "num_errors": sum(rank["num_errors"] for rank in ranks),
        "holds": all(abs(ratio - 1) <= TIME_TOLERANCE for ratio in time_ratios.values())
        and energy_ratio is not None
        and abs(energy_ratio - 1) <= ENERGY_TOLERANCE,
    }
    print(json.dumps(result) if options.json else json.dumps(result, indent=2))
    return 0 if result["holds"] else 1


class PowerLog:
    """A context manager that samples a GPU's power from a thread."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._samples: list[tuple[float, float]] = []
        self._shall_end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._shall_end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._shall_end.wait(POWER_PERIOD_S):
            self._samples.append((time.monotonic(), pynvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000.0))

    def integral_j(self, begin_s: float, end_s: float) -> float:
        """Return the energy between two instants, by the trapezoid rule."""
        within = [(at_s, power_w) for at_s, power_w in self._samples if begin_s <= at_s <= end_s]
        return sum((b_s - a_s) * (a_w + b_w) / 2 for (a_s, a_w), (b_s, b_w) in pairwise(within))


class OnGpu(nn.Module):
    """Layers on the GPU between inputs and outputs in the host's memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True)
        self._layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to(device)
        self._device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations in host memory."""
        result: torch.Tensor = self._layers(x.to(self._device)).cpu()
        return result


class NamedStage(PipelineStage):
    """A stage whose instructions are named in the profiler's timeline."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a microbatch's forward."""
        with record_function(f"F {fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a microbatch's backward."""
        with record_function(f"B {bwd_chunk_id}"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class KeptTimes(DeviceRecorder):
    """A recorder that keeps the times of each iteration for comparison."""

    def __init__(self, device: CudaDevice, capacity: int) -> None:
        super().__init__(device, capacity)
        self.kept: queue.Queue[IterationTimes] = queue.Queue()

    def call_when_known(self, recorded: RecordedIteration, act: Callable[[], None]) -> None:
        """Keep the times before they are reported."""

        def keep() -> None:
            self.kept.put(recorded.times())
            act()

        super().call_when_known(recorded, keep)


def train(rank: int, gpu_index: int, num_steps: int, socket_path: str) -> dict[str, Any]:
    """Train on one rank: warm up, measure energy, then run under the profiler."""
    device = torch.device("cuda", gpu_index)
    torch.cuda.set_device(device)
    torch.manual_seed(rank)
    model = OnGpu(device)
    stage = NamedStage(model, rank, NUM_RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(NUM_MICROBATCHES * SEQUENCES, TOKENS, WIDTH)

    def step() -> None:
        keywords: dict[str, Any] = {"target": batch, "losses": []} if rank == NUM_RANKS - 1 else {}
        schedule.step(*((batch,) if rank == 0 else ()), return_outputs=False, **keywords)
        optimizer.step()
        optimizer.zero_grad()

    stage.device = device  # compute device only; gloo buffers stay on the host
    gpu_uuid = find_gpu_uuid(device=device)
    timer = KeptTimes(CudaDevice(torch, device), capacity=4 * NUM_MICROBATCHES)
    handle = attach(schedule, job="gpu-pipeline", run_key="r", gpu_uuid=gpu_uuid, socket_path=socket_path, timer=timer)
    stage.device = torch.device("cpu")
    assert handle._rank is not None, "the schedule was not joined"  # noqa: SLF001  reads internals
    client = handle._rank.client  # noqa: SLF001  as above
    for _ in range(WARM_UP_STEPS):
        step()
    first, begin_s = client.iteration_index + 1, time.monotonic()
    for _ in range(num_steps):
        step()
    last, end_s = client.iteration_index + 1, time.monotonic()
    ratios: dict[str, list[float]] = {"F": [], "B": []}
    for _ in range(PROFILED_STEPS):
        while not timer.kept.empty():
            timer.kept.get()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize(device)
        step()  # the times of an iteration are known when the next one begins
        torch.cuda.synchronize(device)
        times = timer.kept.get(timeout=KNOWN_WITHIN_S)
        spans_us = {
            event.name: event.time_range.elapsed_us()
            for event in profiled.events() or ()
            if event.device_type.name == "CUDA" and event.name[:2] in {"F ", "B "}
        }
        for kind, microbatch_index, _, begin_ns, end_ns in times.instructions:
            span_us = spans_us.get(f"{kind} {microbatch_index}")
            if span_us:
                ratios[kind].append((end_ns - begin_ns) / 1000.0 / span_us)
    assert all(ratios.values()), "the profiler has seen no instruction on the GPU"
    handle.detach()
    return {
        "time_ratios": ratios,
        "iterations": (first, last),
        "window_s": (begin_s, end_s),
        "num_errors": handle.num_errors,
    }


if __name__ == "__main__":
    sys.exit(main())
