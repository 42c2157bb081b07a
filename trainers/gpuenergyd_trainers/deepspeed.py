"""Adapter for DeepSpeed's PipelineEngine: `attach(engine, job="gpt")` on every rank, before the first `train_batch`.

The engine looks up its instructions in `self._INSTRUCTION_MAP`; a copy on the instance wraps forward and backward.
Commands carry a buffer, not a microbatch, so microbatches are counted from zero in each batch. The loss is part of the
last stage's forward. A `train_batch` is an iteration, an `eval_batch` is not. The DualPipeV engine counts differently
and is not supported. Tested with DeepSpeed 0.19 on CPU.
"""

from functools import partial
from typing import Any, Unpack

from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.across_hosts.pipeline_place import PipelinePlace
from gpuenergyd_trainers.joining.handle import Call, Handle, WrappedAttribute
from gpuenergyd_trainers.joining.membership import JoinKeywords, JoinOptions, PipelineRank, join
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank, order_rows

_SCHEDULE_NAME = "1f1b"
_KINDS = {"ForwardPass": "F", "BackwardPass": "B"}


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

    Options are those of `torch_pipelining.attach`. An engine that is not supported runs unchanged, with one warning in
    the log.
    """
    return join(
        JoinOptions(job=job, **options),
        partial(_describe, engine),
        partial(EngineHandle, engine),
        target_name=type(engine).__name__,
    )


def _describe(engine: Any) -> PipelineRank:
    schedule = type(engine._train_schedule()).__name__  # noqa: SLF001  nothing public names the schedule
    if schedule != "TrainSchedule":
        raise UsageError(f"unsupported schedule {schedule}; supported: TrainSchedule (1F1B)")
    num_microbatches, num_stages, stage_id = int(engine.micro_batches), int(engine.num_stages), int(engine.stage_id)
    return PipelineRank(
        framework="deepspeed",
        schedule_name=_SCHEDULE_NAME,
        expected_order=order_rows(make_schedule(_SCHEDULE_NAME, num_stages, num_microbatches), stage_id),
        num_microbatches=num_microbatches,
        place=PipelinePlace(stage_id, num_stages, dp_rank=int(engine.grid.data_parallel_id)),
        device=engine.device,
    )
