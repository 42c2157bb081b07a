"""Small model stages for trainings with real Megatron-core on CPU, whose work takes the time of a simulated GPU."""

import contextlib
from typing import Any

import torch

from tests.support.stage_gpu import Work, after_work

WIDTH, SEQUENCE = 8, 4
FORWARD_S, BACKWARD_S = 0.010, 0.020


def replace_cuda_calls() -> None:
    """Replace the CUDA calls of Megatron's schedules, before Megatron is imported."""
    zeros = torch.zeros
    replaced: Any = torch
    replaced.zeros = lambda *args, **kwargs: zeros(*args, **{**kwargs, "device": "cpu"})
    replaced.cuda.current_device = lambda: "cpu"
    replaced.cuda.synchronize = lambda *_: None
    replaced.cuda.current_stream = replaced.cuda.Stream = lambda *_, **__: None
    replaced.cuda.stream = lambda *_: contextlib.nullcontext()
    replaced.cuda.Event = NoEvent
    replaced.cuda.nvtx.range_push = replaced.cuda.nvtx.range_pop = lambda *_: None


def bare_config(**settings: Any) -> Any:
    """Return a configuration without a transformer's, with what Megatron's schedules read of one."""
    from megatron.core import ModelParallelConfig  # type: ignore[import-not-found]  # noqa: PLC0415  after the replacing

    config = ModelParallelConfig(**settings)
    config.hidden_size = WIDTH
    config.fine_grained_activation_offloading = False
    config.fp8 = config.fp4 = None
    return config


class NoEvent:
    """An event of a device without streams."""

    def record(self, stream: Any) -> None:
        """Do nothing."""

    def wait(self, stream: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


class NoWork:
    """A GPU for which all work is nothing."""

    def work(self, time_s: float) -> None:
        """Do nothing."""


def make_stage(config: Any, state: Any, gpu: Work, vp_stage: int | None) -> Any:
    """Return a linear layer whose weights are split by columns of its input."""
    from megatron.core.enums import ModelType  # type: ignore[import-not-found]  # noqa: PLC0415  after the replacing
    from megatron.core.tensor_parallel import mappings  # type: ignore[import-not-found]  # noqa: PLC0415

    class Stage(torch.nn.Module):
        """One chunk of the model."""

        def __init__(self) -> None:
            super().__init__()
            pp_rank, tp_rank = state.get_pipeline_model_parallel_rank(), state.get_tensor_model_parallel_rank()
            torch.manual_seed(64 * (vp_stage or 0) + pp_rank * 8 + tp_rank)
            self.layer = torch.nn.Linear(WIDTH, WIDTH)
            self.config, self.vp_stage = config, vp_stage
            self.received: Any = None
            self.model_type = ModelType.encoder_or_decoder

        def set_input_tensor(self, tensors: list[Any]) -> None:
            """Set the activations of the previous stage."""
            self.received = tensors[0]

        def forward(self, x: Any) -> Any:
            """Return activations, after the time of a forward; tensor-parallel ranks then wait for each other."""
            gpu.work(FORWARD_S)
            own = mappings.copy_to_tensor_model_parallel_region(x if self.received is None else self.received)
            summed: Any = mappings.reduce_from_tensor_model_parallel_region(self.layer(own))
            return after_work(gpu, BACKWARD_S, summed)

    return Stage()


def batches(seed: int, num_microbatches: int) -> list[Any]:
    """Return the data of each microbatch of a step."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SEQUENCE, 1, WIDTH, generator=generator) for _ in range(num_microbatches)]


def forward_step(data: Any, stage: Any) -> Any:
    """Return a stage's output and the loss function."""
    return stage(next(data)), lambda out: (out.square().mean(), {"loss": float(out.detach().square().mean()).hex()})
