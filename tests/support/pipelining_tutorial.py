"""A transformer in a pipeline, in the shape of torch's public pipelining tutorial: split by hand, or traced and split.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 LOCAL_RANK=0 \
        python -m tests.support.pipelining_tutorial --split manual --schedule gpipe --steps 100

As there, every rank builds the whole model. With `--split manual` it deletes the parts of the other stages; with
`--split traced` the model is traced and cut before its layers. Times are those of the CPU, so they scatter as on any
host and do not depend on the clocks of simulated GPUs.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from gpuenergyd_trainers.torch_pipelining import attach

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 64, 4, 8
TOKENS, SEQUENCES, MICROBATCHES = 32, 16, 4
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SPLITS = ("manual", "traced")


class Transformer(nn.Module):
    """Embedding, layers, norm and output; parts that are None belong to another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(VOCABULARY, WIDTH)
        layers = (nn.TransformerDecoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0) for _ in range(LAYERS))
        self.layers = nn.ModuleDict({str(k): layer for k, layer in enumerate(layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.output: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return activations, or logits on the last stage."""
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


def manual_stage(model: Transformer, rank: int, num_stages: int, device: torch.device) -> Any:
    """Return a rank's stage, split by deleting the parts of the other stages."""
    begin, end = LAYERS * rank // num_stages, LAYERS * (rank + 1) // num_stages
    for k in range(LAYERS):
        if not begin <= k < end:
            del model.layers[str(k)]
    if rank > 0:
        model.tok_embeddings = None
    if rank < num_stages - 1:
        model.norm = model.output = None
    return PipelineStage(model, rank, num_stages, device)


def traced_stage(model: Transformer, rank: int, num_stages: int, device: torch.device) -> Any:
    """Return a rank's stage of the traced model, cut before layers."""
    example = torch.zeros(SEQUENCES // MICROBATCHES, TOKENS, dtype=torch.long)
    cuts = {f"layers.{LAYERS * stage // num_stages}": SplitPoint.BEGINNING for stage in range(1, num_stages)}
    return pipeline(module=model, mb_args=(example,), split_spec=cuts).build_stage(rank, device, dist.group.WORLD)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Train one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--split", choices=SPLITS, default="manual")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="gpipe")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    rank, num_stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Transformer()
    build = manual_stage if options.split == "manual" else traced_stage
    stage = build(model, rank, num_stages, device)
    schedule = SCHEDULES[options.schedule](stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)

    attach(schedule, job=f"tutorial-{options.split}-{options.schedule}-{num_stages}")

    for step in range(options.steps):
        start = torch.randint(VOCABULARY, (SEQUENCES, 1))
        tokens = (start + torch.arange(TOKENS + 1)) % VOCABULARY
        if rank == 0:
            schedule.step(tokens[:, :-1])
        elif rank == num_stages - 1:
            losses: list[torch.Tensor] = []
            schedule.step(target=tokens[:, 1:], losses=losses)
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)  # noqa: T201  its output
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
