"""A small GPT in a pipeline: torchrun --nproc-per-node 4 examples/gpt_pipeline.py [--steps 100]."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from gpuenergyd_trainers.torch_pipelining import attach

VOCABULARY, WIDTH, TOKENS, SEQUENCES, MICROBATCHES = 256, 128, 64, 16, 8


class Stage(nn.Module):
    """Two transformer layers; the first stage adds the embedding, the last one the head."""

    def __init__(self, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if is_first else nn.Identity()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY) if is_last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations, or logits on the last stage."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.layers(self.embedding(x), mask=mask, is_causal=True))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next token."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Train one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, num_stages = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == num_stages - 1
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        torch.manual_seed(rank)
        model = Stage(is_first=is_first, is_last=is_last).to(device)
        stage = PipelineStage(model, rank, num_stages, device)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        attach(schedule, job="gpt-example")  # the only added line

        generator = torch.Generator().manual_seed(0)
        for step in range(options.steps):
            start = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)
            tokens = ((start + torch.arange(TOKENS + 1)) % VOCABULARY).to(device)
            losses: list[torch.Tensor] = []
            if is_last:
                schedule.step(*((tokens[:, :-1],) if is_first else ()), target=tokens[:, 1:], losses=losses)
                print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
            else:
                schedule.step(*((tokens[:, :-1],) if is_first else ()))
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
