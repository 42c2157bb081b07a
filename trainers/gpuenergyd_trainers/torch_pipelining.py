"""Adapter for torch.distributed.pipelining: `attach(schedule, job="gpt-1.3b")`.

It wraps methods of instances only: the schedule's `step`, for iterations; the three compute methods of each stage, for
instructions; and, on the last stage, the loss function, since the loss is computed between forward and backward and
its time belongs to the forward. If the program has registered functions in place of these methods, those are marked
instead (`torch_functions`). Receives, sends and waits are not part of instructions. The order is generated for GPipe
and 1F1B (torch's own `pipeline_order` is wrong for the last stage of 1F1B), learned from two equal iterations for all
other schedules, and checked after every iteration.

A new schedule for the same stages continues as the same rank, or attaches again if its order is not known.

Evaluations are not reported, nor is the step after an attach or an evaluation, in which torch runs the stages once more
to infer shapes. The adapter's own exceptions are counted and suppressed; exceptions of the model are passed on.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Unpack
from weakref import WeakSet, WeakValueDictionary

from gpuenergyd.client.timing.recorder import NOT_RECORDED
from gpuenergyd.core.pipeline.graph import Schedule
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.wire.messages import OrderRow
from gpuenergyd_trainers.joining.handle import Call, Handle, WrappedAttribute
from gpuenergyd_trainers.joining.membership import JoinKeywords, JoinOptions, PipelineRank, join
from gpuenergyd_trainers.joining.memory import CudaMemory, MemoryMeter, MicrobatchMemory
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank, order_rows
from gpuenergyd_trainers.joining.place import Place, given_place
from gpuenergyd_trainers.joining.place_sources import pipeline_group_place
from gpuenergyd_trainers.torch_functions import RegisteredFunctions

_GENERATED_ORDERS = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
_LEARNED_ORDERS = {
    "ScheduleInterleaved1F1B": "interleaved",
    "ScheduleLoopedBFS": "looped-bfs",
    "ScheduleInterleavedZeroBubble": "interleaved-zb",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipev",
}
OTHER_SCHEDULE = "learned"
_by_stage: "WeakValueDictionary[int, PipelineHandle]" = WeakValueDictionary()
"""The handles of attached schedules, by the `id` of a stage that the handle keeps alive."""


class PipelineHandle(Handle):
    """An attached schedule."""

    def __init__(
        self, schedule: Any, stages: Sequence[Any], rank: OrderedRank, count: int, memory: MicrobatchMemory | None
    ) -> None:
        """Wrap the schedule's step, the stages' compute methods and the loss; give `memory` if the order can change."""
        super().__init__(rank)
        self._memory = memory
        self._schedule = schedule
        self._later: WeakSet[Any] = WeakSet()
        """Later schedules of the same stages that this handle follows."""
        self._num_microbatches = count
        self._active_rank = rank
        self._last_forward_slot = NOT_RECORDED
        self._num_stage_calls = 0
        self._stages = tuple(stages)
        functions, wrapped_step = self._wrap_step(schedule, count)
        self._wrapped += [functions, wrapped_step]
        if rank.client.may_reorder:
            self._change_orders(stages[0])
        self._instructions: dict[WrappedAttribute, str] = {}
        """The wrapped methods, and the kinds of instruction that each of them runs."""
        self._taken_out: set[WrappedAttribute] = set()
        self._kinds: frozenset[str] | None = None
        """The only kinds whose methods are wrapped at present; None if all methods are."""
        self._only_requests, self._stay_marked = False, memory is not None or functions.are_marked
        for chunk_index, stage in enumerate(stages):
            for name, kind in (("forward_one_chunk", "F"), ("backward_weight_one_chunk", "W")):
                self._instructions[WrappedAttribute(stage, name, self._around(stage, chunk_index, kind))] = kind
            around = self._around_backward(stage, chunk_index)
            self._instructions[WrappedAttribute(stage, "backward_one_chunk", around)] = "BI"
            if stage.is_last and callable(getattr(self._schedule, "_loss_fn", None)):
                self._instructions[WrappedAttribute(self._schedule, "_loss_fn", self._around_loss)] = ""
        self._wrapped += self._instructions
        _by_stage.update({id(stage): self for stage in stages})

    def follow(self, schedule: Any, num_microbatches: int | None = None) -> bool:
        """Follow another schedule of the same stages as the same rank; return False if its order is not known.

        After `detach`, its wrapped methods remain and do nothing, since it may be one of many that live for an epoch.
        """
        if schedule in self._later:
            return True
        rank, plan = self._active_rank, getattr(self._schedule, "planned_schedule", None)
        is_same_class = type(schedule) is type(self._schedule) and getattr(schedule, "planned_schedule", None) == plan
        if schedule is self._schedule or not is_same_class or rank.client.may_reorder:
            return False
        count = _count(schedule, num_microbatches)
        if count != self._num_microbatches and not rank.can_change_microbatches:
            return False
        self._later.add(schedule)
        self._wrap_step(schedule, count)
        if callable(getattr(schedule, "_loss_fn", None)):
            WrappedAttribute(schedule, "_loss_fn", self._around_loss)
        rank.pause()
        return True

    def _change_orders(self, stage: Any) -> None:
        from gpuenergyd_trainers.torch_reorder import ReorderedSteps  # noqa: PLC0415  imports torch

        rank = self._active_rank
        steps = ReorderedSteps(self._schedule, stage, lambda: rank.order_to_run, rank.client.refuse_orders)
        self._wrapped.append(WrappedAttribute(self._schedule, "_step_microbatches", steps.around))

    def _report_memory(self) -> None:
        assert self._memory is not None
        found = self._memory.end_iteration(is_reordered=bool(self._active_rank.order_to_run))
        if found is not None:
            self._active_rank.client.memory_bytes = found

    def _begin_step(self) -> None:
        """Begin a training step, with the methods wrapped whose instructions are timed or request a clock."""
        rank = self._active_rank
        rank.begin_step()
        self._only_requests = not (self._stay_marked or rank.sees_instructions())
        kinds = frozenset(row[0] for row in rank.client.due) if self._only_requests else None
        if kinds != self._kinds:
            self._wrap_only(kinds)
        self._only_requests &= not self._stay_marked
        if self._only_requests:
            rank.client.assume_order()

    def _wrap_only(self, kinds: frozenset[str] | None) -> None:
        """Wrap the methods of these kinds of instruction; all of them with None, or if the program has wrapped ours."""
        for wrapped, own_kinds in self._instructions.items():
            is_wanted = kinds is None or not kinds.isdisjoint(own_kinds)
            if is_wanted == (wrapped in self._taken_out):
                if is_wanted:
                    self._taken_out.remove(wrapped)
                    wrapped.put_in()
                elif wrapped.undo():
                    self._taken_out.add(wrapped)
                else:
                    self._stay_marked = True
        self._kinds = kinds
        if self._stay_marked and self._taken_out:
            self._wrap_only(None)

    def _wrap_step(self, schedule: Any, num_microbatches: int) -> tuple[RegisteredFunctions, WrappedAttribute]:
        functions = RegisteredFunctions(schedule, self._stages, self._active_rank.client, lambda: self._num_stage_calls)
        around = partial(self._around_step, schedule, functions, num_microbatches)
        return functions, WrappedAttribute(schedule, "step", around)

    def _around_step(self, schedule: Any, functions: RegisteredFunctions, num_microbatches: int, step: Call) -> Call:
        def step_in_job(*args: Any, **kwargs: Any) -> Any:
            rank = self._active_rank
            if not rank.is_active:
                return step(*args, **kwargs)
            is_training = bool(getattr(schedule, "_has_backward", True))
            client = rank.client
            if is_training and num_microbatches != self._num_microbatches:
                self._num_microbatches = num_microbatches
                self.shielded(partial(rank.change_microbatches, num_microbatches))
            is_quick = is_training and self._only_requests and client.num_left > client.num_in_full
            if is_quick and client.begin_next():
                try:
                    result = step(*args, **kwargs)
                except BaseException:
                    self.shielded(rank.fail_step)
                    raise
                client.end_next()
                return result
            self._last_forward_slot = NOT_RECORDED
            self.shielded(self._begin_step if is_training else rank.pause)
            try:
                result = step(*args, **kwargs)
            except BaseException:
                self.shielded(rank.fail_step)
                raise
            if is_training:
                if self._memory is not None:
                    self.shielded(self._report_memory)
                self.shielded(partial(self._end_step, functions))
            return result

        return step_in_job

    def _end_step(self, functions: RegisteredFunctions) -> None:
        self._active_rank.end_step()
        if functions.obstacle and self._active_rank.is_active:
            self._active_rank.give_up(functions.obstacle)

    def _around(self, stage: Any, chunk_index: int, kind: str) -> Any:
        client, is_forward = self._active_rank.client, kind == "F"
        begin, end = client.begin_instruction, client.end_instruction
        is_last_forward = is_forward and stage.is_last
        memory = self._memory

        def make(compute: Call) -> Call:
            def compute_in_job(*args: Any, **kwargs: Any) -> Any:
                if self._only_requests:
                    row = kind, args[0] if args else _named_index(kwargs), chunk_index
                    if row in client.due:
                        client.request_clock(*row)
                    return compute(*args, **kwargs)
                slot = NOT_RECORDED
                self._num_stage_calls += 1
                if is_forward or stage.has_backward:
                    slot = begin(kind, args[0] if args else _named_index(kwargs), chunk_index)
                measured = memory if is_forward and memory is not None and memory.is_measuring else None
                if measured is not None:
                    self.shielded(measured.begin_forward)
                try:
                    return compute(*args, **kwargs)
                finally:
                    if slot != NOT_RECORDED:
                        end(slot)
                    if measured is not None:
                        self.shielded(measured.end_forward)
                    if is_last_forward:
                        self._last_forward_slot = slot

            return compute_in_job

        return make

    def _around_backward(self, stage: Any, chunk_index: int) -> Any:
        client = self._active_rank.client
        begin, end = client.begin_instruction, client.end_instruction

        def make(compute: Call) -> Call:
            def backward_in_job(*args: Any, **kwargs: Any) -> Any:
                slot = NOT_RECORDED
                kind = "B" if kwargs.get("full_backward", args[2] if len(args) > 2 else True) else "I"
                if self._only_requests:
                    row = kind, args[0] if args else _named_index(kwargs), chunk_index
                    if row in client.due:
                        client.request_clock(*row)
                    return compute(*args, **kwargs)
                self._num_stage_calls += 1
                if stage.has_backward:
                    slot = begin(kind, args[0] if args else _named_index(kwargs), chunk_index)
                try:
                    return compute(*args, **kwargs)
                finally:
                    if slot != NOT_RECORDED:
                        end(slot)

            return backward_in_job

        return make

    def _around_loss(self, loss: Call) -> Call:
        client = self._active_rank.client

        def loss_in_job(*args: Any, **kwargs: Any) -> Any:
            result = loss(*args, **kwargs)
            if self._last_forward_slot != NOT_RECORDED:
                client.end_instruction(self._last_forward_slot)
                self._last_forward_slot = NOT_RECORDED
            return result

        return loss_in_job


def attach(
    schedule: Any,
    *,
    job: str | None = None,
    stages: Sequence[Any] | None = None,
    num_microbatches: int | None = None,
    dp_rank: int | None = None,
    tp_rank: int = 0,
    num_tp_ranks: int = 1,
    across_hosts: bool | None = None,
    **options: Unpack[JoinKeywords],
) -> Handle:
    """Attach a pipeline schedule to the daemon and return a handle that undoes it.

    Call it on every rank before the first step. Without a daemon, a GPU or a supported schedule, training continues
    unchanged, with one warning in the log.

    Args:
        schedule: any schedule of torch.distributed.pipelining.
        job: name of the job in reports, the same on all ranks; by default from GPUENERGYD_JOB or the program.
        stages: this rank's stages; by default those of the schedule.
        num_microbatches: microbatches per step; by default those of the schedule.
        dp_rank: number of this replica of the pipeline; by default from the stage's process group.
        tp_rank: number of the rank among the tensor-, context- and expert-parallel ranks of its stage, which must have
            consecutive global ranks; all of them follow one plan.
        num_tp_ranks: number of ranks of a stage.
        across_hosts: whether the pipeline's ranks are on several hosts; by default from LOCAL_WORLD_SIZE.
        options: `gpu_uuid`, `socket_path`, `run_key`, `policy`, `max_slowdown_ratio`, `timer`, `memory`,
            `tokens_per_iteration`, `allow_reorder` and `place`, see
            `gpuenergyd_trainers.joining.membership.JoinOptions`. A training with a DeviceMesh gives
            `place=mesh_place(mesh)`, from `joining.place_sources`, instead of `tp_rank` and `num_tp_ranks`.
    """

    def describe() -> PipelineRank:
        own = _stages(schedule, stages)
        place = options.get("place") or _place(own[0], tp_rank, num_tp_ranks)
        if dp_rank is not None:
            place = replace(place, replica=dp_rank)
        if across_hosts is not None:
            place = replace(place, is_across_hosts=across_hosts)
        count = _count(schedule, num_microbatches)
        planned = _planned_schedule(schedule, place.pipeline.size, count)
        name = planned.name if planned else _LEARNED_ORDERS.get(type(schedule).__name__, OTHER_SCHEDULE)

        def order_of(number: int) -> tuple[OrderRow, ...]:
            return order_rows(make_schedule(name, place.pipeline.size, number), place.pipeline.rank)

        return PipelineRank(
            framework="torch.distributed.pipelining",
            schedule_name=name,
            expected_order=None if planned is None else order_rows(planned, place.pipeline.rank),
            order_of=None if planned is None or hasattr(schedule, "planned_schedule") else order_of,
            num_microbatches=count,
            num_chunks=len(own),
            place=place,
            device=own[0].device,
            reorder_refusal=_reorder_refusal(schedule, own, place),
        )

    def make_handle(rank: OrderedRank) -> PipelineHandle:
        own = _stages(schedule, stages)
        memory = _memory_of(rank, own[0], options.get("memory"))
        return PipelineHandle(schedule, own, rank, _count(schedule, num_microbatches), memory)

    return _earlier(schedule, stages, num_microbatches, is_replaced=False) or join(
        JoinOptions(job=job, **options), describe, make_handle, target=schedule, target_name=type(schedule).__name__
    )


def _earlier(schedule: Any, stages: Sequence[Any] | None, count: int | None, *, is_replaced: bool) -> Handle | None:
    """Return the handle of a schedule of the same stages if it can follow this one, else detach it if `is_replaced`."""
    with suppress(Exception):  # an unsupported schedule is reported when it is attached
        (handle,) = {_by_stage.get(id(stage)) for stage in _stages(schedule, stages)}
        if handle is not None and handle.is_attached and handle.follow(schedule, count):
            return handle
        if handle is not None and is_replaced:
            handle.detach()
    return None


def attach_at_step(schedule: Any) -> Handle:
    """Attach a schedule that trains now, instead of an earlier one of the same stages whose order differs."""
    return _earlier(schedule, None, None, is_replaced=True) or attach(schedule)


def _count(schedule: Any, num_microbatches: int | None) -> int:
    """Return the number of microbatches; as it is private in torch, callers can pass it instead."""
    return int(schedule._n_microbatches) if num_microbatches is None else num_microbatches  # noqa: SLF001  as above


def _planned_schedule(schedule: Any, num_pp_ranks: int, num_microbatches: int) -> Schedule | None:
    """Return the order of a schedule class if it is known in advance; None if it must be learned."""
    planned = getattr(schedule, "planned_schedule", None)  # set by torch_inflight
    if isinstance(planned, Schedule):
        return planned
    name = _GENERATED_ORDERS.get(type(schedule).__name__)
    return make_schedule(name, num_pp_ranks, num_microbatches) if name else None


def _reorder_refusal(schedule: Any, stages: Sequence[Any], place: Place) -> str:
    """Return why the order cannot change while the program runs; empty if it can."""
    from gpuenergyd_trainers.torch_reorder import reorder_refusal  # noqa: PLC0415  imports torch

    return reorder_refusal(schedule, stages, place)


def _memory_of(rank: OrderedRank, stage: Any, meter: MemoryMeter | None) -> MicrobatchMemory | None:
    """Return the memory measurement of a rank; None if the rank's order cannot change, or if there is no meter."""
    if rank.client.reorder_refusal:
        return None
    if meter is None and getattr(stage.device, "type", None) == "cuda":
        import torch  # noqa: PLC0415  loaded already by the caller's schedule

        meter = CudaMemory(torch, stage.device)
    return None if meter is None else MicrobatchMemory(meter)


def _stages(schedule: Any, stages: Sequence[Any] | None) -> list[Any]:
    """Return this rank's stages by stage index; as they are private in torch, callers can pass them."""
    found = stages or getattr(schedule, "_stages", None) or [schedule._stage]  # noqa: SLF001
    return sorted(found, key=lambda stage: int(stage.stage_index))


def _place(stage: Any, tp_rank: int, num_tp_ranks: int) -> Place:
    """Return the place of this process from the process group of its stage's pipeline."""
    import torch.distributed as dist  # noqa: PLC0415  loaded already by the caller's schedule

    if dist.is_initialized():
        return pipeline_group_place(stage.group, tp_rank=tp_rank, num_tp_ranks=num_tp_ranks)
    size = int(stage.group_size)
    return given_place(pp_rank=int(stage.group_rank), num_pp_ranks=size, tp_rank=tp_rank, num_tp_ranks=num_tp_ranks)


def _named_index(kwargs: dict[str, Any]) -> int:
    """Return the microbatch of a call that has only keyword arguments; -1, which is in no order, if it is missing."""
    value = kwargs.get("fwd_chunk_id", kwargs.get("bwd_chunk_id", -1))
    return value if isinstance(value, int) else -1
