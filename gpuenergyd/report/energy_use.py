"""Measured and estimated energy, unmeasured time and cost."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpuenergyd.report.formatting import JOULES_PER_KWH
from gpuenergyd.report.tariff import Tariff
from gpuenergyd.store.reading.energy_sums import EnergySum


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """A sum of attributed energy; an energy or cost is None, never 0, if there is nothing to sum."""

    energy_j: float | None = None
    """Measured energy."""
    estimated_j: float | None = None
    """Energy estimated from power, or from the counter after a gap; not part of `energy_j`."""
    measured_s: float = 0.0
    estimated_s: float = 0.0
    missing_s: float = 0.0
    """GPU time without readings: its energy is not part of any sum."""
    cost: float | None = None
    """The cost of measured and estimated energy, in the currency of the tariff."""

    def plus(self, part: EnergySum, tariff: Tariff | None = None) -> "EnergyUse":
        """Return the sum with another part added, priced at the hour in which the part starts."""
        used_j = add_known(part.energy_j, part.estimated_j)
        cost = None
        if tariff is not None and used_j is not None:
            cost = used_j / JOULES_PER_KWH * tariff.price_per_kwh(part.started_at or datetime.now(tz=UTC))
        return EnergyUse(
            add_known(self.energy_j, part.energy_j),
            add_known(self.estimated_j, part.estimated_j),
            self.measured_s + part.measured_s,
            self.estimated_s + part.estimated_s,
            self.missing_s + part.missing_s,
            add_known(self.cost, cost),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return energies and durations by name, without the cost."""
        names = ("energy_j", "estimated_j", "measured_s", "estimated_s", "missing_s")
        return {name: getattr(self, name) for name in names}


NO_ENERGY = EnergyUse()


def sum_of(uses: Iterable[EnergyUse]) -> EnergyUse:
    """Return the sum of several energies; what is missing in all of them is missing in the sum."""
    total = NO_ENERGY
    for use in uses:
        total = EnergyUse(
            add_known(total.energy_j, use.energy_j),
            add_known(total.estimated_j, use.estimated_j),
            total.measured_s + use.measured_s,
            total.estimated_s + use.estimated_s,
            total.missing_s + use.missing_s,
            add_known(total.cost, use.cost),
        )
    return total


def add_known(total: float | None, more: float | None) -> float | None:
    """Return the sum of two values of which either may be missing."""
    return total if more is None else (total or 0.0) + more
