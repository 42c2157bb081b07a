"""Small model stages for trainings with real Megatron-core on CPU, whose work takes the time of a simulated GPU."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from gpuenergyd.gpu.drivers.simulated import InstructionWork, SimulatedHost
from gpuenergyd_trainers.timing.simulated import SimulatedTimer

WIDTH, SEQUENCE = 8, 4
_FORWARD_S, _BACKWARD_S = 0.010, 0.020
_COMBINED_S = 0.026
"""A forward and a backward that hide each other's communication."""
_COMPUTE_SHARE, _POWER_W_PER_MHZ = 0.8, 0.2


@dataclass(frozen=True)
class StageGpu:
    """The simulated GPU of one rank."""

    host: SimulatedHost
    gpu_uuid: str
    timer: SimulatedTimer
    ratio: float
    """Factor on the duration of work."""

    def work(self, time_s: float) -> None:
        """Wait until work of this duration at full speed is done."""
        own_s = time_s * self.ratio
        self.host.begin_work(
            self.gpu_uuid,
            InstructionWork(
                memory_time_s=own_s * (1 - _COMPUTE_SHARE),
                compute_time_s=own_s * _COMPUTE_SHARE,
                power_coefficient_w_per_mhz=_POWER_W_PER_MHZ,
            ),
        )
        self.host.hold(self.gpu_uuid)
        self.timer.work_ended_ns = self.host.finish_work(self.gpu_uuid)


def replace_cuda_calls() -> None:
    """Replace the CUDA calls of Megatron's schedules, before Megatron is imported."""
    zeros = torch.zeros
    replaced: Any = torch
    replaced.zeros = lambda *args, **kwargs: zeros(*args, **{**kwargs, "device": "cpu"})
    replaced.cuda.current_device = lambda: "cpu"
    replaced.cuda.synchronize = lambda *_: None
    replaced.cuda.current_stream = replaced.cuda.Stream = lambda *_, **__: None
    replaced.cuda.stream = lambda *_: contextlib.nullcontext()
    replaced.cuda.Event = _NoEvent
    replaced.cuda.nvtx.range_push = replaced.cuda.nvtx.range_pop = lambda *_: None


def bare_config(**settings: Any) -> Any:
    """Return a configuration without a transformer's, with what Megatron's schedules read of one."""
    from megatron.core import ModelParallelConfig  # noqa: PLC0415  after the replacing

    config = ModelParallelConfig(**settings)
    config.hidden_size = WIDTH
    config.fine_grained_activation_offloading = False
    config.fp8 = config.fp4 = None
    return config


class _NoEvent:
    """An event of a device without streams."""

    def record(self, stream: Any) -> None:
        """Do nothing."""

    def wait(self, stream: Any) -> None:
        """Do nothing."""


