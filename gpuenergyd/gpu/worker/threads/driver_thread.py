"""Base of the threads that call the driver: can be watched, woken, closed, and abandoned when a call hangs.

A thread inside a driver call that does not return cannot be interrupted. So it is abandoned with that GPU, and its
supervisor starts a successor for the other GPUs. If the call returns after all, the thread reports it and ends.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class CallInProgress:
    """The driver call that a thread is in, for its supervisor."""

    gpu_uuid: str | None = None
    since_mono_ns: int = 0

    def begin(self, gpu_uuid: str) -> None:
        """Mark the begin of a call for this GPU; with an empty UUID it is not supervised."""
        self.since_mono_ns, self.gpu_uuid = time.monotonic_ns(), gpu_uuid

    def end(self) -> None:
        """Mark the return of the call."""
        self.gpu_uuid = None


class DriverThread(ABC):
    """A thread that runs `_work` until `_is_closing`; `_wakeup` guards all state shared with it.

    `on_returned` gets, on this thread, the GPU whose call returned after the thread was abandoned.
    """

    def __init__(self, name: str, *, on_returned: Callable[[str], None]) -> None:
        self.call = CallInProgress()
        self._wakeup = threading.Condition()
        self._is_closing = False
        self._on_returned = on_returned
        self._stuck_gpu_uuid: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Have the thread finish its tasks and end; wait `timeout_s` for that."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        """Whether the thread has started and not ended."""
        return self._thread.is_alive()

    @abstractmethod
    def _work(self) -> None:
        """Do the thread's work; must return soon after `_is_closing` is set."""

    def _abandon(self, stuck_gpu_uuid: str) -> None:
        """Leave the thread with the GPU it is stuck on; the caller holds `_wakeup`."""
        self._stuck_gpu_uuid = stuck_gpu_uuid
        self._is_closing = True

    def _run(self) -> None:
        self._work()
        if self._stuck_gpu_uuid is not None:
            self._on_returned(self._stuck_gpu_uuid)
