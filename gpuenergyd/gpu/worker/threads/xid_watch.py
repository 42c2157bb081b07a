"""The thread that waits for critical errors of the GPUs (Xid) and says what each means for its GPU."""

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.link.messages import GpuHealth

_WAIT_S = 1.0
_PAUSE_AFTER_FAILURE_S = 5.0
_LOST = frozenset({79, 119, 120})
"""Fallen off the bus; the GPU's system processor does not answer."""
_APPLICATION = frozenset({13, 31, 43, 45, 68, 69, 94})
"""A program did something wrong; the GPU is fine."""


@runtime_checkable
class XidSource(Protocol):
    """A driver that reports critical errors."""

    def await_xid(self, timeout_s: float) -> tuple[str, int] | None:
        """Return the next one (GPU, number), or None."""
        ...


def health_after_xid(xid: int) -> GpuHealth | None:
    """Return what a critical error says about its GPU; None when it says nothing."""
    if xid in _LOST:
        return GpuHealth.LOST
    return None if xid in _APPLICATION else GpuHealth.DEGRADED


def watch_xids(source: XidSource, on_health: Callable[[str, GpuHealth, str], None]) -> None:
    """Start to wait; ends with the process."""

    def run() -> None:
        pause = threading.Event()
        while True:
            try:
                event = source.await_xid(_WAIT_S)
            except GpuEnergyError:
                pause.wait(_PAUSE_AFTER_FAILURE_S)
                continue
            if event is not None and (health := health_after_xid(event[1])) is not None:
                on_health(event[0], health, f"the driver reported Xid {event[1]}")

    threading.Thread(target=run, name="xid watch", daemon=True).start()
