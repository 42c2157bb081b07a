"""Adapter for DeepSpeed's PipelineEngine: `attach(engine, job="gpt")` on every rank, before the first `train_batch`.

The engine looks up its instructions in `self._INSTRUCTION_MAP`; the adapter gives the instance a copy in which forward
and backward are wrapped. The engine's commands name a buffer, not a microbatch, so microbatches are counted from zero
in each batch. The loss is part of the last stage's forward. A `train_batch` is an iteration, an `eval_batch` is not.
The DualPipeV engine is not supported, as it counts differently. Tested with DeepSpeed 0.19 on CPU.
"""

from functools import partial
from typing import Any, Unpack

from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.joining.handle import Call, Handle, WrappedAttribute
from gpuenergyd_trainers.joining.membership import JoinKeywords, JoinOptions, PipelineRank, join
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank, order_rows
from gpuenergyd_trainers.joining.place import Place
from gpuenergyd_trainers.joining.place_sources import deepspeed_place

_SCHEDULE_NAME = "1f1b"
_KINDS = {"ForwardPass": "F", "BackwardPass": "B"}
_REORDER_REFUSAL = (
    "DeepSpeed's instruction lists have whole backwards only: each is one call that ends with the optimizer's hooks for"
    " all gradients of the microbatch"
)


class EngineHandle(Handle):
    """An attached engine."""

    def __init__(self, engine: Any, rank: OrderedRank) -> None:
        super().__init__(rank)
        self._active_rank = rank
        self._num_begun = dict.fromkeys(_KINDS.values(), 0)
        self._wrapped.append(WrappedAttribute(engine, "_INSTRUCTION_MAP", self._with_marks))
        self._wrapped.append(WrappedAttribute(engine, "train_batch", self._around_train_batch))
        self._wrapped.append(WrappedAttribute(engine, "eval_batch", self._around_eval_batch))

    def _with_marks(self, instruction_map: Any) -> Any:
        return {
            command: self._around(run, _KINDS[command.__name__]) if command.__name__ in _KINDS else run
            for command, run in instruction_map.items()
        }

    def _around(self, run: Call, kind: str) -> Call:
        client = self._active_rank.client

        def run_in_job(engine: Any, *args: Any, **kwargs: Any) -> Any:
            microbatch_index = self._num_begun[kind]
            self._num_begun[kind] = microbatch_index + 1
            slot = client.begin_instruction(kind, microbatch_index)
            try:
                return run(engine, *args, **kwargs)
            finally:
                client.end_instruction(slot)

        return run_in_job

    def _around_train_batch(self, train_batch: Call) -> Call:
        rank = self._active_rank

        def train_batch_in_job(*args: Any, **kwargs: Any) -> Any:
            self._num_begun.update(dict.fromkeys(self._num_begun, 0))
            self.shielded(rank.begin_step)
            try:
                result = train_batch(*args, **kwargs)
            except BaseException:
                self.shielded(rank.fail_step)
                raise
            self.shielded(rank.end_step)
            return result

        return train_batch_in_job

    def _around_eval_batch(self, eval_batch: Call) -> Call:
        def eval_batch_outside_job(*args: Any, **kwargs: Any) -> Any:
            self.shielded(self._active_rank.pause)
            return eval_batch(*args, **kwargs)

        return eval_batch_outside_job


def attach(engine: Any, *, job: str | None = None, **options: Unpack[JoinKeywords]) -> Handle:
    """Attach a PipelineEngine to the daemon and return a handle that undoes it.

    The rank's place comes from the engine's grid: the ranks along an axis "model" belong to one stage and follow one
    plan. The options are those of `torch_pipelining.attach`. An engine that is not supported runs unchanged, with one
    warning in the log.
    """
    return join(
        JoinOptions(job=job, **options),
        partial(_describe, engine, options.get("place")),
        partial(EngineHandle, engine),
        target=engine,
        target_name=type(engine).__name__,
    )


def _describe(engine: Any, known: Place | None) -> PipelineRank:
    schedule = type(engine._train_schedule()).__name__  # noqa: SLF001  nothing public names the schedule
    if schedule != "TrainSchedule":
        raise UsageError(f"unsupported schedule {schedule}; supported: TrainSchedule (1F1B)")
    place = known if known is not None else deepspeed_place(engine.grid, expert_ranks=_expert_ranks(engine))
    num_microbatches = int(engine.micro_batches)
    return PipelineRank(
        framework="deepspeed",
        schedule_name=_SCHEDULE_NAME,
        expected_order=order_rows(
            make_schedule(_SCHEDULE_NAME, place.pipeline.size, num_microbatches), place.pipeline.rank
        ),
        num_microbatches=num_microbatches,
        place=place,
        device=engine.device,
        reorder_refusal=_REORDER_REFUSAL,
    )


def _expert_ranks(engine: Any) -> set[int]:
    """Return the global ranks of this process's largest expert-parallel group; empty without experts."""
    if not getattr(engine, "has_moe_layers", False):
        return set()
    import torch.distributed as dist  # noqa: PLC0415  loaded already by DeepSpeed
    from deepspeed.utils import groups  # type: ignore[import-not-found]  # noqa: PLC0415  as above

    of_layers = groups._get_expert_parallel_group_dict().values()  # noqa: SLF001  nothing public lists the groups
    return {int(rank) for group in of_layers for rank in dist.get_process_group_ranks(group)}
