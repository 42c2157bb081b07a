"""What was used, and how well that is known: measured, estimated and missing apart, and what it costs."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpuenergyd.report.formatting import JOULES_PER_KWH
from gpuenergyd.report.tariff import Tariff
from gpuenergyd.store.reading.energy_sums import EnergySum


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """A sum over pieces of the ledger; an energy or a cost is None where there is nothing to add up, never 0."""

    energy_j: float | None = None
    """Measured."""
    estimated_j: float | None = None
    """Estimated from power, or from what the counter said after a gap; not part of `energy_j`."""
    measured_s: float = 0.0
    estimated_s: float = 0.0
    missing_s: float = 0.0
    """GPU time of which nothing is known: its energy is in no sum."""
    cost: float | None = None
    """Of measured and estimated energy, in the currency of the tariff."""

    def plus(self, part: EnergySum, tariff: Tariff | None = None) -> "EnergyUse":
        """Return the sum with one more part in it, priced at the hour in which the part begins."""
        used_j = added(part.energy_j, part.estimated_j)
        cost = None
        if tariff is not None and used_j is not None:
            cost = used_j / JOULES_PER_KWH * tariff.price_per_kwh(part.started_at or datetime.now(tz=UTC))
        return EnergyUse(
            added(self.energy_j, part.energy_j),
            added(self.estimated_j, part.estimated_j),
            self.measured_s + part.measured_s,
            self.estimated_s + part.estimated_s,
            self.missing_s + part.missing_s,
            added(self.cost, cost),
        )

    def figures(self) -> dict[str, Any]:
        """Return energies and durations by name, the cost apart."""
        names = ("energy_j", "estimated_j", "measured_s", "estimated_s", "missing_s")
        return {name: getattr(self, name) for name in names}


NOTHING_USED = EnergyUse()


def added(total: float | None, more: float | None) -> float | None:
    """Return a sum in which nothing known stays nothing known."""
    return total if more is None else (total or 0.0) + more
