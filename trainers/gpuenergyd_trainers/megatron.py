"""Adapter for Megatron-core: `attach(config, job="gpt", num_microbatches=32)`.

Call it on every rank before the first iteration, with the configuration of the model, or of its first chunk.
Instructions are marked at Megatron's own step functions (`megatron_steps`), whose arguments name microbatch and chunk.
The whole step is marked by `config.timers`, which is replaced by timers that forward each call to the original ones. A
step without a backward is an evaluation. The expected order is that of Megatron's schedule table: 1F1B, interleaved
1F1B with virtual stages, or combined 1F1B, in which a forward and a backward overlap
(`overlap_moe_expert_parallel_comm`) and are planned as one instruction. The order is checked after every iteration.
While the batch size is ramped up, the number of microbatches is read from Megatron's calculator before each step, and
when it changes, the rank registers the order for the new number.

Megatron's own timers, while enabled, synchronise the device at every start and stop, so times and savings then differ
from those of a normal run. Tested with megatron-core 0.16 on CPU, with CUDA calls replaced.
"""

import sys
from functools import partial
from typing import Any, Unpack

from gpuenergyd.core.pipeline.graph import Schedule, one_forward_one_backward
from gpuenergyd.core.pipeline.megatron_orders import combined_1f1b, megatron_interleaved
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_trainers.joining.handle import Handle
from gpuenergyd_trainers.joining.membership import JoinKeywords, JoinOptions, PipelineRank, join
from gpuenergyd_trainers.joining.ordered_rank import OrderedRank, order_rows
from gpuenergyd_trainers.joining.place import Place, given_place
from gpuenergyd_trainers.joining.place_sources import megatron_place
from gpuenergyd_trainers.megatron_steps import require_step_functions, wrap_step_functions

_STEP = "forward-backward"
_REORDER_REFUSAL = (
    "Megatron-core's schedules call whole backwards; delay_wgrad_compute is for combined 1F1B alone, which runs weight"
    " gradients layer by layer inside its own backwards"
)


