"""Chunks of a GPT with experts for trainings with real Megatron-core on CPU, with all-to-alls that overlap.

Forwards and backwards are Megatron's own, layer by layer (`TransformerModelChunkSchedulePlan`); a layer also takes the
time of a simulated GPU. CUDA's streams, events and random numbers are replaced, and what assumes them in Megatron.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tests.support.megatron_stages import BACKWARD_S, FORWARD_S, NoEvent
from tests.support.stage_gpu import Work, after_work

EXPERT_RANKS = 2
_VOCABULARY, _SEQUENCE, _WIDTH, _EXPERTS = 32, 8, 16, 4
_FACTORIES = ("empty", "ones", "tensor", "arange", "full", "empty_like", "zeros_like", "ones_like", "rand", "randn")


class _NoStream:
    """A stream of a device that runs all work at once."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def record_event(self) -> NoEvent:
        return NoEvent()


class _NoRandomStates:
    """The random states of a device that nobody uses: there is no dropout."""

    @contextlib.contextmanager
    def fork(self, *_: Any) -> Iterator[None]:
        yield


def replace_cuda_calls_of_experts() -> None:
    """Replace what an overlapped mixture of experts calls of CUDA; to be called before Megatron is imported."""
    replaced: Any = torch
    for name in _FACTORIES:
        setattr(replaced, name, _on_cpu(getattr(torch, name)))
    replaced.Tensor.record_stream = lambda *_: None
    replaced.cuda.Stream = replaced.cuda.current_stream = lambda *_, **__: _NoStream()
    replaced.cuda.nvtx.range = lambda *_: contextlib.nullcontext()
    from megatron.core.tensor_parallel import random  # type: ignore[import-not-found]  # noqa: PLC0415  after that
    from megatron.core.transformer.moe import moe_utils, token_dispatcher  # type: ignore[import-not-found]  # noqa: PLC0415

    random._CUDA_RNG_STATE_TRACKER = _NoRandomStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    moe_utils.te_general_gemm = None  # undefined without Transformer Engine
    token_dispatcher.maybe_move_tensor_to_cpu = _moved


def gpt_config(*, num_layers: int, **settings: Any) -> Any:
    """Return the configuration of a small GPT, every layer of which has experts on two ranks."""
    from megatron.core.transformer.transformer_config import TransformerConfig  # type: ignore[import-not-found]  # noqa: PLC0415

    return TransformerConfig(
        num_layers=num_layers, hidden_size=_WIDTH, num_attention_heads=2, num_moe_experts=_EXPERTS,
        expert_model_parallel_size=EXPERT_RANKS, moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none", overlap_moe_expert_parallel_comm=True, bf16=True,
        params_dtype=torch.bfloat16, use_cpu_initialization=True, add_bias_linear=False, attention_dropout=0.0,
        hidden_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, **settings,
    )  # fmt: skip


def make_gpt_chunk(config: Any, state: Any, gpu: Work, vp_stage: int | None) -> Any:
    """Return the layers of one virtual stage."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # type: ignore[import-not-found]  # noqa: PLC0415
    from megatron.core.models.gpt.gpt_model import GPTModel  # type: ignore[import-not-found]  # noqa: PLC0415

    pp_rank, pp_size = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    last_chunk = (config.virtual_pipeline_model_parallel_size or 1) - 1
    torch.manual_seed(8 * (vp_stage or 0) + pp_rank)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=_EXPERTS, moe_grouped_gemm=False),
        vocab_size=_VOCABULARY,
        max_sequence_length=_SEQUENCE,
        pre_process=pp_rank == 0 and not vp_stage,
        post_process=pp_rank == pp_size - 1 and (vp_stage or 0) == last_chunk,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    ).bfloat16()

    def work_after_attention(_: Any, __: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:
        gpu.work(FORWARD_S)
        return (after_work(gpu, BACKWARD_S, result[0]), *result[1:])

    for layer in model.decoder.layers:
        layer.self_attention.register_forward_hook(work_after_attention)
    return model


def token_batches(seed: int, num_microbatches: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, _VOCABULARY, (1, _SEQUENCE), generator=generator) for _ in range(num_microbatches)]


def gpt_forward_step(data: Any, model: Any, *, return_schedule_plan: bool = False) -> Any:
    """Return a chunk's output, or its schedule plan, and the loss function."""
    tokens = next(data)
    mask = torch.ones(1, 1, _SEQUENCE, _SEQUENCE, dtype=torch.bool).triu(1)
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(tokens, torch.arange(_SEQUENCE).expand(1, _SEQUENCE), mask, labels=tokens)
    return output, lambda out: (out.float().mean(), {"loss": float(out.detach().float().mean()).hex()})


def _on_cpu(make: Any) -> Any:
    def make_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return make_on_cpu


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: FBT001, FBT002  Megatron's
    """Return what Megatron copies to the host: numbers of tokens, as an array where it wants one."""
    del record_stream
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
