"""A small untrained GPT-2 with the Hugging Face Trainer: python examples/huggingface_gpt2.py [--steps 100]."""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gpuenergyd_trainers.huggingface import gpuenergy_callback

VOCABULARY, WIDTH, TOKENS, SEQUENCES = 256, 64, 64, 8


class CountingUp(torch.utils.data.Dataset):
    """Sequences of consecutive token ids."""

    def __init__(self, num_sequences: int) -> None:
        self._num_sequences = num_sequences

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self._num_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sequence as input and labels."""
        if not 0 <= index < self._num_sequences:
            raise IndexError(index)
        tokens = (index * 37 + torch.arange(TOKENS)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train the model and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--report-to", nargs="*", default=[], help="trackers: wandb, mlflow, tensorboard, trackio")
    options = parser.parse_args()
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=2, n_head=4)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=SEQUENCES,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=options.report_to,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=CountingUp(options.steps * SEQUENCES),
            callbacks=[gpuenergy_callback("huggingface-example")],  # the only added line
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step, loss in enumerate(losses):
        print(f"step {step}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
