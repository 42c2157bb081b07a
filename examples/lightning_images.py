"""An image model under Lightning: python examples/lightning_images.py [--steps 100]."""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gpuenergyd_trainers.lightning import gpuenergy_callback

IMAGES, PIXELS, CLASSES = 32, 32, 4


class ImageModel(pl.LightningModule):
    """Classifies the direction of an image gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(16 * 4 * 4, CLASSES),
        )

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        if self.trainer.is_global_zero:
            print(f"step {batch_index}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def make_data(num_images: int) -> TensorDataset:
    """Return noisy images of gradients in one of four directions, with the directions as labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (num_images,), generator=generator)
    ramp = torch.linspace(-1, 1, PIXELS).repeat(PIXELS, 1)
    directions = torch.stack([torch.rot90(ramp, k) for k in range(CLASSES)])
    noise = torch.randn(num_images, 1, PIXELS, PIXELS, generator=generator)
    return TensorDataset(directions[labels].unsqueeze(1) + 0.5 * noise, labels)


def main() -> None:
    """Train the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_steps=options.steps,
        max_epochs=1,
        callbacks=[gpuenergy_callback("lightning-example")],  # the only added line
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(ImageModel(), DataLoader(make_data(options.steps * IMAGES), batch_size=IMAGES))


if __name__ == "__main__":
    main()
