"""Memory of a simulated GPU: the bytes that autograd keeps for backwards."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from gpuenergyd_trainers.joining.handle import Call, WrappedAttribute


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

    @staticmethod
    def unpack(saved: "_Saved") -> torch.Tensor:
        return saved.tensor

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
        # Detached: an instruction's own output would otherwise keep its graph alive, and the graph this object.
        self.tensor, self._count = tensor.detach(), count
        count.hold(tensor.untyped_storage())

    def __del__(self) -> None:
        self._count.let_go(self.tensor.untyped_storage())


class SimulatedMemory:
    """A MemoryMeter of a stage on a simulated GPU that can hold `capacity_bytes` of activations."""

    def __init__(self, stage: Any, *, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.saved = SavedActivations(stage.submod.parameters())
        self._wrapped = WrappedAttribute(stage, "forward_one_chunk", self._counting)

    def _counting(self, compute: Call) -> Call:
        def compute_counting(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self.saved.pack, SavedActivations.unpack):
                return compute(*args, **kwargs)

        return compute_counting

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest amount of memory held at once so far."""
        return self.saved.peak_bytes

    def allocated_bytes(self) -> int:
        """Return the memory that saved tensors use now."""
        return self.saved.held_bytes

    def free_bytes(self) -> int:
        """Return the memory that was still free at the peak so far."""
        return self._capacity_bytes - self.saved.peak_bytes

    def detach(self) -> None:
        """Restore the stage."""
        self._wrapped.undo()
