"""An image model under DistributedDataParallel: torchrun --nproc-per-node 2 examples/ddp_images.py [--steps 100]."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gpuenergyd

IMAGES, PIXELS, CLASSES = 32, 32, 4


def make_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images of gradients in one of four directions, with the directions as labels."""
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
    ramp = torch.linspace(-1, 1, PIXELS).repeat(PIXELS, 1)
    directions = torch.stack([torch.rot90(ramp, k) for k in range(CLASSES)])
    noise = torch.randn(IMAGES, 1, PIXELS, PIXELS, generator=generator)
    return directions[labels].unsqueeze(1) + 0.5 * noise, labels


def main() -> None:
    """Train one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, CLASSES),
    ).to(device)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with gpuenergyd.job("ddp-example") as job:
        for step in range(options.steps):
            images, labels = (tensor.to(device) for tensor in make_batch(generator))
            with job.iteration():
                loss = nn.functional.cross_entropy(replica(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
