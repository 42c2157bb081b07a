"""Joins Megatron-core: `attach(config, job="gpt", num_microbatches=32)` on every rank, before the first iteration.

Megatron's pipeline schedules call `config.timers(name, ...)` around every forward, every backward and the whole
step; the timers are replaced by ones that mark instructions and pass each call on to those that were there.
Microbatches are counted, since timers do not name them; the loss lies inside the forward's timer. A step without a
backward is evaluation. Only the non-interleaved schedule: chunks of an interleaved one cannot be told apart from
here, nor can the parts of overlapped expert-parallel steps.

Megatron's own timers synchronise the device at every start and stop while they are switched on: times and savings
then differ from those of a normal run. Tested with megatron-core 0.16 on CPU, with CUDA calls replaced.
"""

import importlib
import logging
from typing import Any

from gpuenergyd.client.environment import find_gpu_uuid, find_run_key
from gpuenergyd.client.rank import RankClient
from gpuenergyd.client.recorder import NOT_RECORDED
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.across_hosts.replica_paces import join_replicas
from gpuenergyd_trainers.joining.handle import Handle
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank, order_rows, timer_for

logger = logging.getLogger("gpuenergyd.trainers")

_SCHEDULE_NAME = "1f1b"
_STEP = "forward-backward"
_KINDS = {"forward-compute": "F", "backward-compute": "B"}


class ConfigHandle(Handle):
    """A Megatron configuration whose timers mark instructions."""

    def __init__(self, config: Any, rank: OrderedRank) -> None:
        super().__init__(rank)
        self._config = config
        self._active_rank = rank
        self._timers_before = config.timers
        self._num_begun = dict.fromkeys(_KINDS.values(), 0)
        self._slots = dict.fromkeys(_KINDS.values(), NOT_RECORDED)
        self._is_in_step = False
        config.timers = self.timers

    @property
    def is_attached(self) -> bool:
        """Whether the timers are in place and the order as registered."""
        return self._active_rank.is_active and self._config.timers == self.timers

    def detach(self) -> None:
        """Leave the job and put the former timers back."""
        if self._config.timers == self.timers:
            self._config.timers = self._timers_before
        super().detach()

    def timers(self, name: str, *args: Any, **kwargs: Any) -> "_Timer":
        """Return the timer of this name, as Megatron asks for it."""
        before = self._timers_before(name, *args, **kwargs) if self._timers_before is not None else None
        return _Timer(self, name, before)

    def started(self, name: str) -> None:
        """Mark a begin."""
        if name == _STEP:
            if self._is_in_step:  # the step before raised
                self._active_rank.fail_step()
            self._is_in_step = True
            self._num_begun.update(dict.fromkeys(self._num_begun, 0))
            self._active_rank.begin_step()
        elif name in _KINDS:
            kind = _KINDS[name]
            index = self._num_begun[kind]
            self._num_begun[kind] = index + 1
            self._slots[kind] = self._active_rank.client.begin_instruction(kind, index)

    def stopped(self, name: str) -> None:
        """Mark an end."""
        if name == _STEP:
            self._is_in_step = False
            if self._num_begun["B"] == 0:
                self._active_rank.fail_step()
            else:
                self._active_rank.end_step()
        elif name in _KINDS:
            self._active_rank.client.end_instruction(self._slots[_KINDS[name]])


class _Timer:
    """What `config.timers(name)` returns: marks, and passes on."""

    def __init__(self, handle: ConfigHandle, name: str, before: Any) -> None:
        self._handle = handle
        self._name = name
        self._before = before

    def start(self, *args: Any, **kwargs: Any) -> None:
        if self._before is not None:
            self._before.start(*args, **kwargs)
        self._handle.shielded(lambda: self._handle.started(self._name))

    def stop(self, *args: Any, **kwargs: Any) -> None:
        self._handle.shielded(lambda: self._handle.stopped(self._name))
        if self._before is not None:
            self._before.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)


def attach(
    config: Any,
    *,
    job: str,
    num_microbatches: int,
    gpu_uuid: str | None = None,
    pp_rank: int | None = None,
    num_pp_ranks: int | None = None,
    dp_rank: int | None = None,
    socket_path: str | None = None,
    run_key: str | None = None,
    policy: str | None = None,
    max_slowdown_ratio: float | None = None,
) -> Handle:
    """Join a model's ModelParallelConfig to the daemon and return what undoes it.

    The ranks come from Megatron's parallel state when left out; other options as in `torch_pipelining.attach`. A
    configuration that is not understood is left alone, with one line in the log.
    """
    try:
        if getattr(config, "virtual_pipeline_model_parallel_size", None):
            raise UsageError("interleaved chunks cannot be told apart by timers")  # noqa: TRY301
        if getattr(config, "overlap_moe_expert_parallel_comm", False):
            raise UsageError("overlap_moe_expert_parallel_comm runs forwards and backwards in one")  # noqa: TRY301
        if pp_rank is None or num_pp_ranks is None or dp_rank is None:
            state = importlib.import_module("megatron.core.parallel_state")
            pp_rank = int(state.get_pipeline_model_parallel_rank())
            num_pp_ranks = int(state.get_pipeline_model_parallel_world_size())
            dp_rank = int(state.get_data_parallel_rank())
        planned = make_schedule(_SCHEDULE_NAME, num_pp_ranks, num_microbatches)
        run_key = find_run_key(run_key, num_processes=num_pp_ranks)
        client = RankClient(
            job_name=job,
            run_key=run_key,
            gpu_uuid=find_gpu_uuid(gpu_uuid),
            schedule_name=_SCHEDULE_NAME,
            num_microbatches=num_microbatches,
            pp_rank=pp_rank,
            num_pp_ranks=num_pp_ranks,
            dp_rank=dp_rank,
            framework="megatron-core",
            policy=policy,
            max_slowdown_ratio=max_slowdown_ratio,
            socket_path=socket_path,
            timer=timer_for(_device(), num_microbatches),
        )
        rank = OrderedRank(client, expected_order=order_rows(planned, pp_rank), what=f"job {job}, rank {pp_rank}")
        handle = ConfigHandle(config, rank)
        join_replicas(handle, client, dp_rank=dp_rank, run_key=run_key, socket_path=socket_path)
    except Exception as error:  # noqa: BLE001  a version this file does not know must train on as it is
        logger.warning("gpuenergyd: job %s: this Megatron configuration cannot be joined: %s", job, error)
        return Handle()
    return handle


def _device() -> Any:
    import torch  # noqa: PLC0415  whoever has Megatron has loaded it

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
