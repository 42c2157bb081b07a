"""Xid watch: the thread that waits for critical GPU errors (Xid) and derives the GPU's health from them."""

import threading
from collections.abc import Callable

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.device import HasErrorEvents
from gpuenergyd.gpu.link.messages import GpuHealth

_WAIT_S = 1.0
_PAUSE_AFTER_FAILURE_S = 5.0
_LOST = frozenset({79, 119, 120})
"""Fallen off the bus; the GPU system processor does not respond."""
_APPLICATION = frozenset({13, 31, 43, 45, 68, 69, 94})
"""Errors of an application; the GPU is healthy."""


def health_after_xid(xid: int) -> GpuHealth | None:
    """Return the health that an Xid implies for its GPU; None for errors of an application."""
    if xid in _LOST:
        return GpuHealth.LOST
    return None if xid in _APPLICATION else GpuHealth.DEGRADED


def watch_xids(source: HasErrorEvents, on_health: Callable[[str, GpuHealth, str], None]) -> threading.Event:
    """Start a daemon thread that reports the health after each Xid; setting the returned event ends it."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            try:
                event = source.await_xid(_WAIT_S)
            except GpuEnergyError:
                stop.wait(_PAUSE_AFTER_FAILURE_S)
                continue
            if event is not None and (health := health_after_xid(event[1])) is not None:
                on_health(event[0], health, f"the driver reported Xid {event[1]}")

    threading.Thread(target=run, name="xid watch", daemon=True).start()
    return stop
