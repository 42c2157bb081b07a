"""Pipelines of torch in the manner of torchtitan: `torchrun pipelines.py SCHEDULE`, with the variables of the loops.

The last of the stages is slower; there is an evaluation every 30 steps.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from simulated_gpu import OPTIMIZER_COMPUTE_RATIO, Busy, Gpu, num_steps
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

_WIDTH, _NUM_MICROBATCHES, _ROWS = 32, 8, 16
_EVALUATED_EVERY, _NUM_EVALUATIONS = 30, 2
_LAST_RATIO = 1.3


class Part(torch.nn.Module):
    """One stage."""

    def __init__(self, gpu: Gpu, index: int, *, time_ratio: float) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.layer = torch.nn.Linear(_WIDTH, _WIDTH)
        self.busy = Busy(gpu, 0.015 * time_ratio, 0.03 * time_ratio)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return activations."""
        return self.busy(rows + torch.relu(self.layer(rows)))  # type: ignore[no-any-return]  # torch's call


def main(name: str) -> None:
    """Train one rank."""
    gpu = Gpu()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    schedule_class: Any = get_schedule_class(name)
    num_chunks = 2 if issubclass(schedule_class, PipelineScheduleMulti) else 1
    num_stages = num_chunks * num_ranks
    indexes = range(rank, num_stages, num_ranks)
    parts = [Part(gpu, k, time_ratio=(_LAST_RATIO if k == num_stages - 1 else 1.0) / num_chunks) for k in indexes]
    stages = [PipelineStage(part, k, num_stages, torch.device("cpu")) for part, k in zip(parts, indexes, strict=True)]
    schedule = schedule_class(
        stages if num_chunks > 1 else stages[0], n_microbatches=_NUM_MICROBATCHES, loss_fn=torch.nn.functional.mse_loss
    )
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(num_steps()):
        rows, targets = (torch.randn(_ROWS, _WIDTH, generator=generator) for _ in range(2))
        inputs = (rows,) if is_first else ()
        losses: list[torch.Tensor] | None = [] if is_last else None
        schedule.step(*inputs, target=targets if is_last else None, losses=losses)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        gpu.work(0.01, compute_ratio=OPTIMIZER_COMPUTE_RATIO)
        optimizer.step()
        optimizer.zero_grad()
        gpu.step(torch.stack(losses).sum().detach() if losses else None)
        if step % _EVALUATED_EVERY == _EVALUATED_EVERY - 1:
            with gpu.pause():
                for _ in range(_NUM_EVALUATIONS):
                    schedule.eval(*inputs, target=targets if is_last else None, losses=[] if is_last else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    print("done")
