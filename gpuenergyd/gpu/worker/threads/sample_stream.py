"""Samples of GPUs on their way to the daemon: sent in batches, and checked for clock changes by other programs."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpuenergyd.gpu.device import SAME_CLOCK_MHZ
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.gpu.worker.threads.actuator import ClockLock

_SEND_PERIOD_NS = 100_000_000
_MAX_BATCH = 256
_SETTLED_AFTER_NS = 200_000_000
"""Time after the call, once a sample has shown the lock in effect. Samples count from the instant on that they show for
certain: one of a clock that the driver keeps may be older than the call."""
_IN_EFFECT_AFTER_NS = 1_000_000_000
"""Time after the call at which a lock counts as in effect without a sample: up to half a second has been published."""
_NUM_ABOVE_IS_FOREIGN = 10
"""Consecutive samples: 1 s at the default period."""
_BELOW_MHZ = 60
"""Distance below our lock at which another lock must be the cause; GPUs lower clocks by some steps without a reason."""
_NUM_BELOW_IS_FOREIGN = 20


class SampleBatch:
    """Collects samples until the next batch is due; on any thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._samples: list[GpuSample] = []
        self._sent_ns = 0

    def add(self, samples: Sequence[GpuSample]) -> tuple[GpuSample, ...]:
        """Add samples; return the batch when it is due, otherwise nothing."""
        with self._guard:
            self._samples += samples
            now_ns = time.monotonic_ns()
            if now_ns - self._sent_ns < _SEND_PERIOD_NS and len(self._samples) < _MAX_BATCH:
                return ()
            batch, self._samples = tuple(self._samples), []
            self._sent_ns = now_ns
            return batch


@dataclass(slots=True)
class _WatchedLock:
    """One GPU's lock: whether a sample has shown it in effect, and the number of samples above and below it since."""

    lock: ClockLock
    has_been_seen: bool = False
    num_above: int = 0
    num_below: int = 0


class ForeignChangeDetector:
    """Detects that another program replaced our clock lock.

    The clock stays above it for consecutive samples, or stays below it although the driver names no reason.
    """

    def __init__(self) -> None:
        self._watched: dict[str, _WatchedLock] = {}

    def is_detected(self, sample: GpuSample, lock: ClockLock | None) -> bool:
        """Return, once per lock, whether this sample proves that our lock is no longer in force."""
        if lock is None:
            self._watched.pop(sample.gpu_uuid, None)
            return False
        watched = self._watched.get(sample.gpu_uuid)
        if watched is None or watched.lock != lock:
            watched = self._watched[sample.gpu_uuid] = _WatchedLock(lock)
        passed_ns = sample.read_mono_ns - sample.clock_age_ns - lock.returned_mono_ns
        if passed_ns <= 0 or sample.sm_clock_mhz is None:
            return False
        above_mhz = sample.sm_clock_mhz - lock.sm_clock_mhz
        if above_mhz <= SAME_CLOCK_MHZ:
            watched.has_been_seen |= above_mhz >= -SAME_CLOCK_MHZ
            watched.num_above = 0
        elif passed_ns > (_SETTLED_AFTER_NS if watched.has_been_seen else _IN_EFFECT_AFTER_NS):
            watched.num_above += 1
        is_below = above_mhz < -_BELOW_MHZ and watched.has_been_seen and sample.is_clock_limited is False
        watched.num_below = watched.num_below + 1 if is_below else 0
        return watched.num_above == _NUM_ABOVE_IS_FOREIGN or watched.num_below == _NUM_BELOW_IS_FOREIGN
