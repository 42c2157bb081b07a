"""Patches of frameworks, by which objects attach themselves at their first training step.

A method of a class, or a function of Megatron, is wrapped: when it is first called for an object, the adapter attaches
to the object, and then the call proceeds. No measurement is lost, since the first step does not count as an iteration.
Programs that attach themselves are left alone. Job, policy and slowdown are taken from the environment, as for any
program. Without a daemon's socket on this host, nothing is patched.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from gpuenergyd.client.environment import can_see, find_socket_path
from gpuenergyd.log_lines import safe_logger

logger = safe_logger("gpuenergyd.trainers")


def join_pipeline_schedules(module: ModuleType) -> None:
    """Patch the pipeline schedules of torch.distributed.pipelining."""

    def join(schedule: Any) -> None:
        if "step" in vars(schedule):
            return
        from gpuenergyd_trainers.torch_pipelining import attach_at_step  # noqa: PLC0415  only where it is needed

        attach_at_step(schedule)

    for schedule_class in _classes_with("step", module):
        _join_at_first("step", schedule_class, join, _trains)


def join_pipeline_engines(module: ModuleType) -> None:
    """Patch DeepSpeed's pipeline engines; they attach at their first batch."""

    def join(engine: Any) -> None:
        if "_INSTRUCTION_MAP" in vars(engine):
            return
        from gpuenergyd_trainers.deepspeed import attach  # noqa: PLC0415  only where it is needed

        attach(engine)

    for engine_class in _classes_with("train_batch", module):
        _join_at_first("train_batch", engine_class, join)


def join_lightning_trainers(module: ModuleType) -> None:
    """Patch Lightning's trainers; the callback is added when they first fit."""

    def join(trainer: Any) -> None:
        if any(type(callback).__name__ == "GpuEnergyCallback" for callback in trainer.callbacks):
            return
        from gpuenergyd_trainers.lightning import gpuenergy_callback  # noqa: PLC0415  only where it is needed

        trainer.callbacks.insert(0, gpuenergy_callback())

    for trainer_class in _classes_with("fit", module):
        _join_at_first("fit", trainer_class, join)


def join_huggingface_trainers(module: ModuleType) -> None:
    """Patch Hugging Face trainers; the callback is added at the start of training, after their own callbacks."""

    def join(trainer: Any) -> None:
        if any(type(callback).__name__ == "GpuEnergyCallback" for callback in trainer.callback_handler.callbacks):
            return
        from gpuenergyd_trainers.huggingface import gpuenergy_callback  # noqa: PLC0415  only where it is needed

        trainer.add_callback(gpuenergy_callback())

    for trainer_class in _classes_with("train", module):
        _join_at_first("train", trainer_class, join)


def join_plain_loops(module: ModuleType) -> None:
    """Watch the optimizer steps of loops that mark nothing themselves, to attach them."""
    if not can_see(find_socket_path()):
        return
    from gpuenergyd_trainers.loop import UnmarkedLoop  # noqa: PLC0415  only where it is needed

    UnmarkedLoop(module)


_MEGATRON_STEPS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def join_megatron_schedules(module: ModuleType) -> None:
    """Patch the schedules of Megatron-core; the model's configuration is attached at the first training step."""
    if not can_see(find_socket_path()):
        return
    seen: list[Any] = []

    def join(arguments: Mapping[str, Any]) -> None:
        from megatron.core.utils import get_model_config  # type: ignore[import-not-found]  # noqa: PLC0415  loaded already

        model = arguments["model"]
        config = get_model_config(model[0] if isinstance(model, list) else model)
        if arguments.get("forward_only") or any(config is known for known in seen):
            return
        seen.append(config)
        from gpuenergyd_trainers.megatron import attach, is_attached  # noqa: PLC0415  only where it is needed

        if not is_attached(config):
            attach(config, num_microbatches=arguments["num_microbatches"])

    for name in _MEGATRON_STEPS:
        setattr(module, name, _joining_first(vars(module)[name], join))


def _joining_first(step: Callable[..., Any], join: Callable[[Mapping[str, Any]], None]) -> Callable[..., Any]:
    has_failed = False

    @functools.wraps(step)
    def joining_first(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_failed
        try:
            if not has_failed:
                join(kwargs)  # Megatron's own functions take keyword arguments only
        except Exception as error:  # noqa: BLE001  never raise into a training step
            has_failed = True
            logger.warning("gpuenergyd: Megatron cannot be joined; training continues at full speed: %r", error)
        return step(*args, **kwargs)

    return joining_first


def _classes_with(method: str, module: ModuleType) -> list[type]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and method in vars(value)
    ]


def _trains(schedule: Any) -> bool:
    return bool(getattr(schedule, "_has_backward", True))  # torch sets it to evaluate


def _join_at_first(
    method: str, owner: type, join: Callable[[Any], None], is_due: Callable[[Any], bool] = lambda _: True
) -> None:
    if not can_see(find_socket_path()):
        return
    original = vars(owner)[method]
    joined: weakref.WeakSet[Any] = weakref.WeakSet()
    has_failed = False

    @functools.wraps(original)
    def joining_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_failed
        try:
            if not has_failed and self not in joined and is_due(self):
                joined.add(self)
                join(self)
        except Exception as error:  # noqa: BLE001  never raise into a training step
            has_failed = True
            logger.warning(
                "gpuenergyd: %s cannot be joined; training continues at full speed: %r", type(self).__name__, error
            )
        return original(self, *args, **kwargs)

    setattr(owner, method, joining_first)
