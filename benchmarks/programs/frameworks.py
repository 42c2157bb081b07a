"""Loops that a framework runs, or wraps: `torchrun frameworks.py NAME`, in the framework's environment."""

import importlib
import os
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from simulated_gpu import NUM_CLASSES, NUM_FEATURES, Gpu, classifier, num_steps, optimizer_of

_BATCH = 8
Row = dict[str, torch.Tensor]


class WithLoss(torch.nn.Module):
    """A model that returns its loss, as those of Hugging Face do."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.body = classifier(gpu, 0.05, 0.11)

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> Row:
        """Return the loss and the outputs."""
        logits = self.body(rows)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows_of_run() -> list[Row]:
    """Return random rows, the same ones in every run."""
    generator = torch.Generator().manual_seed(7)
    num = num_steps() * _BATCH * int(os.environ["WORLD_SIZE"])
    rows, labels = (
        torch.randn(num, NUM_FEATURES, generator=generator),
        torch.randint(NUM_CLASSES, (num,), generator=generator),
    )
    return [{"rows": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def collate(rows: list[Row]) -> Row:
    """Return a batch, after the time that loading takes."""
    time.sleep(0.04)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def accelerate(gpu: Gpu) -> None:
    """Train with a loop of one's own around what accelerate has prepared."""
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=1)
    model = WithLoss(gpu)
    loader = torch.utils.data.DataLoader(rows_of_run(), batch_size=_BATCH, collate_fn=collate)  # type: ignore[arg-type, var-annotated]  # a list is a dataset
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model, gpu, 0.03), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        gpu.step(loss.detach())


def huggingface(gpu: Gpu) -> None:
    """Train with the Trainer of Hugging Face."""
    transformers: Any = importlib.import_module("transformers")

    class RowTrainer(transformers.Trainer):  # type: ignore[misc]  # installed in its own environment
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            """Keep the loss."""
            self.last_loss = super().training_step(*args, **kwargs)
            return self.last_loss

    class Rows(transformers.TrainerCallback):  # type: ignore[misc]  # as above
        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Write the row."""
            gpu.step(trainer.last_loss.detach())

    model = WithLoss(gpu)
    optimizer = optimizer_of(model, gpu, 0.03)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=num_steps(),
            per_device_train_batch_size=_BATCH,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=1,
        )
        trainer = RowTrainer(
            model=model,
            args=arguments,
            train_dataset=rows_of_run(),
            data_collator=collate,
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)),
            callbacks=[Rows()],
        )
        trainer.train()


def lightning(gpu: Gpu) -> None:
    """Train with Lightning."""
    pytorch: Any = importlib.import_module("lightning.pytorch")

    class Module(pytorch.LightningModule):  # type: ignore[misc]  # installed in its own environment
        def __init__(self) -> None:
            super().__init__()
            self.model = WithLoss(gpu)

        def training_step(self, batch: Row, _index: int) -> Any:
            """Return the loss."""
            self.last_loss = self.model(**batch)["loss"]
            return self.last_loss

        def on_train_batch_end(self, *_: Any) -> None:
            """Write the row."""
            gpu.step(self.last_loss.detach())

        def configure_optimizers(self) -> Any:
            """Return the optimizer."""
            return optimizer_of(self, gpu, 0.03)

    loader = torch.utils.data.DataLoader(rows_of_run(), batch_size=_BATCH, collate_fn=collate)  # type: ignore[arg-type, var-annotated]  # a list is a dataset
    trainer = pytorch.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_steps=num_steps(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)


if __name__ == "__main__":
    {run.__name__: run for run in (accelerate, huggingface, lightning)}[sys.argv[1]](Gpu())
    if dist.is_initialized():
        dist.destroy_process_group()
    print("done")
