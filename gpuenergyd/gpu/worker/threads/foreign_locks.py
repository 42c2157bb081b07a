"""Seeing that somebody else unlocked a GPU: its clock stays above our lock. Pure; told samples and what we locked."""

from gpuenergyd.gpu.link.messages import GpuSample

_CLOCK_TOLERANCE_MHZ = 16
_SETTLED_AFTER_NS = 200_000_000
_NUM_ABOVE_IS_FOREIGN = 10
"""Samples in a row: 0.2 s at the usual period."""


class ForeignLocks:
    """How often in a row each GPU was seen above our lock."""

    def __init__(self) -> None:
        self._num_above: dict[str, int] = {}

    def forget(self, gpu_uuid: str) -> None:
        """Begin anew with a GPU: it has a new lease."""
        self._num_above[gpu_uuid] = 0

    def shows(self, sample: GpuSample, lock: tuple[int, int] | None) -> bool:
        """Return, once, whether it is certain by now that the lock is no longer ours.

        `lock` is the clock we set in MHz and the monotonic instant in ns at which that call returned.
        """
        is_above = (
            lock is not None
            and sample.sm_clock_mhz is not None
            and sample.sm_clock_mhz > lock[0] + _CLOCK_TOLERANCE_MHZ
            and sample.read_mono_ns > lock[1] + _SETTLED_AFTER_NS
        )
        self._num_above[sample.gpu_uuid] = self._num_above.get(sample.gpu_uuid, 0) + 1 if is_above else 0
        return self._num_above[sample.gpu_uuid] == _NUM_ABOVE_IS_FOREIGN
