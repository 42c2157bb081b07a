"""Instructions of Megatron-core, marked at its own step functions.

Megatron's schedules call `forward_step`, `backward_step` and, if a forward overlaps with the backward of another
microbatch, `combined_forward_backward_step`. The arguments of a forward contain its microbatch and chunk (`vp_stage`);
these are stored in its output, so that the backward is known too. The functions contain computation and the loss, but
no communication with other stages. Combined ones may wait for their inputs first; they are marked from then on.
"""

import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gpuenergyd.client.rank import RankClient
from gpuenergyd.client.timing.recorder import NOT_RECORDED
from gpuenergyd.core.pipeline.graph import combined_chunk_index
from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.joining.handle import Call, WrappedAttribute

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_COMBINED = "megatron.core.pipeline_parallel.combined_1f1b"
_FORWARD_OF_OUTPUT = "gpuenergyd_forward"
"""Attribute of a forward's output that stores its microbatch and chunk."""
_UNKNOWN = (-1, 0)
"""A microbatch and chunk that occur in no order, so that the rank stops following plans."""


def require_step_functions(*, is_interleaved: bool, is_combined: bool) -> None:
    """Check that this version of Megatron-core has the functions to mark, with the arguments that are read from them.

    Raises:
        UsageError: a function or an argument is missing; the message names it.
    """
    if is_combined:
        wanted = ["config", "current_microbatch", "f_model", "b_model", "b_output_tensor"]
        _require(_COMBINED, "combined_forward_backward_step", [*wanted, *["f_model_chunk_id"] * is_interleaved])
    else:
        _require(_SCHEDULES, "forward_step", ["config", "current_microbatch", *["vp_stage"] * is_interleaved])
        _require(_SCHEDULES, "backward_step", ["config", "output_tensor"])


def wrap_step_functions(
    config: Any, client: RankClient, *, is_combined: bool, on_backward: Callable[[], None]
) -> list[WrappedAttribute]:
    """Mark the instructions that Megatron runs with this configuration; those of other configurations stay unmarked.

    Args:
        config: the configuration.
        client: client of this rank.
        is_combined: whether Megatron runs forwards and backwards together.
        on_backward: called at each backward, combined or not; must not raise.
    """
    if is_combined:
        module = importlib.import_module(_COMBINED)
        around = _around_combined(config, client, on_backward)
        return [WrappedAttribute(module, "combined_forward_backward_step", around)]
    module = importlib.import_module(_SCHEDULES)
    return [
        WrappedAttribute(module, "forward_step", _around_forward(config, client)),
        WrappedAttribute(module, "backward_step", _around_backward(config, client, on_backward)),
    ]


def _around_forward(config: Any, client: RankClient) -> Callable[[Call], Call]:
    def make(step: Call) -> Call:
        config_of, microbatch_of, chunk_of = _readers(step, "config", "current_microbatch", "vp_stage")

        def forward_in_job(*args: Any, **kwargs: Any) -> Any:
            if config_of(args, kwargs) is not config:
                return step(*args, **kwargs)
            forward = _named(microbatch_of(args, kwargs), chunk_of(args, kwargs))
            slot = client.begin_instruction("F", *forward)
            try:
                result = step(*args, **kwargs)
            finally:
                client.end_instruction(slot)
            _name_output(result, forward)
            return result

        return forward_in_job

    return make


def _around_backward(config: Any, client: RankClient, on_backward: Callable[[], None]) -> Callable[[Call], Call]:
    def make(step: Call) -> Call:
        config_of, output_of = _readers(step, "config", "output_tensor")

        def backward_in_job(*args: Any, **kwargs: Any) -> Any:
            if config_of(args, kwargs) is not config:
                return step(*args, **kwargs)
            on_backward()
            slot = client.begin_instruction("B", *_forward_of(output_of(args, kwargs)))
            try:
                return step(*args, **kwargs)
            finally:
                client.end_instruction(slot)

        return backward_in_job

    return make