class ConfigHandle(Handle):
    """An attached Megatron configuration: its steps and instructions are marked."""

    def __init__(self, config: Any, num_microbatches: int, rank: OrderedRank) -> None:
        import torch  # noqa: PLC0415  loaded already by the caller

        super().__init__(rank)
        self._is_grad_enabled = torch.is_grad_enabled
        self._config = config
        self._active_rank = rank
        self._ramp_up = MicrobatchRampUp(rank, num_microbatches)
        self._original_timers = config.timers
        self._is_in_step = self._is_evaluation = False
        self._num_backwards = 0
        self._wrapped += wrap_step_functions(
            config, rank.client, is_combined=_is_combined(config), on_backward=self._count_backward
        )
        config.timers = self.timers

    @property
    def is_attached(self) -> bool:
        """Whether the configuration is wrapped and the rank runs its instructions in the registered order."""
        return super().is_attached and self._config.timers == self.timers

    def detach(self) -> None:
        """Leave the job and restore the original timers and step functions."""
        if self._config.timers == self.timers:
            self._config.timers = self._original_timers
        super().detach()

    def timers(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the timer with a name; Megatron calls this as `config.timers`."""
        original = self._original_timers(name, *args, **kwargs) if self._original_timers is not None else None
        return _StepTimer(self, name, original) if name == _STEP or original is None else original

    def begin_step(self) -> None:
        """Mark the beginning of a step."""
        if self._is_in_step:  # the previous step raised
            self._active_rank.fail_step()
        # Megatron's own evaluations run without gradients; others are recognised at their end, by lack of backwards.
        self._is_evaluation = not self._is_grad_enabled()
        if self._is_evaluation:
            self._active_rank.pause()
            return
        self._ramp_up.follow()
        self._is_in_step = True
        self._num_backwards = 0
        self._active_rank.begin_step()

    def end_step(self) -> None:
        """Mark the end of a step."""
        if self._is_evaluation:
            return
        self._is_in_step = False
        if self._num_backwards == 0:  # an evaluation
            self._active_rank.fail_step()
        else:
            self._active_rank.end_step()

    def _count_backward(self) -> None:
        self._num_backwards += 1


class _StepTimer:
    """A timer that marks steps and forwards each call to the original timer."""

    def __init__(self, handle: ConfigHandle, name: str, original: Any) -> None:
        self._handle = handle
        self._is_step = name == _STEP
        self._original = original

    def start(self, *args: Any, **kwargs: Any) -> None:
        if self._original is not None:
            self._original.start(*args, **kwargs)
        if self._is_step:
            self._handle.shielded(self._handle.begin_step)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        if self._is_step:
            self._handle.shielded(self._handle.end_step)
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

    By default the place of the rank comes from Megatron's parallel state: the tensor-, context- and expert-parallel
    ranks of a stage follow one plan. If there is no parallel state, `pp_rank`, `num_pp_ranks` and `dp_rank` are needed,
    and with several ranks per stage also `tp_rank` and `num_tp_ranks`. The other options are those of
    `torch_pipelining.attach`. If a configuration is not supported, training continues unchanged, with one warning.
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
        place = find_place()
        pipeline = place.pipeline
        planned = planned_schedule(config, pipeline.size, num_microbatches)
        require_step_functions(is_interleaved=planned.num_chunks > 1, is_combined=_is_combined(config))
        return PipelineRank(
            framework="megatron-core",
            schedule_name=planned.name,
            expected_order=order_rows(planned, pipeline.rank),
            order_of=lambda number: order_rows(planned_schedule(config, pipeline.size, number), pipeline.rank),
            num_microbatches=num_microbatches,
            tokens_per_iteration=num_microbatches * _tokens_per_microbatch() or None,
            num_chunks=planned.num_chunks,
            place=place,
            device=_device(),
            reorder_refusal=_REORDER_REFUSAL,
        )

    return join(
        JoinOptions(job=job, **options),
        describe,
        partial(ConfigHandle, config, num_microbatches),
        target=config,
        target_name="this Megatron configuration",
    )


def _tokens_per_microbatch() -> int:
    """Return the tokens of a microbatch by the arguments of Megatron's training loop; 0 in a program without it."""
    known = sys.modules.get("megatron.training.global_vars")
    args = getattr(known, "_GLOBAL_ARGS", None)
    return int(getattr(args, "micro_batch_size", None) or 0) * int(getattr(args, "seq_length", None) or 0)


def is_attached(config: Any) -> bool:
    """Return whether a configuration is attached."""
    return isinstance(getattr(config.timers, "__self__", None), ConfigHandle)


def planned_schedule(config: Any, num_pp_ranks: int, num_microbatches: int) -> Schedule:
    """Return the order in which Megatron's schedules run the instructions for a configuration.

    Raises:
        ScheduleError: Megatron's schedule does not support this number of ranks, microbatches or chunks.
    """
    num_chunks = int(getattr(config, "virtual_pipeline_model_parallel_size", None) or 1) if num_pp_ranks > 1 else 1
    group_size = getattr(config, "microbatch_group_size_per_vp_stage", None) or num_pp_ranks
    if _is_combined(config):
        return combined_1f1b(num_pp_ranks, num_microbatches, num_chunks, group_size)
    if num_chunks == 1:
        return one_forward_one_backward(num_pp_ranks, num_microbatches)
    is_paired = not getattr(config, "overlap_p2p_comm", False)
    return megatron_interleaved(num_pp_ranks, num_microbatches, num_chunks, group_size, is_paired=is_paired)


def _is_combined(config: Any) -> bool:
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False))


def _device() -> Any:
    import torch  # noqa: PLC0415  loaded already by Megatron

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


_CALCULATOR = "megatron.core.num_microbatches_calculator"


def calculated_microbatches() -> int | None:
    """Return the number of microbatches of the next step; None if the program does not use Megatron's calculator."""
    module = sys.modules.get(_CALCULATOR)
    try:
        return int(module.get_num_microbatches()) if module is not None else None
    except AttributeError:  # no calculator was initialized
        return None


class MicrobatchRampUp:
    """Changes a rank's registered order when the number of microbatches changes.

    The calculator is used only if it gives the registered number at the start. If it gives a number that Megatron's
    schedule does not support, it is not used any more; the check of the order then ends the plans.
    """

    def __init__(self, rank: OrderedRank, num_microbatches: int) -> None:
        self._rank = rank
        self._num_microbatches = num_microbatches
        self._is_followed = calculated_microbatches() == num_microbatches and rank.can_change_microbatches

    def follow(self) -> None:
        """Register the new order if the next step has another number of microbatches; call between two steps."""
        now = calculated_microbatches() if self._is_followed else None
        if now is None or now == self._num_microbatches:
            return
        client, before = self._rank.client, self._num_microbatches
        client.num_tokens = client.num_tokens and client.num_tokens * now // before
        self._num_microbatches = now
        try:
            self._rank.change_microbatches(now)
        except GpuEnergyError:
            self._is_followed = False
