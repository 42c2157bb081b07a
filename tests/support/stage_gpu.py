"""The simulated GPU of one rank in a training with a real framework: its work takes time and energy, torch computes."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost
from gpuenergyd_sim.training.timers import SimulatedTimer

_COMPUTE_SHARE, _POWER_W_PER_MHZ = 0.8, 0.2


@dataclass(frozen=True)
class StageGpu:
    """A simulated GPU that this process works on."""

    host: SimulatedHost
    gpu_uuid: str
    timer: SimulatedTimer
    ratio: float
    """Factor on the duration of all work."""
    clocks_mhz: list[int | None] = field(default_factory=list)
    """The lock under which each work ended, None without one."""

    @classmethod
    def attached(cls, world_path: Path, gpu_index: int, ratio: float) -> "StageGpu":
        """Open a GPU of a host and be a process on it."""
        host = SimulatedHost.open(world_path)
        gpu_uuid = host.identities()[gpu_index].gpu_uuid
        host.attach_process(gpu_uuid, os.getpid())
        return cls(host, gpu_uuid, SimulatedTimer(), ratio)

    def detach(self) -> None:
        """Be no process on it any more."""
        self.host.detach_process(self.gpu_uuid, os.getpid())

    def energy_j(self) -> float:
        """Return its exact energy so far."""
        return self.host.exact_energy_j(self.gpu_uuid)

    def work(self, time_s: float) -> None:
        """Wait until work of this duration at full speed is done."""
        own_s = time_s * self.ratio
        self.host.begin_work(
            self.gpu_uuid,
            InstructionWork(
                memory_time_s=own_s * (1 - _COMPUTE_SHARE),
                compute_time_s=own_s * _COMPUTE_SHARE,
                power_coefficient_w_per_mhz=_POWER_W_PER_MHZ,
            ),
        )
        self.host.hold(self.gpu_uuid)
        self.timer.work_ended_ns = self.host.finish_work(self.gpu_uuid)
        self.clocks_mhz.append(self.host.locked_sm_clock_mhz(self.gpu_uuid))


class Work(Protocol):
    """A GPU, or nothing, that takes time for work."""

    def work(self, time_s: float) -> None:
        """Wait until work of this duration at full speed is done."""
        ...


def after_work(gpu: Work, time_s: float, x: Any) -> Any:
    """Return a tensor whose gradient passes after this time of work."""
    return _AfterWork.apply(x, gpu, time_s)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _AfterWork(torch.autograd.Function):
    """Nothing in a forward, the GPU's work in a backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, gpu: Work, time_s: float) -> Any:
        ctx.gpu, ctx.time_s = gpu, time_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Take the time of a backward."""
        ctx.gpu.work(ctx.time_s)
        return gradients[0], None, None


class StepRecord:
    """Time, energy and clocks of each training step of one rank, in a file per rank if a folder is given."""

    def __init__(self, gpu: StageGpu, folder: Path | None, rank: int) -> None:
        self._gpu = gpu
        self._path = path_of_steps(folder, rank) if folder is not None else None
        self._last = self._now()

    def add(self, plan_epoch: int) -> None:
        """Record the step that has just ended, with the epoch of the plan that it followed."""
        last, self._last = self._last, self._now()
        clocks_mhz, self._gpu.clocks_mhz[:] = list(self._gpu.clocks_mhz), []
        if self._path is None:
            return
        row = {"time_s": self._last[0] - last[0], "energy_j": self._last[1] - last[1], "plan_epoch": plan_epoch}
        with self._path.open("a", encoding="ascii") as file:
            file.write(json.dumps({**row, "clocks_mhz": clocks_mhz}) + "\n")

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), self._gpu.energy_j()


def path_of_steps(folder: Path, rank: int) -> Path:
    return folder / f"steps-{rank}.jsonl"
