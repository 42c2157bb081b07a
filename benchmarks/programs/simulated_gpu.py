"""Stands in for CUDA in the programs of this folder: layers that occupy a simulated GPU, and a row for each step.

Variables: CASE_WORLD is the file with the simulated GPUs, CASE_OUT the prefix of the rows' files, one for each GPU,
and CASE_GPU the number of the GPU where no launcher gives LOCAL_RANK. A row has the time since the start (t) and of
the step (dt) in seconds, the step's exact energy in joules (e), its loss as a hexadecimal float, the clock that the
GPU is locked at, how many works have run in pauses since the row before (paused), and how many of them at a lowered
clock (lowered).
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost

_POWER_W_PER_MHZ = 0.25
torch.set_num_threads(1)


class Gpu:
    """The GPU of this process."""

    def __init__(self, *, ratio: float = 1.0) -> None:
        """Open it; `ratio` is a factor on the duration of all work."""
        index = int(os.environ.get("LOCAL_RANK", os.environ.get("CASE_GPU", "0")))
        self._host = SimulatedHost.open(Path(os.environ["CASE_WORLD"]))
        identity = self._host.identities()[index]
        self._uuid, self._top_mhz = identity.gpu_uuid, max(identity.supported_sm_clocks_mhz)
        self._host.attach_process(self._uuid, os.getpid())
        self._rows = Path(f"{os.environ['CASE_OUT']}.{index}.jsonl").open("a", encoding="ascii")  # noqa: SIM115  to its end
        self.ratio = ratio
        self._began_s = time.monotonic()
        self._is_paused = False
        self._num_paused = self._num_lowered = 0
        self._last = self._now()

    def work(self, time_s: float, *, compute_ratio: float = 0.75) -> None:
        """Occupy the GPU for this time at full speed, of which `compute_ratio` follows the clock."""
        own_s = self.ratio * time_s
        work = InstructionWork(own_s * (1 - compute_ratio), own_s * compute_ratio, _POWER_W_PER_MHZ)
        self._host.begin_work(self._uuid, work)
        self._host.hold(self._uuid)
        self._host.finish_work(self._uuid)
        if self._is_paused:
            clock_mhz = self._host.locked_sm_clock_mhz(self._uuid)
            self._num_paused += 1
            self._num_lowered += clock_mhz is not None and clock_mhz < self._top_mhz

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """Write the row of a step that ends now."""
        now, last = self._now(), self._last
        row = {
            "t": now[0] - self._began_s,
            "dt": now[0] - last[0],
            "e": now[1] - last[1],
            "loss": None if loss is None else float(loss).hex(),
            "clock": self._host.locked_sm_clock_mhz(self._uuid),
            "paused": self._num_paused,
            "lowered": self._num_lowered,
        }
        self._rows.write(json.dumps(row) + "\n")
        self._rows.flush()
        self._num_paused = self._num_lowered = 0
        self._last = now

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave a block without gradients, such as an evaluation, out of the next step's time and energy."""
        self._is_paused = True
        with torch.no_grad():
            yield
        self._is_paused = False
        self._last = self._now()

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), self._host.exact_energy_j(self._uuid)


class Busy(torch.nn.Module):
    """Occupies the GPU in its forward and in its backward."""

    def __init__(self, gpu: Gpu, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self._gpu, self._forward_s, self._backward_s = gpu, forward_s, backward_s

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        return _Busy.apply(rows, self._gpu, self._forward_s, self._backward_s)  # type: ignore[no-any-return, no-untyped-call]  # torch leaves it untyped

    def __deepcopy__(self, memo: object) -> "Busy":
        return Busy(self._gpu, self._forward_s, self._backward_s)


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, gpu: Gpu, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.gpu, ctx.backward_s = gpu, backward_s
        gpu.work(forward_s)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gpu.work(ctx.backward_s)
        return gradients[0], None, None, None


OPTIMIZER_COMPUTE_RATIO = 0.2
"""Share of an optimizer step that follows the clock: memory bounds it."""
NUM_FEATURES, NUM_CLASSES = 16, 4


def classifier(gpu: Gpu, forward_s: float, backward_s: float) -> torch.nn.Module:
    """Return a small model that takes these times on the GPU."""
    torch.manual_seed(0)
    busy = Busy(gpu, forward_s, backward_s)
    return torch.nn.Sequential(
        torch.nn.Linear(NUM_FEATURES, 32), busy, torch.nn.ReLU(), torch.nn.Linear(32, NUM_CLASSES)
    )


def optimizer_of(model: torch.nn.Module, gpu: Gpu, step_s: float) -> torch.optim.Optimizer:
    """Return an optimizer whose steps take this time on the GPU."""

    class OnGpu(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            """Step, and take the time of a large model's step."""
            result = super().step(closure)
            gpu.work(step_s, compute_ratio=OPTIMIZER_COMPUTE_RATIO)
            return result

    return OnGpu(model.parameters(), lr=1e-3)


def num_steps() -> int:
    """Return the length of the program."""
    return int(os.environ["STEPS"])
