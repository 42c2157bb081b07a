"""Instructions and memory of a torch pipeline, traced in the stage's own class, independently of the adapter."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from gpuenergyd.wire.messages import OrderRow


def num_inflight(stage: Any) -> int:
    """Return how many microbatches a stage holds activations of, from a private attribute that torch 2.15 renamed."""
    held = stage.fwd_cache if hasattr(stage, "fwd_cache") else stage._forward_chunk_states
    return len(held)


class TracedStage(PipelineStage):
    """A stage that appends its instructions to `trace`, which the stages of one rank may share."""

    chunk_index = 0
    trace: list[OrderRow]
    peak_inflight = 0
    """Maximum number of microbatches whose activations were held at once."""
    saved: "SavedActivations | None" = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a microbatch's forward."""
        self.trace.append(("F", fwd_chunk_id, self.chunk_index))
        if self.saved is None:
            result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        else:
            with torch.autograd.graph.saved_tensors_hooks(self.saved.pack, _Saved.unpack):
                result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.peak_inflight = max(self.peak_inflight, num_inflight(self))
        return result

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,  # noqa: FBT001, FBT002  torch's signature
        last_backward: bool = False,  # noqa: FBT001, FBT002  torch's signature
    ) -> None:
        """Compute a microbatch's backward, or its input gradient."""
        self.trace.append(("B" if full_backward else "I", bwd_chunk_id, self.chunk_index))
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a microbatch's weight gradient."""
        self.trace.append(("W", bwd_chunk_id, self.chunk_index))
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def share_trace(stages: Iterable[TracedStage]) -> list[OrderRow]:
    """Let all stages of a rank append to one list, by chunk; return it."""
    trace: list[OrderRow] = []
    for chunk_index, stage in enumerate(stages):
        stage.trace, stage.chunk_index = trace, chunk_index
    return trace


class SavedActivations:
    """Counts the bytes that autograd keeps for backwards: each storage once, without the model's parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._num_held: Counter[int] = Counter()
        self.held_bytes = 0
        self.peak_bytes = 0

    def pack(self, tensor: torch.Tensor) -> "_Saved":
        """Keep a tensor for autograd."""
        return _Saved(tensor, self)

    def hold(self, storage: Any) -> None:
        """Count a reference to a storage."""
        if storage.data_ptr() in self._parameters:
            return
        self._num_held[storage.data_ptr()] += 1
        if self._num_held[storage.data_ptr()] == 1:
            self.held_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def let_go(self, storage: Any) -> None:
        """Drop a reference to a storage."""
        if storage.data_ptr() in self._parameters:
            return
        self._num_held[storage.data_ptr()] -= 1
        if self._num_held[storage.data_ptr()] == 0:
            self.held_bytes -= storage.nbytes()


class _Saved:
    """Autograd's substitute for a saved tensor, with the same lifetime."""

    def __init__(self, tensor: torch.Tensor, count: SavedActivations) -> None:
        self._tensor, self._count = tensor, count
        count.hold(tensor.untyped_storage())

    def unpack(self) -> torch.Tensor:
        return self._tensor

    def __del__(self) -> None:
        self._count.let_go(self._tensor.untyped_storage())
