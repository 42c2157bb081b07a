"""Joins a torch.distributed.pipelining schedule to the daemon: `attach(schedule, job="gpt-1.3b")`, and that is all.

What is wrapped, on the instances only: `step` of the schedule for the boundaries of iterations; the three
computing methods of each stage for the instructions; the loss function on the last stage, since the loss is
computed after the forward and before the backward and belongs to the forward's time. Receives, sends and waits lie
outside. The order is generated for GPipe and 1F1B (torch's own `pipeline_order` is wrong for 1F1B's last stage),
learned from two equal iterations for every other schedule, and checked after every iteration.

Steps that are no iterations are not reported: evaluation, and the step after an attach or an evaluation, in which
torch runs the stages once more to infer shapes. Whatever goes wrong in here is counted and swallowed; what goes
wrong in the model passes through.
"""

import logging
from collections.abc import Sequence
from typing import Any

from gpuenergyd.client.environment import find_gpu_uuid, find_run_key
from gpuenergyd.client.rank import RankClient
from gpuenergyd.client.recorder import NOT_RECORDED, InstructionTimer
from gpuenergyd.core.pipeline.graph import Schedule
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd_trainers.across_hosts.pipeline_rank import PipelinePlace, find_part, spans_hosts
from gpuenergyd_trainers.across_hosts.replica_paces import join_replicas
from gpuenergyd_trainers.joining.handle import Handle
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank, order_rows, timer_for
from gpuenergyd_trainers.joining.wrapping import Call, WrappedAttribute

logger = logging.getLogger("gpuenergyd.trainers")

_GENERATED_ORDERS = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
_LEARNED_ORDERS = {
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipev",
}
OTHER_SCHEDULE = "learned"


class PipelineHandle(Handle):
    """An attached schedule."""

    def __init__(self, schedule: Any, rank: OrderedRank) -> None:
        super().__init__(rank)
        self._schedule = schedule
        self._active_rank = rank
        self._last_forward_slot = NOT_RECORDED

    def wrap(self, stages: Sequence[Any]) -> None:
        """Wrap the schedule's step, the stages' computing methods and the loss."""
        self._wrapped.append(WrappedAttribute(self._schedule, "step", self._around_step))
        for chunk_index, stage in enumerate(stages):
            for name, kind in (("forward_one_chunk", "F"), ("backward_weight_one_chunk", "W")):
                self._wrapped.append(WrappedAttribute(stage, name, self._around(stage, chunk_index, kind)))
            wrapped = WrappedAttribute(stage, "backward_one_chunk", self._around_backward(stage, chunk_index))
            self._wrapped.append(wrapped)
            if stage.is_last and callable(getattr(self._schedule, "_loss_fn", None)):
                self._wrapped.append(WrappedAttribute(self._schedule, "_loss_fn", self._around_loss))

    def _around_step(self, step: Call) -> Call:
        def step_in_job(*args: Any, **kwargs: Any) -> Any:
            rank = self._active_rank
            if not rank.is_active:
                return step(*args, **kwargs)
            is_training = bool(getattr(self._schedule, "_has_backward", True))
            self._last_forward_slot = NOT_RECORDED
            self.shielded(rank.begin_step if is_training else rank.pause)
            try:
                result = step(*args, **kwargs)
            except BaseException:
                self.shielded(rank.fail_step)
                raise
            if is_training:
                self.shielded(rank.end_step)
            return result

        return step_in_job

    def _around(self, stage: Any, chunk_index: int, kind: str) -> Any:
        begin, end = self._active_rank.client.begin_instruction, self._active_rank.client.end_instruction
        is_forward = kind == "F"
        is_last_forward = is_forward and stage.is_last

        def make(compute: Call) -> Call:
            def compute_in_job(*args: Any, **kwargs: Any) -> Any:
                slot = NOT_RECORDED
                if is_forward or stage.has_backward:
                    slot = begin(kind, args[0] if args else _named_index(kwargs), chunk_index)
                try:
                    return compute(*args, **kwargs)
                finally:
                    end(slot)
                    if is_last_forward:
                        self._last_forward_slot = slot

            return compute_in_job

        return make

    def _around_backward(self, stage: Any, chunk_index: int) -> Any:
        begin, end = self._active_rank.client.begin_instruction, self._active_rank.client.end_instruction

        def make(compute: Call) -> Call:
            def backward_in_job(*args: Any, **kwargs: Any) -> Any:
                slot = NOT_RECORDED
                if stage.has_backward:
                    is_full = kwargs.get("full_backward", args[2] if len(args) > 2 else True)
                    slot = begin("B" if is_full else "I", args[0] if args else _named_index(kwargs), chunk_index)
                try:
                    return compute(*args, **kwargs)
                finally:
                    end(slot)

            return backward_in_job

        return make

    def _around_loss(self, loss: Call) -> Call:
        client = self._active_rank.client

        def loss_in_job(*args: Any, **kwargs: Any) -> Any:
            result = loss(*args, **kwargs)
            client.end_instruction(self._last_forward_slot)
            self._last_forward_slot = NOT_RECORDED
            return result

        return loss_in_job


