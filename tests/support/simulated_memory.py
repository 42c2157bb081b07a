"""Memory of a simulated GPU: the bytes that autograd keeps for backwards, each storage once, without parameters."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from gpuenergyd_trainers.joining.handle import Call, WrappedAttribute


class SavedActivations:
    """Counts the bytes that autograd keeps for backwards."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._num_held: Counter[int] = Counter()
        self.held_bytes = 0
        self.peak_bytes = 0

    def counting(self) -> Any:
        """Return a context in which what autograd keeps is counted."""
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def count(self, storage: Any, change: int) -> None:
        """Add or drop a reference to a storage."""
        place = storage.data_ptr()
        if place in self._parameters:
            return
        self._num_held[place] += change
        if self._num_held[place] == max(0, change):  # the first reference, or none is left
            self.held_bytes += change * storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class _Saved:
    """Autograd's substitute for a saved tensor, with the same lifetime."""

    def __init__(self, tensor: torch.Tensor, saved: SavedActivations) -> None:
        # Detached: an instruction's own output would otherwise keep its graph alive, and the graph this object.
        self.tensor, self._saved = tensor.detach(), saved
        saved.count(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._saved.count(self.tensor.untyped_storage(), -1)


class SimulatedMemory:
    """A MemoryMeter of a stage on a simulated GPU that can hold `capacity_bytes` of activations."""

    def __init__(self, stage: Any, *, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.saved = SavedActivations(stage.submod.parameters())
        self._wrapped = WrappedAttribute(stage, "forward_one_chunk", self._counting)

    def _counting(self, compute: Call) -> Call:
        def compute_counting(*args: Any, **kwargs: Any) -> Any:
            with self.saved.counting():
                return compute(*args, **kwargs)

        return compute_counting

    @property
    def peak_bytes(self) -> int:
        return self.saved.peak_bytes

    def allocated_bytes(self) -> int:
        return self.saved.held_bytes

    def free_bytes(self) -> int:
        return self.capacity_bytes - self.saved.peak_bytes

    def detach(self) -> None:
        self._wrapped.undo()