def _around_combined(config: Any, client: RankClient, on_backward: Callable[[], None]) -> Callable[[Call], Call]:
    def make(step: Call) -> Call:
        config_of, microbatch_of, chunk_of = _readers(step, "config", "current_microbatch", "f_model_chunk_id")
        forward_model_of, backward_model_of, output_of = _readers(step, "f_model", "b_model", "b_output_tensor")

        def combined_in_job(*args: Any, **kwargs: Any) -> Any:
            if config_of(args, kwargs) is not config:
                return step(*args, **kwargs)
            forward = backward = None
            if forward_model_of(args, kwargs) is not None:
                forward = _named(microbatch_of(args, kwargs), chunk_of(args, kwargs))
            if backward_model_of(args, kwargs) is not None:
                backward = _forward_of(output_of(args, kwargs))
                on_backward()
            begin = _BeginAfterInputs(client, _combined_key(forward, backward))
            for name in ("pre_forward", "pre_backward"):
                if kwargs.get(name) is not None:
                    kwargs[name] = begin.after(kwargs[name])
            begin.if_ready()
            try:
                result = step(*args, **kwargs)
            finally:
                client.end_instruction(begin.slot)
            if forward is not None:
                _name_output(result, forward)
            return result

        return combined_in_job

    return make


class _BeginAfterInputs:
    """Begins a combined instruction once Megatron has waited for all of its inputs."""

    def __init__(self, client: RankClient, key: tuple[str, int, int]) -> None:
        self._client = client
        self._key = key
        self._num_awaited = 0
        self.slot = NOT_RECORDED

    def after(self, wait: Call) -> Call:
        """Return a function that waits for an input and begins the instruction if that was the last one."""
        self._num_awaited += 1

        def wait_and_begin(*args: Any, **kwargs: Any) -> Any:
            result = wait(*args, **kwargs)
            self._num_awaited -= 1
            self.if_ready()
            return result

        return wait_and_begin

    def if_ready(self) -> None:
        """Begin the instruction if all inputs have arrived."""
        if self._num_awaited == 0:
            self.slot = self._client.begin_instruction(*self._key)


def _require(module_name: str, name: str, arguments: list[str]) -> None:
    try:
        step = getattr(importlib.import_module(module_name), name, None)
    except ImportError:
        step = None
    if step is None:
        raise UsageError(f"{module_name}.{name} is missing in this version of Megatron-core")
    missing = [argument for argument in arguments if argument not in inspect.signature(step).parameters]
    if missing:
        raise UsageError(f"{module_name}.{name} has no argument {', '.join(missing)} in this version of Megatron-core")


def _readers(step: Call, *names: str) -> list[Callable[[tuple[Any, ...], dict[str, Any]], Any]]:
    """Return for each name a function that reads that argument from a call of `step`; it returns None if not given."""
    parameters = list(inspect.signature(step).parameters)

    def reader(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        index = parameters.index(name) if name in parameters else len(parameters)
        return lambda args, kwargs: args[index] if index < len(args) else kwargs.get(name)

    return [reader(name) for name in names]


def _named(microbatch_index: Any, chunk_index: Any) -> tuple[int, int]:
    return _UNKNOWN[0] if microbatch_index is None else microbatch_index, chunk_index or 0


def _combined_key(forward: tuple[int, int] | None, backward: tuple[int, int] | None) -> tuple[str, int, int]:
    if forward is None:
        microbatch_index, chunk_index = backward or _UNKNOWN
        return "B", microbatch_index, chunk_index
    if backward is None:
        return "F", *forward
    return "FB", backward[0], combined_chunk_index(forward[1], backward[1])


def _name_output(result: Any, forward: tuple[int, int]) -> None:
    """Store microbatch and chunk in a forward's output, the first item of the result; the backward gets this object."""
    with suppress(AttributeError, TypeError, IndexError):
        setattr(_first(result[0]), _FORWARD_OF_OUTPUT, forward)


def _forward_of(output: Any) -> tuple[int, int]:
    forward: tuple[int, int] = getattr(_first(output), _FORWARD_OF_OUTPUT, _UNKNOWN)
    return forward


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, list) and output else output
