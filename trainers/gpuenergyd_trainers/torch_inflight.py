"""1F1B with extra microbatches in flight for torch.distributed.pipelining: trades memory for slack.

Each rank starts `extra_inflight[rank]` more forwards before its first backward than plain 1F1B does (EnvPipe, ATC'23,
section 4.3), and so holds the activations of that many more microbatches. Backwards run in the same order, so gradients
are summed in the same order and losses are equal bit for bit. `gpuenergyd plan --extra-inflight auto` finds the numbers
that save the most energy.

Activations and gradients use separate process groups: a rank sends activations before its neighbour has posted the
receives for them, and gradients must be able to overtake them. Tested on gloo, not on NCCL.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from gpuenergyd.core.pipeline.graph import InstructionKind, Schedule, one_forward_one_backward


class Schedule1F1BExtraInflight(PipelineScheduleSingle):
    """Replaces torch's Schedule1F1B; `extra_inflight[r]` is for pipeline rank r, and must be 0 for the last rank."""

    planned_schedule: Schedule
    """The instruction order of every rank, used by `torch_pipelining.attach`."""

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        *,
        extra_inflight: Sequence[int],
        loss_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        """Make the schedule; this is a collective call, which all ranks of the pipeline must make.

        Raises:
            ScheduleError: a rank would run fewer microbatches ahead than the next one, which would be a deadlock.
        """
        self.planned_schedule = one_forward_one_backward(stage.group_size, n_microbatches, extra_inflight)
        super().__init__(stage, n_microbatches, loss_fn=loss_fn, **options)
        self._order = self.planned_schedule.orders[stage.group_rank]
        members = dist.get_process_group_ranks(stage.group if stage.group is not None else dist.group.WORLD)
        self._forward_group = dist.new_group(members, use_local_synchronization=True)
        self._backward_group = dist.new_group(members, use_local_synchronization=True)

    def _get_pipeline_order(self) -> None:
        return None  # torch would visualise the order, and supports its own schedules only

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,  # noqa: FBT001, FBT002  torch's signature
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        arguments, keywords = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        first_target = target_mbs[0] if target_mbs is not None else None
        self._initialize_stage(arguments[0], keywords[0], first_target, loss_kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stage: Any = self._stage
        sent: list[tuple[Any, dist.Work]] = []  # keeps tensors alive until they are sent
        for instruction in self._order:
            index = instruction.microbatch_index
            if instruction.kind is InstructionKind.F:
                _receive(stage.get_fwd_recv_ops(index), self._forward_group)
                output = stage.forward_one_chunk(
                    index, arguments[index], keywords[index], save_forward_output=return_outputs
                )
                sent += _send(stage.get_fwd_send_ops(index), self._forward_group)
                self._maybe_compute_loss(stage, output, target_mbs, index, loss_kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            elif stage.has_backward:
                _receive(stage.get_bwd_recv_ops(index), self._backward_group)
                loss = self._maybe_get_loss(stage, index)  # type: ignore[no-untyped-call]  # torch leaves it untyped
                stage.backward_one_chunk(index, loss=loss, last_backward=index == self._n_microbatches - 1)
                sent += _send(stage.get_bwd_send_ops(index), self._backward_group)
        for _, work in sent:
            work.wait()
        self._update_losses(stage, losses)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)


def _receive(ops: Sequence[dist.P2POp], group: Any) -> None:
    works = [op.op(op.tensor, group=group, group_src=op.group_peer) for op in ops]
    for work in works:
        if work is not None:
            work.wait()


def _send(ops: Sequence[dist.P2POp], group: Any) -> list[tuple[Any, dist.Work]]:
    works = [(op.tensor, op.op(op.tensor, group=group, group_dst=op.group_peer)) for op in ops]
    return [(tensor, work) for tensor, work in works if work is not None]
