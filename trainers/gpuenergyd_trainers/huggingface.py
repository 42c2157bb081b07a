"""Adapter for the Hugging Face Trainer: `Trainer(..., callbacks=[gpuenergy_callback("bert")])`.

Each phase of an optimizer step has its own clock, with one GPU per process. Evaluation and saving are not counted.
Works with any setup of Accelerate. Tested with transformers 5 on CPU.
"""

import importlib
import importlib.util
from typing import Any

from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.loop import StepMarks


class _Hooks:
    """Hooks that the Trainer finds and calls by name."""

    def __init__(self, job: str | None = None, **options: Any) -> None:
        super().__init__()
        self._marks = StepMarks(job, **options)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._marks.begin()

    def on_step_end(self, _args: Any, _state: Any, control: Any, **__: Any) -> None:
        self._marks.end()
        # The Trainer's own callbacks have already decided whether an evaluation or a checkpoint follows this step.
        if control.should_evaluate or control.should_save:
            self._marks.pause()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._marks.pause()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._marks.close()


def gpuenergy_callback(job: str | None = None, **options: Any) -> Any:
    """Return a callback for transformers.Trainer; `options` are those of `gpuenergyd.job`.

    Raises:
        UsageError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("transformers is not installed; install it with: pip install transformers")
    callback_class = importlib.import_module("transformers").TrainerCallback
    return type("GpuEnergyCallback", (_Hooks, callback_class), {})(job, **options)
