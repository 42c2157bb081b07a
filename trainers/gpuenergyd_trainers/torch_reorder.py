"""Other orders of instructions for torch's Schedule1F1B while it runs: split backwards, with later weight gradients.

Each iteration runs torch's own method or, if the plan of the iteration contains an order, `ReorderedSteps`. The latter
posts the same receives and sends as torch's Schedule1F1B, in the same batches and sequence, and computes weight
gradients between posting and waiting. An order is part of its plan, and ranks agree on both together. Ranks that run
different orders in an iteration, because a plan has not reached all of them, still fit together. The orders in plans
keep the sequence in which the gradients of each parameter are accumulated (`gpuenergyd.core.pipeline.reorder`).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gpuenergyd.log_lines import safe_logger
from gpuenergyd.wire.messages import OrderRow
from gpuenergyd_trainers.joining.handle import Call
from gpuenergyd_trainers.joining.place import Place

logger = safe_logger("gpuenergyd.trainers")

_SCHEDULE_CALLS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "_step_microbatches": (0, ()),
    "_check_inputs": (4, ()),
    "_initialize_stage": (4, ()),
    "_maybe_compute_loss": (5, ()),
    "_maybe_get_loss": (2, ()),
    "_update_losses": (2, ()),
}
_STAGE_CALLS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "forward_one_chunk": (3, ("save_forward_output",)),
    "backward_one_chunk": (1, ("loss", "full_backward", "last_backward")),
    "backward_weight_one_chunk": (1, ("last_backward",)),
    "get_fwd_recv_ops": (1, ()),
    "get_fwd_send_ops": (1, ()),
    "get_bwd_recv_ops": (1, ()),
    "get_bwd_send_ops": (1, ()),
    "perform_reduce_grad": (1, ()),
}
"""Methods of torch's classes, some of them private, that `ReorderedSteps` calls: number of arguments, and keywords."""


def reorder_refusal(schedule: Any, stages: Sequence[Any], place: Place) -> str:
    """Return why the order of a schedule cannot change while it runs; empty if it can."""
    name = type(schedule).__name__
    if name != "Schedule1F1B" or len(stages) != 1:
        return f"the order of {name} cannot be changed while it runs, only that of Schedule1F1B"
    stage = stages[0]
    for target, calls in ((schedule, _SCHEDULE_CALLS), (stage, _STAGE_CALLS)):
        other = next((method for method, call in calls.items() if not _takes(target, method, *call)), None)
        if other is not None:
            return f"{type(target).__name__}.{other} of this version of torch is missing, or takes other arguments"
    return _refusal_of_place(place) or _refusal_of_stage(schedule, stage, place)


def _takes(target: Any, name: str, num_arguments: int, keywords: Sequence[str]) -> bool:
    """Return whether an object has a method that accepts these arguments."""
    method = getattr(target, name, None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*(None,) * num_arguments, **dict.fromkeys(keywords))
    except (TypeError, ValueError):
        return False
    return True


def _refusal_of_place(place: Place) -> str:
    """Return why ranks at such a place cannot change their order; empty if they can."""
    if place.pipeline.size < 2:
        return "a pipeline of one stage has no bubbles"
    return "the stages have several ranks" if place.stage.size > 1 else ""


def _refusal_of_stage(schedule: Any, stage: Any, place: Place) -> str:
    """Return why the backwards of a stage cannot be split; empty if they can."""
    module = stage.submod
    if type(module).__name__ in {"DistributedDataParallel", "FullyShardedDataParallel"} or hasattr(
        module, "set_requires_gradient_sync"
    ):
        return f"{type(module).__name__} reduces gradients inside whole backwards"
    if getattr(stage, "dw_builder", None) is not None:
        return "the stage splits its backward itself (dw_builder)"
    if int(schedule._n_microbatches) < place.pipeline.size:  # noqa: SLF001  torch has no public name
        return "there are fewer microbatches than stages"
    return _unequal_sums(module)