def make_stage(config: Any, state: Any, gpu: Any, vp_stage: int | None) -> Any:
    """Return a linear layer whose weights are split by columns of its input."""
    from megatron.core.enums import ModelType  # type: ignore[import-not-found]  # noqa: PLC0415  after the replacing
    from megatron.core.tensor_parallel import mappings  # type: ignore[import-not-found]  # noqa: PLC0415

    class Backward(torch.autograd.Function):
        """Nothing in a forward, the GPU's work in a backward."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            """Return the input."""
            del ctx
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            """Take the time of a backward."""
            del ctx
            gpu.work(_BACKWARD_S)
            return gradients[0]

    class Stage(torch.nn.Module):
        """One chunk of the model."""

        def __init__(self) -> None:
            super().__init__()
            _initialize(self, config, state, vp_stage)
            self.model_type = ModelType.encoder_or_decoder

        def set_input_tensor(self, tensors: list[Any]) -> None:
            """Set the activations of the previous stage."""
            self.received = tensors[0]

        def forward(self, x: Any) -> Any:
            """Return activations, after the time of a forward; tensor-parallel ranks then wait for each other."""
            gpu.work(_FORWARD_S)
            own = mappings.copy_to_tensor_model_parallel_region(x if self.received is None else self.received)
            summed = mappings.reduce_from_tensor_model_parallel_region(self.layer(own))
            return Backward.apply(summed)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    return Stage()


def make_combined_stage(config: Any, state: Any, gpu: Any, vp_stage: int | None) -> Any:
    """Return a linear layer for combined steps, which Megatron runs through the schedule plan of a GPTModel."""
    from megatron.core.enums import ModelType  # noqa: PLC0415  after the replacing
    from megatron.core.models.gpt.gpt_model import GPTModel  # type: ignore[import-not-found]  # noqa: PLC0415
    from megatron.core.pipeline_parallel.utils import (  # type: ignore[import-not-found]  # noqa: PLC0415
        AbstractSchedulePlan,
    )

    class Plan(AbstractSchedulePlan):  # type: ignore[misc]  # of an untyped library
        """A forward of the layer and the backward of an earlier one, in the time of both overlapped."""

        def __init__(self, stage: Any, x: Any) -> None:
            self.event = _NoEvent()
            self.vp_stage = vp_stage
            self.layer = stage.layer
            self.input = x if stage.received is None else stage.received

        @staticmethod
        def run(
            f_schedule_plan: Any,
            b_schedule_plan: Any,
            b_grad: Any = None,
            pre_forward: Any = None,
            pre_backward: Any = None,
            post_forward: Any = None,
            post_backward: Any = None,
        ) -> Any:
            """Return the forward's output; waits, sends and receives are where Megatron's own plans have them."""
            forward, backward, output = f_schedule_plan, b_schedule_plan, None
            if forward is not None and pre_forward is not None:
                pre_forward(forward.vp_stage)
            if backward is not None and pre_backward is not None:
                pre_backward(backward.vp_stage)
            gpu.work(_FORWARD_S if backward is None else _BACKWARD_S if forward is None else _COMBINED_S)
            if forward is not None:
                output = forward.output = forward.layer(forward.input)
            if backward is not None:
                torch.autograd.backward(backward.output, b_grad)
            if forward is not None and post_forward is not None:
                post_forward(output, forward.vp_stage)
            if backward is not None and post_backward is not None:
                post_backward(backward.input.grad, backward.vp_stage)
            return output

    class CombinedStage(GPTModel):  # type: ignore[misc]  # of an untyped library
        """One chunk of the model, of the class that Megatron demands for combined steps."""

        def __init__(self) -> None:  # without GPTModel's own, which builds a transformer
            torch.nn.Module.__init__(self)
            _initialize(self, config, state, vp_stage)
            self.model_type = ModelType.encoder_or_decoder

        def set_input_tensor(self, tensors: Any) -> None:
            """Set the activations of the previous stage."""
            self.received = tensors[0]

        def build_schedule_plan(self, x: Any) -> Plan:
            """Return the plan of one forward and its backward."""
            return Plan(self, x)

        def forward(self, x: Any) -> Any:
            """Return activations of an evaluation."""
            return self.layer(x if self.received is None else self.received)

    return CombinedStage()


def _initialize(stage: Any, config: Any, state: Any, vp_stage: int | None) -> None:
    pp_rank, tp_rank = state.get_pipeline_model_parallel_rank(), state.get_tensor_model_parallel_rank()
    torch.manual_seed(64 * (vp_stage or 0) + pp_rank * 8 + tp_rank)
    stage.layer = torch.nn.Linear(WIDTH, WIDTH)
    stage.config = config
    stage.vp_stage = vp_stage
    stage.received = None


def forward_step(data: Any, stage: Any, *, return_schedule_plan: bool = False) -> Any:
    """Return a stage's output, or its schedule plan, and the loss function."""
    output = stage.build_schedule_plan(next(data)) if return_schedule_plan else stage(next(data))
    return output, lambda out: (out.square().mean(), {"loss": float(out.detach().square().mean()).hex()})
