"""Joins a DeepSpeed PipelineEngine: `attach(engine, job="gpt")` on every rank, before the first `train_batch`.

The engine looks its instructions up in `self._INSTRUCTION_MAP`; a copy on the instance wraps forward and backward.
Commands carry a buffer, not a microbatch, so microbatches are counted, from zero in each batch. The loss is part of
the last stage's forward. `train_batch` is the iteration, `eval_batch` is none. The DualPipeV engine counts otherwise
and is left alone. Tested with DeepSpeed 0.19 on CPU.
"""

import logging
from typing import Any

from gpuenergyd.client.environment import find_gpu_uuid, find_run_key
from gpuenergyd.client.rank import RankClient
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.across_hosts.replica_paces import join_replicas
from gpuenergyd_trainers.joining.handle import Handle
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank, order_rows, timer_for
from gpuenergyd_trainers.joining.wrapping import Call, WrappedAttribute

logger = logging.getLogger("gpuenergyd.trainers")

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


def attach(
    engine: Any,
    *,
    job: str,
    gpu_uuid: str | None = None,
    socket_path: str | None = None,
    run_key: str | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
) -> Handle:
    """Join a PipelineEngine to the daemon and return what undoes it; options as in `torch_pipelining.attach`.

    An engine that is not understood is left alone, with one line in the log.
    """
    try:
        schedule = type(engine._train_schedule()).__name__  # noqa: SLF001  the only place that names it
        if schedule != "TrainSchedule":
            raise UsageError(f"its schedule is {schedule}; only TrainSchedule (1F1B) is understood")  # noqa: TRY301
        num_microbatches, num_stages, stage_id = int(engine.micro_batches), int(engine.num_stages), int(engine.stage_id)
        planned = make_schedule(_SCHEDULE_NAME, num_stages, num_microbatches)
        run_key, dp_rank = find_run_key(run_key, num_processes=num_stages), int(engine.grid.data_parallel_id)
        client = RankClient(
            job_name=job,
            run_key=run_key,
            gpu_uuid=find_gpu_uuid(gpu_uuid),
            schedule_name=_SCHEDULE_NAME,
            num_microbatches=num_microbatches,
            pp_rank=stage_id,
            num_pp_ranks=num_stages,
            dp_rank=dp_rank,
            framework="deepspeed",
            policy=policy,
            max_slowdown_ratio=max_slowdown_ratio,
            socket_path=socket_path,
            timer=timer_for(engine.device, num_microbatches),
        )
        rank = OrderedRank(client, expected_order=order_rows(planned, stage_id), what=f"job {job}, stage {stage_id}")
        handle = EngineHandle(engine, rank)
        join_replicas(handle, client, dp_rank=dp_rank, run_key=run_key, socket_path=socket_path)
    except Exception as error:  # noqa: BLE001  an engine this version does not know must train on as it is
        logger.warning("gpuenergyd: job %s: %s cannot be joined: %s", job, type(engine).__name__, error)
        return Handle()
    return handle