def _unequal_sums(module: Any) -> str:
    """Return why split backwards of a module might sum gradients differently from whole ones; empty if they do not.

    If a parameter is used several times in one forward, a whole backward first sums its gradients per microbatch.
    """
    parameters = list(module.named_parameters(remove_duplicate=False))
    if len({id(parameter) for _, parameter in parameters}) < len(parameters):
        return "parameters are shared within a stage, whose gradients a split backward might sum in another order"
    if any(getattr(parameter, "_backward_hooks", None) for _, parameter in parameters) or any(
        getattr(parameter, "_post_accumulate_grad_hooks", None) for _, parameter in parameters
    ):
        return "parameters have gradient hooks, which split backwards do not call"
    return ""


class ReorderedSteps:
    """Wraps `_step_microbatches` of a Schedule1F1B, to run the order of the iteration's plan if it has one.

    Args:
        schedule: the schedule.
        stage: its only stage.
        planned_order: returns the rank's instructions in the current iteration; empty to use torch's own method.
        refuse: called with the reason when an order has failed; no order is run after that.
    """

    def __init__(
        self,
        schedule: Any,
        stage: Any,
        planned_order: Callable[[], tuple[OrderRow, ...]],
        refuse: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._stage = stage
        self._planned_order = planned_order
        self._refuse = refuse
        self._is_barred = False

    def around(self, plain: Call) -> Call:
        """Return the method that replaces torch's own, `plain`."""

        def step_microbatches(*args: Any, **kwargs: Any) -> Any:
            order = () if self._is_barred else self._planned_order()
            if not order:
                return plain(*args, **kwargs)
            try:
                return self._run(order, *args, **kwargs)
            except torch.OutOfMemoryError:
                self._is_barred = True
                self._refuse("a GPU ran out of memory in another order than 1F1B")
                logger.warning("gpuenergyd: out of memory in another order than 1F1B; no other order is tried again")
                raise

        return step_microbatches

    def _run(
        self,
        order: Sequence[OrderRow],
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,  # noqa: FBT001, FBT002  torch's signature
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        schedule, stage = self._schedule, self._stage
        arguments, keywords = schedule._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)  # noqa: SLF001
        first_target = target_mbs[0] if target_mbs is not None else None
        schedule._initialize_stage(arguments[0], keywords[0], first_target, loss_kwargs)  # noqa: SLF001
        last = int(schedule._n_microbatches) - 1  # noqa: SLF001
        blocks = exchange_blocks(order)
        unsent: list[Any] = []  # sends in warm-up and cool-down, for which the next block waits
        _wait(_post(self._receives(blocks[0][0])))
        for at, ((kind, index, _), weights) in enumerate(blocks):
            if kind == "F":
                output = stage.forward_one_chunk(
                    index, arguments[index], keywords[index], save_forward_output=return_outputs
                )
                schedule._maybe_compute_loss(stage, output, target_mbs, index, loss_kwargs)  # noqa: SLF001
                sends = stage.get_fwd_send_ops(index)
            else:
                loss = schedule._maybe_get_loss(stage, index)  # noqa: SLF001
                stage.backward_one_chunk(index, loss=loss, full_backward=kind == "B", last_backward=index == last)
                sends = stage.get_bwd_send_ops(index)
            following = blocks[at + 1][0] if at + 1 < len(blocks) else None
            receives = self._receives(following) if following is not None else []
            if following is not None and (following[0] == "F") != (kind == "F"):
                posted = _post([*sends, *receives])
            else:
                _wait(unsent)
                unsent = _post(sends)
                posted = _post(receives)
            for weight_index in weights:
                stage.backward_weight_one_chunk(weight_index, last_backward=weight_index == last)
            _wait(posted)
        _wait(unsent)
        schedule._update_losses(stage, losses)  # noqa: SLF001
        stage.perform_reduce_grad(last + 1 if schedule.scale_grads else 1)

    def _receives(self, row: OrderRow) -> list[Any]:
        kind, index, _ = row
        return list(self._stage.get_fwd_recv_ops(index) if kind == "F" else self._stage.get_bwd_recv_ops(index))


def exchange_blocks(order: Sequence[OrderRow]) -> list[tuple[OrderRow, list[int]]]:
    """Return the instructions of an order that exchange data, each with the weight gradients that come after it."""
    blocks: list[tuple[OrderRow, list[int]]] = []
    for row in order:
        if row[0] == "W":
            blocks[-1][1].append(row[1])
        else:
            blocks.append((row, []))
    return blocks


def _post(operations: Sequence[Any]) -> list[Any]:
    return list(dist.batch_isend_irecv(list(operations))) if operations else []


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
