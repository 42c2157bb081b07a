"""Time and energy of GPUs by use, since the daemon started and since they were last stored."""

from collections import defaultdict
from dataclasses import dataclass, field, fields

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
        for total in (self.by_use[idle.use], self._unstored[idle.use]):
            total.time_s += passed_s
            total.energy_j += passed_s * (power_w or 0.0)
            if idle.acts:
                total.lowered_s += lowered_s
            else:
                total.could_lower_s += lowered_s

    def pop_unstored(self) -> dict[GpuUse, UseTotal]:
        """Return what was counted since the last call."""
        taken, self._unstored = dict(self._unstored), defaultdict(UseTotal)
        return taken

    def put_back(self, use: GpuUse, taken: UseTotal) -> None:
        """Count again what was taken and could not be stored."""
        total = self._unstored[use]
        for own in fields(UseTotal):
            setattr(total, own.name, getattr(total, own.name) + getattr(taken, own.name))
