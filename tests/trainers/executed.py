"""Instructions and memory of a torch pipeline, traced in the stage's own class, independently of the adapter."""

from collections.abc import Iterable
from typing import Any

from torch.distributed.pipelining import PipelineStage

from gpuenergyd.wire.messages import OrderRow
from tests.support.simulated_memory import SavedActivations


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
    saved: SavedActivations | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a microbatch's forward."""
        self.trace.append(("F", fwd_chunk_id, self.chunk_index))
        if self.saved is None:
            result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        else:
            with self.saved.counting():
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
