"""Base class of the threads that call the GPU driver: they can be watched, woken and closed.

A thread inside a driver call that does not return cannot be interrupted. It works for one GPU, or leaves the others to
threads of their own as soon as a call of one takes long, so no other GPU waits for it.
"""

import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

_NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class CallInProgress:
    """The driver call that a thread is in, for its supervisor."""

    gpu_uuid: str | None = None
    since_mono_ns: int = 0

    def begin(self, gpu_uuid: str) -> None:
        self.since_mono_ns, self.gpu_uuid = time.monotonic_ns(), gpu_uuid

    def end(self) -> None:
        self.gpu_uuid = None

    def lasted_s(self, gpu_uuid: str) -> float:
        """Return how long the present call has lasted; 0 if it is none or one for another GPU."""
        present, since_ns = self.gpu_uuid, self.since_mono_ns
        return (time.monotonic_ns() - since_ns) / _NS_PER_S if present == gpu_uuid else 0.0


class DriverThread(ABC):
    """A thread that runs `_work` until `_is_closing`; `_wakeup` guards all state shared with it."""

    def __init__(self, name: str) -> None:
        self.call = CallInProgress()
        self._wakeup = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
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

    def cpu_s(self) -> float:
        """Return the CPU time that the thread has used; 0 unless it runs: asking for an ended one may crash."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident or 0)) if self.is_running else 0.0

    @abstractmethod
    def _work(self) -> None:
        """Do the thread's work; must return soon after `_is_closing` is set."""
