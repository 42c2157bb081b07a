"""A small training with DeepSpeed's pipeline engine on gloo, whose instructions take the time of a simulated GPU."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpuenergyd_trainers.deepspeed import attach
from gpuenergyd_trainers.joining.handle import Handle
from tests.support.stage_gpu import StageGpu, StepRecord, after_work

NUM_STAGES = 2
_WIDTH = 8
_FORWARD_S, _BACKWARD_S = 0.010, 0.020
_LAST_STAGE_RATIO = 1.3


@dataclass(frozen=True)
class DeepSpeedTraining:
    """Sizes and length of a training, and the simulated GPUs that it runs on."""

    world_paths: tuple[Path, ...]
    """The GPUs of each host."""
    dp: int = 1
    microbatches: int = 4
    iterations: int = 8
    socket_paths: tuple[str, ...] = ()
    """The daemon of each host; empty for no daemon."""
    scale: float = 1.0
    """Factor on the duration of instructions."""
    max_slowdown: float = 0.01
    record_folder: Path | None = None
    """Where each rank records its steps."""
    begin_steps: Callable[[Handle], Callable[[], None]] | None = None
    """Given the attached handle of a rank, returns a function that is called before each step."""

    @property
    def num_ranks(self) -> int:
        """Processes of the training."""
        return NUM_STAGES * self.dp

    def run_rank(self, rank: int) -> tuple[list[str], list[int]]:
        """Train in the default process group; return the exact losses and the plan's epoch of each iteration."""
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        per_host = self.num_ranks // len(self.world_paths)
        host_index, gpu_index = divmod(rank, per_host)
        os.environ.update(LOCAL_RANK=str(gpu_index), RANK=str(rank), WORLD_SIZE=str(self.num_ranks))
        os.environ.update(LOCAL_SIZE=str(per_host), LOCAL_WORLD_SIZE=str(per_host))
        import deepspeed  # type: ignore[import-not-found]  # noqa: PLC0415  after the variables

        # What it would compile on first use is a faster all-reduce on one host, which a pipeline has no need of.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        pp_rank = rank // self.dp
        ratio = self.scale * (_LAST_STAGE_RATIO if pp_rank == NUM_STAGES - 1 else 1.0)
        gpu = StageGpu.attached(self.world_paths[host_index], gpu_index, ratio)
        torch.manual_seed(1)
        model = deepspeed.pipe.PipelineModule(
            layers=[deepspeed.pipe.LayerSpec(_layer(gpu)) for _ in range(NUM_STAGES)],
            num_stages=NUM_STAGES,
            loss_fn=torch.nn.functional.mse_loss,
        )
        engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=self._config())
        handle = attach(
            engine,
            job="deepspeed",
            run_key="r",
            gpu_uuid=gpu.gpu_uuid,
            socket_path=self.socket_paths[host_index] if self.socket_paths else "/none",
            max_slowdown_ratio=self.max_slowdown,
            timer=gpu.timer,
        )
        if not self.socket_paths:
            handle.detach()
        losses: list[str] = []
        epochs: list[int] = []
        before_step = self.begin_steps(handle) if self.begin_steps is not None else lambda: None
        record = StepRecord(gpu, self.record_folder, rank)
        for step in range(self.iterations):
            before_step()
            generator = torch.Generator().manual_seed(step * 97 + rank % self.dp)
            batch = [(torch.randn(2, _WIDTH, generator=generator),) * 2 for _ in range(self.microbatches)]
            losses.append(float(engine.train_batch(data_iter=iter(batch))).hex())
            epochs.append(handle.plan_epoch)
            record.add(handle.plan_epoch)
        assert handle.num_errors == 0
        dist.barrier()
        handle.detach()
        gpu.detach()
        return losses, epochs

    def _config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.microbatches,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 100_000,
        }


def _layer(gpu: StageGpu) -> type[torch.nn.Module]:
    class Layer(torch.nn.Module):
        """A linear layer that takes the time of its GPU."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(_WIDTH, _WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return activations, after the time of a forward."""
            gpu.work(_FORWARD_S)
            output: torch.Tensor = after_work(gpu, _BACKWARD_S, self.linear(x))
            return output

    return Layer
