"""A plain loop under Accelerate: accelerate launch examples/accelerate_images.py [--steps 100].

Works as it is with every launch configuration of Accelerate that gives each process one GPU.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import gpuenergyd

IMAGES, PIXELS, CLASSES, ACCUMULATED = 32, 32, 4, 2


def make_images(num_images: int) -> torch.utils.data.TensorDataset:
    """Return noisy images of gradients in one of four directions, with the directions as labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (num_images,), generator=generator)
    ramp = torch.linspace(-1, 1, PIXELS).repeat(PIXELS, 1)
    directions = torch.stack([torch.rot90(ramp, k) for k in range(CLASSES)])
    noise = torch.randn(num_images, 1, PIXELS, PIXELS, generator=generator)
    return torch.utils.data.TensorDataset(directions[labels].unsqueeze(1) + 0.5 * noise, labels)


def main() -> None:
    """Train one process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(8 * 4 * 4, CLASSES)
    )
    images = make_images(options.steps * ACCUMULATED * IMAGES * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        torch.utils.data.DataLoader(images, batch_size=IMAGES),
    )
    batches = iter(loader)
    with gpuenergyd.job("accelerate-example") as job:
        for step in range(options.steps):
            with job.iteration():  # an optimizer step with its accumulated batches
                for _ in range(ACCUMULATED):
                    pixels, labels = next(batches)
                    with accelerator.accumulate(model):
                        loss = nn.functional.cross_entropy(model(pixels), labels)
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
            accelerator.print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
