"""The memory of a rank's GPU: how much is free at the peak of an iteration, and how much a microbatch needs."""

from typing import Any, Protocol


class MemoryMeter(Protocol):
    """Reads the memory of one rank's device; called on the training thread, but not while an instruction is timed."""

    @property
    def capacity_bytes(self) -> int: ...

    def allocated_bytes(self) -> int:
        """Return the memory that tensors use now."""
        ...

    def free_bytes(self) -> int:
        """Return the memory that this process could still have used at its peak so far."""
        ...


class CudaMemory:
    """Memory of a CUDA device, from the statistics of torch's allocator, which are never reset here."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._cuda = torch.cuda
        self._device = device
        _, self._capacity_bytes = torch.cuda.mem_get_info(device)

    @property
    def capacity_bytes(self) -> int:
        return int(self._capacity_bytes)

    def allocated_bytes(self) -> int:
        return int(self._cuda.memory_allocated(self._device))

    def free_bytes(self) -> int:
        """Return the memory that no process has reserved, plus what this process has beyond its tensors' peak."""
        unreserved_bytes, _ = self._cuda.mem_get_info(self._device)
        reserved_bytes = self._cuda.memory_reserved(self._device)
        return int(unreserved_bytes + max(0, reserved_bytes - self._cuda.max_memory_allocated(self._device)))


class MicrobatchMemory:
    """Measures a rank's memory in its first iterations, and again whenever it runs in another order.

    A microbatch needs what its forward leaves allocated; the largest value of all forwards is reported.
    """

    MEASURED_ITERATIONS = 4
    """Iterations in which forwards are measured; only a few, as reading the allocator delays launches."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._num_measured = 0
        self._before_bytes: int | None = None
        self._microbatch_bytes = 0

    @property
    def is_measuring(self) -> bool:
        """Whether forwards are being measured."""
        return self._num_measured < self.MEASURED_ITERATIONS

    def begin_forward(self) -> None:
        """Read the memory before a forward."""
        self._before_bytes = self._meter.allocated_bytes()

    def end_forward(self) -> None:
        """Read the memory after a forward."""
        if self._before_bytes is not None:
            self._microbatch_bytes = max(self._microbatch_bytes, self._meter.allocated_bytes() - self._before_bytes)
            self._before_bytes = None

    def end_iteration(self, *, is_reordered: bool) -> tuple[int, ...] | None:
        """Return (free, per microbatch, capacity) in bytes to report after an iteration; None if not measured."""
        if not (self.is_measuring or is_reordered):
            return None
        self._num_measured += 1
        return max(0, self._meter.free_bytes()), self._microbatch_bytes, self._meter.capacity_bytes
