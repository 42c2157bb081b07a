"""A clock that moves only when told, for simulated GPUs."""

from dataclasses import dataclass


@dataclass(slots=True)
class VirtualTime:
    """Host monotonic time in a test."""

    now_ns: int = 5_000_000_000

    def mono_ns(self) -> int:
        return self.now_ns

    def sleep(self, duration_s: float) -> None:
        """Let time pass."""
        self.now_ns += round(duration_s * 1e9)
