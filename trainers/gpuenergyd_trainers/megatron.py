"""Adapter for Megatron-core: `attach(config, job="gpt", num_microbatches=32)`.

Call it on every rank before the first iteration.
Megatron's pipeline schedules call `config.timers(name, ...)` around every forward, every backward and the whole step.
The adapter replaces the timers by ones that mark instructions and forward each call to the original timers. Timers do
not name microbatches, so these are counted; the loss is inside the forward's timer. A step without a backward is an
evaluation. Only the non-interleaved schedule is supported: timers do not distinguish the chunks of an interleaved one,
nor the forward and backward of overlapped expert-parallel steps.

Megatron's own timers, while enabled, synchronise the device at every start and stop: times and savings then differ
from those of a normal run. Tested with megatron-core 0.16 on CPU, with CUDA calls replaced.
"""

from functools import partial
from typing import Any, Unpack

from gpuenergyd.client.timing.recorder import NOT_RECORDED
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.errors import UsageError
from gpuenergyd_trainers.joining.handle import Handle
from gpuenergyd_trainers.joining.membership import JoinKeywords, JoinOptions, PipelineRank, join
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank, order_rows
from gpuenergyd_trainers.joining.place import Place, given_place
from gpuenergyd_trainers.joining.place_sources import megatron_place

_SCHEDULE_NAME = "1f1b"
_STEP = "forward-backward"
_KINDS = {"forward-compute": "F", "backward-compute": "B"}


class ConfigHandle(Handle):
    """A Megatron configuration whose timers mark instructions."""

    def __init__(self, config: Any, rank: OrderedRank) -> None:
        super().__init__(rank)
        self._config = config
        self._active_rank = rank
        self._original_timers = config.timers
        self._num_begun = dict.fromkeys(_KINDS.values(), 0)
        self._slots = dict.fromkeys(_KINDS.values(), NOT_RECORDED)
        self._is_in_step = False
        config.timers = self.timers

    @property
    def is_attached(self) -> bool:
        """Whether the timers are replaced and the rank runs the registered instruction order."""
        return self._active_rank.is_active and self._config.timers == self.timers

    def detach(self) -> None:
        """Leave the job and restore the original timers."""
        if self._config.timers == self.timers:
            self._config.timers = self._original_timers
        super().detach()

    def timers(self, name: str, *args: Any, **kwargs: Any) -> "_Timer":
        """Return the timer of a name; Megatron calls this as `config.timers`."""
        original = self._original_timers(name, *args, **kwargs) if self._original_timers is not None else None
        return _Timer(self, name, original)

    def begin(self, name: str) -> None:
        """Mark the begin of a timed section."""
        if name == _STEP:
            if self._is_in_step:  # the previous step raised
                self._active_rank.fail_step()
            self._is_in_step = True
            self._num_begun.update(dict.fromkeys(self._num_begun, 0))
            self._active_rank.begin_step()
        elif name in _KINDS:
            kind = _KINDS[name]
            index = self._num_begun[kind]
            self._num_begun[kind] = index + 1
            self._slots[kind] = self._active_rank.client.begin_instruction(kind, index)

    def end(self, name: str) -> None:
        """Mark the end of a timed section."""
        if name == _STEP:
            self._is_in_step = False
            if self._num_begun["B"] == 0:
                self._active_rank.fail_step()
            else:
                self._active_rank.end_step()
        elif name in _KINDS:
            self._active_rank.client.end_instruction(self._slots[_KINDS[name]])


class _Timer:
    """A timer that marks instructions and forwards each call to the original timer."""

    def __init__(self, handle: ConfigHandle, name: str, original: Any) -> None:
        self._handle = handle
        self._name = name
        self._original = original

    def start(self, *args: Any, **kwargs: Any) -> None:
        if self._original is not None:
            self._original.start(*args, **kwargs)
        self._handle.shielded(lambda: self._handle.begin(self._name))

    def stop(self, *args: Any, **kwargs: Any) -> None:
        self._handle.shielded(lambda: self._handle.end(self._name))
        if self._original is not None:
            self._original.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def attach(
    config: Any,
    *,
    job: str | None = None,
    num_microbatches: int,
    pp_rank: int | None = None,
    num_pp_ranks: int | None = None,
    dp_rank: int | None = None,
    tp_rank: int = 0,
    num_tp_ranks: int = 1,
    **options: Unpack[JoinKeywords],
) -> Handle:
    """Attach a model's ModelParallelConfig to the daemon and return a handle that undoes it.

    The place of the rank comes from Megatron's parallel state by default: tensor-, context- and expert-parallel ranks
    of a stage follow one plan. Where there is no parallel state, give `pp_rank`, `num_pp_ranks` and `dp_rank`, and of
    several ranks per stage also `tp_rank` and `num_tp_ranks`. Other options as in `torch_pipelining.attach`. With a
    configuration that is not supported, training continues unchanged, with one warning in the log.
    """

    def find_place() -> Place:
        if (known := options.get("place")) is not None:
            return known
        if pp_rank is None or num_pp_ranks is None or dp_rank is None:
            return megatron_place()
        return given_place(
            pp_rank=pp_rank, num_pp_ranks=num_pp_ranks, dp_rank=dp_rank, tp_rank=tp_rank, num_tp_ranks=num_tp_ranks
        )

    def describe() -> PipelineRank:
        _check_supported(config)
        place = find_place()
        planned = make_schedule(_SCHEDULE_NAME, place.pipeline.size, num_microbatches)
        return PipelineRank(
            framework="megatron-core",
            schedule_name=_SCHEDULE_NAME,
            expected_order=order_rows(planned, place.pipeline.rank),
            num_microbatches=num_microbatches,
            place=place,
            device=_device(),
        )

    return join(
        JoinOptions(job=job, **options),
        describe,
        partial(ConfigHandle, config),
        target_name="this Megatron configuration",
    )


def _check_supported(config: Any) -> None:
    if getattr(config, "virtual_pipeline_model_parallel_size", None):
        raise UsageError("interleaved schedules are not supported: timers do not distinguish chunks")
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise UsageError("overlap_moe_expert_parallel_comm is not supported: it runs forward and backward in one timer")


def _device() -> Any:
    import torch  # noqa: PLC0415  loaded already by Megatron

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
