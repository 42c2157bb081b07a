"""Adapter for Lightning: `Trainer(callbacks=[gpuenergy_callback("resnet")])`.

Each phase of a batch has its own clock, with one GPU per process. Sanity checks, validation and checkpoints do not
count as iterations. The job's measured figures go to the Trainer's loggers every `log_every_n_steps` steps. Tested with
lightning 2.6 on CPU.
"""

import importlib
import importlib.util
from typing import Any

from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.loop import StepMarks


class _Hooks:
    """Hooks that Lightning finds and calls by name."""

    def __init__(self, job: str | None = None, *, price_per_kwh: float | None = None, **options: Any) -> None:
        super().__init__()
        self._price_per_kwh = price_per_kwh
        self._log_from_step = 0
        self._marks = StepMarks(job, **options)

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._marks.begin()

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._marks.end()
        step = trainer.global_step
        if step >= self._log_from_step and trainer.loggers:
            self._log_from_step = step + trainer.log_every_n_steps
            if figures := self._marks.numbers(self._price_per_kwh):
                for logger in trainer.loggers:
                    logger.log_metrics(dict(figures), step=step)

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        self._marks.pause()

    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        self._marks.pause()

    def on_save_checkpoint(self, *_: Any, **__: Any) -> None:
        self._marks.pause()

    def on_exception(self, *_: Any, **__: Any) -> None:
        self._marks.close()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._marks.close()


def gpuenergy_callback(job: str | None = None, **options: Any) -> Any:
    """Return a Lightning callback; `options` are those of `gpuenergyd.job`, and `price_per_kwh`.

    Raises:
        UsageError: Lightning is not installed.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            callback_class = importlib.import_module(package).Callback
            return type("GpuEnergyCallback", (_Hooks, callback_class), {})(job, **options)
    raise UsageError("Lightning is not installed; install it with: pip install lightning")