def attach(
    schedule: Any,
    *,
    job: str,
    gpu_uuid: str | None = None,
    stages: Sequence[Any] | None = None,
    num_microbatches: int | None = None,
    socket_path: str | None = None,
    run_key: str | None = None,
    dp_rank: int | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
    across_hosts: bool | None = None,
    tp_rank: int = 0,
    num_tp_ranks: int = 1,
    timer: InstructionTimer | None = None,
) -> Handle:
    """Join a pipeline schedule to the daemon and return what undoes it; call it on every rank before the first step.

    Without a daemon, a GPU or a known schedule the training program runs as if this had not been called, with one
    line in the log.

    Args:
        schedule: any schedule of torch.distributed.pipelining.
        job: what the job is called in reports; the same on all ranks.
        gpu_uuid: this rank's GPU; found from GPUENERGYD_GPU_UUID or the stage's CUDA device when left out.
        stages: this rank's stages; found in the schedule when left out.
        num_microbatches: microbatches per step; found in the schedule when left out.
        socket_path: the daemon's socket; found from GPUENERGYD_SOCKET or the usual places when left out.
        run_key: what tells this run from others of its name; from the launcher's variables when left out.
        dp_rank: which replica of the pipeline this is; from the stage's process group when left out.
        policy: the clock policy to use; the daemon's default when left out.
        max_slowdown_ratio: how much slower than full speed it may become; the daemon's default when left out.
        across_hosts: whether the pipeline's ranks sit on several hosts; from LOCAL_WORLD_SIZE when left out.
        tp_rank: which tensor-parallel rank of its stage this is, the innermost dimension; all follow one plan.
        num_tp_ranks: how many of them there are.
        timer: what tells when instructions ran on this rank's device; made for the stage's device when left out.
    """
    try:
        local_stages = _stages(schedule, stages)
        first = local_stages[0]
        if num_microbatches is None:
            num_microbatches = int(schedule._n_microbatches)  # noqa: SLF001  torch keeps it private; pass it to be safe
        num_pp_ranks, pp_rank = int(first.group_size), int(first.group_rank)
        planned = _planned_schedule(schedule, num_pp_ranks, num_microbatches)
        expected_order = None if planned is None else order_rows(planned, pp_rank)
        num_chunks = len(local_stages)
        run_key = find_run_key(run_key, num_processes=num_pp_ranks)
        replica = _dp_rank(first) - (tp_rank if num_tp_ranks > 1 else 0) if dp_rank is None else dp_rank
        part = None
        if num_tp_ranks > 1 or (_crosses_hosts(first) if across_hosts is None else across_hosts):
            part = find_part(PipelinePlace(pp_rank, num_pp_ranks, tp_rank, num_tp_ranks, replica), run_key)
        client = RankClient(
            job_name=job,
            run_key=run_key if part is None else part.own_run_key,
            gpu_uuid=find_gpu_uuid(gpu_uuid, device=first.device if _is_cuda(first) else None),
            schedule_name=planned.name if planned else _LEARNED_ORDERS.get(type(schedule).__name__, OTHER_SCHEDULE),
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            pp_rank=pp_rank if part is None else 0,
            num_pp_ranks=num_pp_ranks if part is None else 1,
            dp_rank=replica,
            framework="torch.distributed.pipelining",
            policy=policy,
            max_slowdown_ratio=max_slowdown_ratio,
            socket_path=socket_path,
            timer=timer if timer is not None else timer_for(first.device, num_microbatches, num_chunks),
            agreed_plans=None if part is None else part.plans,
            extra_tags=() if part is None else part.tags,
        )
        rank = OrderedRank(client, expected_order=expected_order, what=f"job {job}, rank {pp_rank}")
        handle = PipelineHandle(schedule, rank)
        handle.wrap(local_stages)
        if part is None:
            join_replicas(handle, client, dp_rank=replica, run_key=run_key, socket_path=socket_path)
        else:
            handle.on_detach.append(part.join(client, socket_path).stop)
    except Exception as error:  # noqa: BLE001  a schedule this version does not know must train on as it is
        logger.warning("gpuenergyd: job %s: %s cannot be joined: %r", job, type(schedule).__name__, error)
        return Handle()
    return handle


def _planned_schedule(schedule: Any, num_pp_ranks: int, num_microbatches: int) -> Schedule | None:
    """Return the order that this very class is known to run; None where it must be learned."""
    planned = getattr(schedule, "planned_schedule", None)  # our own schedules carry it
    if isinstance(planned, Schedule):
        return planned
    name = _GENERATED_ORDERS.get(type(schedule).__name__)
    return make_schedule(name, num_pp_ranks, num_microbatches) if name else None


def _stages(schedule: Any, stages: Sequence[Any] | None) -> list[Any]:
    """Return this rank's stages by stage index; torch keeps them in private attributes, so they can be given too."""
    found = stages or getattr(schedule, "_stages", None) or [schedule._stage]  # noqa: SLF001
    return sorted(found, key=lambda stage: int(stage.stage_index))


def _is_cuda(stage: Any) -> bool:
    return getattr(getattr(stage, "device", None), "type", None) == "cuda"


def _dp_rank(stage: Any) -> int:
    """Return a number that is this pipeline's own among the replicas: from the global ranks of its process group."""
    members = _members(stage)
    is_contiguous = max(members) - min(members) == len(members) - 1
    return min(members) // len(members) if is_contiguous else min(members)


def _crosses_hosts(stage: Any) -> bool:
    import torch.distributed as dist  # noqa: PLC0415  whoever has a schedule has loaded it

    return dist.is_initialized() and spans_hosts(_members(stage))


def _members(stage: Any) -> list[int]:
    """Return the global ranks of a stage's pipeline."""
    import torch.distributed as dist  # noqa: PLC0415  whoever has a schedule has loaded it

    return dist.get_process_group_ranks(stage.group if stage.group is not None else dist.group.WORLD)


def _named_index(kwargs: dict[str, Any]) -> int:
    """Return the microbatch of a call without positional arguments; -1, which no order holds, where there is none."""
    value = kwargs.get("fwd_chunk_id", kwargs.get("bwd_chunk_id", -1))
    return value if isinstance(value, int) else -1
