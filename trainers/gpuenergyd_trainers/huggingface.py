"""Adapter for the Hugging Face Trainer: `Trainer(..., callbacks=[gpuenergy_callback("bert")])`.

Each phase of an optimizer step has its own clock, with one GPU per process. Evaluation and saving are not counted.
Works with any setup of Accelerate. TRL's trainers generate samples within a step: such a rollout is a pause. The job's
measured figures are part of what the Trainer logs, so trackers such as W&B, MLflow, TensorBoard and Trackio show them.
Tested with transformers 5 and trl 1.16 on CPU.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from gpuenergyd.client.environment import find_rank
from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.loop import StepMarks

# TRL's trainers that generate samples where they prepare the inputs of some steps.
_ROLLOUT_TRAINERS = ("GRPO", "RLOO")


class _Hooks:
    """Hooks that the Trainer finds and calls by name."""

    def __init__(self, job: str | None = None, *, price_per_kwh: float | None = None, **options: Any) -> None:
        super().__init__()
        self._price_per_kwh = price_per_kwh
        self._tokens_seen, self._num_processes = 0, 1
        self._has_rollouts = False
        self._awaits_inputs = False
        self._marks = StepMarks(job, **options)

    def on_train_begin(self, args: Any, state: Any, _control: Any, **__: Any) -> None:
        self._tokens_seen, self._num_processes = state.num_input_tokens_seen, find_rank()[1]
        self._has_rollouts = _watch_rollouts(args)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._awaits_inputs = self._has_rollouts
        if not self._awaits_inputs:
            self._marks.begin()

    def after_inputs(self) -> None:
        """Begin the iteration of a step whose first inputs are ready."""
        if self._awaits_inputs:
            self._awaits_inputs = False
            self._marks.begin()

    def before_rollout(self) -> None:
        """Pause; a step that has already trained on a batch is not counted."""
        self._marks.pause()

    def on_step_end(self, _args: Any, state: Any, control: Any, **__: Any) -> None:
        self._marks.end(self._num_tokens(state))
        # The Trainer's own callbacks have already decided whether an evaluation or a checkpoint follows this step.
        if control.should_evaluate or control.should_save:
            self._marks.pause()

    def _num_tokens(self, state: Any) -> int | None:
        """Return this process's share of a step's tokens; None if `include_num_input_tokens_seen` is not set."""
        before, self._tokens_seen = self._tokens_seen, state.num_input_tokens_seen
        return round((self._tokens_seen - before) / self._num_processes) or None

    def add_figures(self, state: Any, logs: dict[str, Any]) -> None:
        """Add the job's figures to what the Trainer logs of its training."""
        if "loss" in logs or "train_loss" in logs:
            figures = self._marks.numbers(self._price_per_kwh)
            logs.update(figures)
            for entry in state.log_history[-1:]:
                entry.update(figures)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._marks.pause()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._marks.close()


def _watch_rollouts(args: Any) -> bool:
    """Have TRL's trainer call our callback before rollouts and after inputs; return whether it is one with rollouts."""
    for name in _ROLLOUT_TRAINERS:
        module = sys.modules.get(f"trl.trainer.{name.lower()}_trainer")
        if module is not None and isinstance(args, getattr(module, f"{name}Config", ())):
            trainer = getattr(module, f"{name}Trainer")
            if not all(hasattr(trainer, method) for method in ("_generate_and_score_completions", "_prepare_inputs")):
                return False  # a TRL that names its steps otherwise: rollouts are then part of iterations
            _call_ours(trainer, "_generate_and_score_completions", before=_Hooks.before_rollout)
            _call_ours(trainer, "_prepare_inputs", after=_Hooks.after_inputs)
            return True
    return False


def _nothing(_hooks: _Hooks) -> None:
    pass


def _call_ours(
    trainer: Any, name: str, *, before: Callable[[_Hooks], None] = _nothing, after: Callable[[_Hooks], None] = _nothing
) -> None:
    """Wrap a method of a trainer class once, for its trainers with our callback."""
    original = getattr(trainer, name)
    if getattr(original, "calls_ours", False):
        return

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        ours = [callback for callback in self.callback_handler.callbacks if isinstance(callback, _Hooks)]
        for callback in ours:
            before(callback)
        result = original(self, *arguments, **options)
        for callback in ours:
            after(callback)
        return result

    method.calls_ours = True  # type: ignore[attr-defined]  # a mark on the function
    setattr(trainer, name, method)


def _log_figures(handler: Any) -> None:
    """Have a CallbackHandler class add figures to each log before its callbacks see it.

    Callbacks of trackers precede those of the program, so a figure that is added in our own `on_log` comes too late.
    """
    original = handler.on_log
    if getattr(original, "adds_figures", False):
        return

    @functools.wraps(original)
    def on_log(self: Any, args: Any, state: Any, control: Any, logs: dict[str, Any], **options: Any) -> Any:
        for callback in self.callbacks:
            if isinstance(callback, _Hooks):
                callback.add_figures(state, logs)
        return original(self, args, state, control, logs, **options)

    on_log.adds_figures = True  # type: ignore[attr-defined]  # a mark on the function
    handler.on_log = on_log


def gpuenergy_callback(job: str | None = None, **options: Any) -> Any:
    """Return a callback for transformers.Trainer; `options` are those of `gpuenergyd.job`, and `price_per_kwh`.

    Raises:
        UsageError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("transformers is not installed; install it with: pip install transformers")
    _log_figures(importlib.import_module("transformers.trainer_callback").CallbackHandler)
    callback_class = importlib.import_module("transformers").TrainerCallback
    return type("GpuEnergyCallback", (_Hooks, callback_class), {})(job, **options)
