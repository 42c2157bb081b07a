"""A thread that calls the driver and may never come back: it can be watched, woken, closed and abandoned.

When a driver call does not return, nothing can take its thread back. So the thread is left alone with that GPU, and
whoever watches starts a successor for the other GPUs. If the call returns after all, the thread says so and ends.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class DriverCall:
    """The call that a thread is inside of, for whoever watches over it."""

    gpu_uuid: str | None = None
    since_mono_ns: int = 0

    def begin(self, gpu_uuid: str) -> None:
        """Note that a call for this GPU begins; without a name ("") nobody watches it."""
        self.since_mono_ns, self.gpu_uuid = time.monotonic_ns(), gpu_uuid

    def end(self) -> None:
        """Note that it has returned."""
        self.gpu_uuid = None


class DriverThread(ABC):
    """One such thread. `_work` runs on it until `_is_closing`; all state shared with it is guarded by `_wakeup`.

    `on_returned` gets, on this thread, the GPU whose call came back after the thread was abandoned.
    """

    def __init__(self, name: str, *, on_returned: Callable[[str], None]) -> None:
        self.call = DriverCall()
        self._wakeup = threading.Condition()
        self._is_closing = False
        self._on_returned = on_returned
        self._stuck_gpu_uuid: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Have the thread finish what was given to it and end; wait so long for that."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        """Whether the thread has begun and not ended."""
        return self._thread.is_alive()

    @abstractmethod
    def _work(self) -> None:
        """Return soon after `_is_closing`."""

    def _abandon(self, stuck_gpu_uuid: str) -> None:
        """Leave the thread alone with a GPU; the caller holds `_wakeup`."""
        self._stuck_gpu_uuid = stuck_gpu_uuid
        self._is_closing = True

    def _run(self) -> None:
        self._work()
        if self._stuck_gpu_uuid is not None:
            self._on_returned(self._stuck_gpu_uuid)
