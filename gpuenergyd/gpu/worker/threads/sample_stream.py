"""What happens to samples in the worker: they are batched for the daemon and checked for foreign clock changes."""

import time
from collections.abc import Sequence

from gpuenergyd.gpu.link.messages import GpuSample

_SEND_PERIOD_NS = 100_000_000
_MAX_BATCH = 256
_CLOCK_TOLERANCE_MHZ = 16
_SETTLED_AFTER_NS = 200_000_000
_NUM_ABOVE_IS_FOREIGN = 10
"""Consecutive samples: 0.2 s at the usual period."""


class SampleBatch:
    """Collects samples until the next batch is due."""

    def __init__(self) -> None:
        self._samples: list[GpuSample] = []
        self._sent_ns = 0

    def add(self, samples: Sequence[GpuSample]) -> tuple[GpuSample, ...]:
        """Add samples; return the batch when it is due, otherwise nothing."""
        self._samples += samples
        now_ns = time.monotonic_ns()
        if now_ns - self._sent_ns < _SEND_PERIOD_NS and len(self._samples) < _MAX_BATCH:
            return ()
        batch, self._samples = tuple(self._samples), []
        self._sent_ns = now_ns
        return batch


class ForeignChangeDetector:
    """Detects that another program released our clock lock: the clock stays above it for consecutive samples."""

    def __init__(self) -> None:
        self._num_above: dict[str, int] = {}

    def reset(self, gpu_uuid: str) -> None:
        """Start over for a GPU with a new lease."""
        self._num_above[gpu_uuid] = 0

    def is_detected(self, sample: GpuSample, lock: tuple[int, int] | None) -> bool:
        """Return, once, whether this sample proves that the lock is no longer ours.

        `lock` is the clock that we set in MHz and the monotonic instant in ns at which that call returned.
        """
        is_above = (
            lock is not None
            and sample.sm_clock_mhz is not None
            and sample.sm_clock_mhz > lock[0] + _CLOCK_TOLERANCE_MHZ
            and sample.read_mono_ns > lock[1] + _SETTLED_AFTER_NS
        )
        self._num_above[sample.gpu_uuid] = self._num_above.get(sample.gpu_uuid, 0) + 1 if is_above else 0
        return self._num_above[sample.gpu_uuid] == _NUM_ABOVE_IS_FOREIGN
