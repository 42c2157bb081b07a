"""Functions that a program registers with a torch schedule, in place of torch's own code for an instruction."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.distributed.pipelining import schedules


class OwnRuntime:
    """Runs instructions as torch's runtime does: by the stages' methods, or by those of their class.

    What an instance's attributes replace is not seen by its class.
    """

    def __init__(self, *, by_class: bool) -> None:
        self._by_class = by_class

    def compute(self, action: Any, context: Any) -> None:
        """Run one instruction."""
        schedule, index, microbatch = context.schedule_ref, action.stage_index, action.microbatch_index
        stages = {stage.stage_index: stage for stage in schedule._stages}
        stage = stages[index]
        kind = action.computation_type
        if kind == schedules.FORWARD:
            _wait(schedule.fwd_recv_ops, (index, microbatch))
            inputs = context.arg_mbs[microbatch], context.kwarg_mbs[microbatch]
            output = self._method(stage, "forward_one_chunk")(microbatch, *inputs, save_forward_output=True)
            schedule._maybe_compute_loss(stage, output, context.target_mbs, microbatch, None)
            if index + 1 in stages:
                stages[index + 1].set_local_fwd_input(output, microbatch)
            return
        if kind != schedules.BACKWARD_INPUT:
            schedule.backward_counter[index] += 1
        is_last = kind != schedules.BACKWARD_INPUT and schedule.backward_counter[index] == schedule._n_microbatches
        if kind == schedules.BACKWARD_WEIGHT:
            self._method(stage, "backward_weight_one_chunk")(microbatch, last_backward=is_last)
            return
        _wait(schedule.bwd_recv_ops, (index, microbatch))
        self._method(stage, "backward_one_chunk")(
            microbatch,
            loss=schedule._maybe_get_loss(stage, microbatch),
            full_backward=kind == schedules.FULL_BACKWARD,
            last_backward=is_last,
        )
        if index - 1 in stages:
            stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)

    def overlap(self, action: Any, context: Any) -> None:
        """Run a forward and a backward as one instruction."""
        for part in action.sub_actions:
            self.compute(part, context)

    def _method(self, stage: Any, name: str) -> Callable[..., Any]:
        return partial(getattr(type(stage), name), stage) if self._by_class else getattr(stage, name)


def _wait(pending: dict[tuple[int, int], list[Any]], place: tuple[int, int]) -> None:
    for transfer in pending.pop(place, []):
        transfer.wait()


def _register(schedule: Any, *, by_class: bool) -> None:
    runtime = OwnRuntime(by_class=by_class)
    for kind in (schedules.FORWARD, schedules.FULL_BACKWARD, schedules.BACKWARD_INPUT, schedules.BACKWARD_WEIGHT):
        schedule.register_custom_function(kind, runtime.compute)
    schedule.register_custom_function(schedules.OVERLAP_F_B, runtime.overlap)


OWN_FUNCTIONS: Mapping[str, Callable[[Any], None]] = {
    "torch's own": lambda _: None,
    "of the program": partial(_register, by_class=True),
    "that call the stages": partial(_register, by_class=False),
}
