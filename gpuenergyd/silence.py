"""How long another process has been silent, not counting its waits for a CPU, so that a busy host is tolerated."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_NS_PER_S = 1e9
_WAIT_READ_EVERY_S = 1.0


def cpu_wait_s(pid: int) -> float:
    """Return the total time that the main thread of a process has waited for a CPU; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / _NS_PER_S
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(slots=True)
class Silence:
    """How long a process has been silent, not counting the time that it waited for a CPU.

    A process that hangs, is stopped or loops does not wait for a CPU. At least 1/`max_ratio` of the time is always
    counted, so that such a process is detected on a busy host, too.
    """

    pid: int | None
    """Process id; None or 0 if unknown, and then all time is counted."""
    max_ratio: float = 6.0
    monotonic_s: Callable[[], float] = time.monotonic
    cpu_wait_s: Callable[[int], float] = cpu_wait_s
    _began_s: float = field(init=False)
    _waited_before_s: float = field(init=False, default=0.0)
    _read_at_s: float = field(init=False, default=float("-inf"))

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Restart the count, because the process has just been heard."""
        self._began_s = self.monotonic_s()
        if self._began_s - self._read_at_s >= _WAIT_READ_EVERY_S:  # cheap for each of many messages
            self._read_at_s, self._waited_before_s = self._began_s, self._waited_s()

    def left_s(self, limit_s: float) -> float:
        """Return how much longer the process may be silent; not positive if that was too long."""
        elapsed_s = self.monotonic_s() - self._began_s
        if elapsed_s < limit_s:
            return limit_s - elapsed_s
        waited_s = self._waited_s() - self._waited_before_s
        return limit_s - max(elapsed_s - waited_s, elapsed_s / self.max_ratio)

    def _waited_s(self) -> float:
        return self.cpu_wait_s(self.pid) if self.pid else 0.0
