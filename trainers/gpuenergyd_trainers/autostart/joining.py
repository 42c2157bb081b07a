"""What is changed in a framework so that a program joins without being changed: the first step attaches.

A method of a class is wrapped, and on an object's first call the adapter is attached to that object; the call itself
goes on as it was, which costs nothing, since a first step is no iteration anyway. A program that attaches itself is
left to do so. Job, policy and slowdown come from the environment that `gpuenergyd run` has made; where no daemon has
a socket on this host, nothing is changed at all.
"""

import contextlib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuenergyd.client.environment import find_socket_path

logger = logging.getLogger("gpuenergyd.trainers")

JOB_VARIABLE = "GPUENERGYD_JOB"
POLICY_VARIABLE = "GPUENERGYD_JOB_POLICY"
MAX_SLOWDOWN_VARIABLE = "GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO"


def options_from_environment() -> dict[str, Any]:
    """Return the adapters' keyword arguments; without a job's name it is the program's."""
    options: dict[str, Any] = {"job": os.environ.get(JOB_VARIABLE) or Path(sys.argv[0]).stem or "python"}
    if policy := os.environ.get(POLICY_VARIABLE):
        options["policy"] = policy
    with contextlib.suppress(KeyError, ValueError):  # the command has checked it; a program may have changed it
        options["max_slowdown_ratio"] = float(os.environ[MAX_SLOWDOWN_VARIABLE])
    return options


def join_pipeline_schedules(module: ModuleType) -> None:
    """Have schedules of torch.distributed.pipelining attach at their first step."""

    def join(schedule: Any) -> None:
        if "step" in vars(schedule):
            return
        from gpuenergyd_trainers.torch_pipelining import attach  # noqa: PLC0415  only where it is needed

        attach(schedule, **options_from_environment())

    for schedule_class in _classes_with("step", module):
        _join_at_first("step", schedule_class, join)


def join_pipeline_engines(module: ModuleType) -> None:
    """Have DeepSpeed's pipeline engines attach at their first batch."""

    def join(engine: Any) -> None:
        if "_INSTRUCTION_MAP" in vars(engine):
            return
        from gpuenergyd_trainers.deepspeed import attach  # noqa: PLC0415  only where it is needed

        attach(engine, **options_from_environment())

    for engine_class in _classes_with("train_batch", module):
        _join_at_first("train_batch", engine_class, join)


def join_lightning_trainers(module: ModuleType) -> None:
    """Have Lightning's trainers call our callback from their first fit on."""

    def join(trainer: Any) -> None:
        if any(type(callback).__name__ == "GpuEnergyCallback" for callback in trainer.callbacks):
            return
        from gpuenergyd_trainers.lightning import gpuenergy_callback  # noqa: PLC0415  only where it is needed

        options = options_from_environment()
        trainer.callbacks.insert(0, gpuenergy_callback(options.pop("job"), **options))

    for trainer_class in _classes_with("fit", module):
        _join_at_first("fit", trainer_class, join)


def join_huggingface_trainers(module: ModuleType) -> None:
    """Have the Hugging Face Trainers call our callback from their first training on, after their own."""

    def join(trainer: Any) -> None:
        if any(type(callback).__name__ == "GpuEnergyCallback" for callback in trainer.callback_handler.callbacks):
            return
        from gpuenergyd_trainers.huggingface import gpuenergy_callback  # noqa: PLC0415  only where it is needed

        options = options_from_environment()
        trainer.add_callback(gpuenergy_callback(options.pop("job"), **options))

    for trainer_class in _classes_with("train", module):
        _join_at_first("train", trainer_class, join)


def _classes_with(method: str, module: ModuleType) -> list[type]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and method in vars(value)
    ]


def _join_at_first(method: str, owner: type, join: Callable[[Any], None]) -> None:
    if not Path(find_socket_path()).exists():
        return
    original = vars(owner)[method]
    joined: weakref.WeakSet[Any] = weakref.WeakSet()
    has_failed = False

    @functools.wraps(original)
    def joining_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_failed
        try:
            if not has_failed and self not in joined:
                joined.add(self)
                join(self)
        except Exception as error:  # noqa: BLE001  never into a step
            has_failed = True
            logger.warning("gpuenergyd: %s runs on unmanaged: %r", type(self).__name__, error)
        return original(self, *args, **kwargs)

    setattr(owner, method, joining_first)
