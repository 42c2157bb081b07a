"""A small untrained GPT-2 with TRL's GRPOTrainer: python examples/trl_grpo.py [--steps 100].

The model is rewarded for each letter `a` that it writes. Rollouts run at full speed and are no iterations; the training
steps between them are.
"""

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from gpuenergyd_trainers.huggingface import gpuenergy_callback

LETTERS, PROMPTS, PADDING, END = "abcdefgh", ("abc", "bcd", "cde", "def"), "<pad>", "<eos>"
SAMPLES, STEPS_PER_ROLLOUT = 16, 2


def count_letters(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion."""
    return [float(completion.count("a")) for completion in completions]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter."""
    words = {word: index for index, word in enumerate((PADDING, END, *LETTERS))}
    letters = Tokenizer(models.WordLevel(words, unk_token=PADDING))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=letters, pad_token=PADDING, eos_token=END)


def make_trainer(folder: str, *, num_steps: int, callbacks: list[Any]) -> GRPOTrainer:
    """Return a trainer that trains two steps on the samples of each rollout."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
    )
    arguments = GRPOConfig(
        output_dir=folder,
        max_steps=num_steps,
        per_device_train_batch_size=SAMPLES,
        num_generations=SAMPLES // 2,
        num_iterations=STEPS_PER_ROLLOUT,
        max_completion_length=16,
        learning_rate=1e-2,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=GPT2LMHeadModel(config),
        reward_funcs=count_letters,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * num_steps}),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def main() -> None:
    """Train the model and print the mean reward of each rollout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        callback = gpuenergy_callback("trl-example")  # the only added line
        trainer = make_trainer(folder, num_steps=options.steps, callbacks=[callback])
        trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"step {entry['step']}: reward {entry['reward']:.2f}")


if __name__ == "__main__":
    main()
