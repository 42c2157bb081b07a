"""Time and energy of GPUs by use, since the daemon started and since they were last stored."""

from collections import defaultdict
from dataclasses import dataclass, field

from gpuenergyd_idle.rules.control import IdleGpu
from gpuenergyd_idle.rules.use import GpuUse

_LONGEST_GAP_S = 2.0


@dataclass(slots=True)
class UseTotal:
    """Time of one use, its energy where power was known, and the time that was lowered or could have been."""

    time_s: float = 0.0
    energy_j: float = 0.0
    lowered_s: float = 0.0
    could_lower_s: float = 0.0

    def add(self, other: "UseTotal") -> None:
        self.time_s += other.time_s
        self.energy_j += other.energy_j
        self.lowered_s += other.lowered_s
        self.could_lower_s += other.could_lower_s


@dataclass(slots=True)
class UseTotals:
    """Totals of one GPU by use."""

    by_use: dict[GpuUse, UseTotal] = field(default_factory=lambda: defaultdict(UseTotal))
    _unstored: dict[GpuUse, UseTotal] = field(default_factory=lambda: defaultdict(UseTotal))
    _last_s: float | None = None
    _lowered_s: float = 0.0

    def observe(self, at_s: float, power_w: float | None, idle: IdleGpu) -> None:
        """Count the time since the last reading for the present use."""
        passed_s = 0.0 if self._last_s is None else min(at_s - self._last_s, _LONGEST_GAP_S)
        lowered_s = idle.lowered_s - self._lowered_s
        self._last_s, self._lowered_s = at_s, idle.lowered_s
        low_s = (lowered_s, 0.0) if idle.acts else (0.0, lowered_s)
        new = UseTotal(passed_s, passed_s * (power_w or 0.0), *low_s)
        self.by_use[idle.use].add(new)
        self._unstored[idle.use].add(new)

    def pop_unstored(self) -> dict[GpuUse, UseTotal]:
        """Return the totals counted since the last call."""
        taken, self._unstored = dict(self._unstored), defaultdict(UseTotal)
        return taken

    def put_back(self, use: GpuUse, taken: UseTotal) -> None:
        """Count again what was taken and could not be stored."""
        self._unstored[use].add(taken)
