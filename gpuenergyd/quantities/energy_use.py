"""The definitions of energy, cost and emissions that all reports use; see docs/reference/quantities.md."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from gpuenergyd.quantities.rates import Rates
from gpuenergyd.store.reading.energy_sums import EnergySum


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """A sum of energy with its cost and emissions; a value is None, not 0, if there was nothing to sum."""

    energy_j: float | None = None
    """Measured energy of GPUs, within iterations and between them."""
    estimated_j: float | None = None
    """Energy of GPUs that was estimated from power, or from the counter after a gap; not included in `energy_j`."""
    measured_s: float = 0.0
    estimated_s: float = 0.0
    missing_s: float = 0.0
    """GPU time without readings; its energy is unknown and in no sum."""
    cost: float | None = None
    """The cost of the measured and estimated energy of GPUs, in the currency of the tariff, including PUE."""
    assumed_host_j: float | None = None
    """Energy assumed for the rest of the hosts (`carbon_host_power_w`): counted in emissions, not in energy or cost."""
    carbon_g: float | None = None
    """Emissions of measured, estimated and assumed energy while intensity was known, location-based, including PUE."""
    estimated_carbon_g: float | None = None
    """The part of `carbon_g` that comes from estimated energy of GPUs."""
    priced_j: float | None = None
    unpriced_j: float | None = None
    """Measured and estimated energy of GPUs while carbon intensity was known, and while it was unknown."""
    measured_intensity_j: float | None = None
    """The part of `priced_j` for which carbon intensity was measured; else it was estimated, forecast or fixed."""

    def plus(self, part: EnergySum, rates: Rates | None = None) -> "EnergyUse":
        """Return the sum with the energy of one more part, priced at the time of that part."""
        return self.with_use(use_of(part, rates or Rates()))

    def with_use(self, other: "EnergyUse") -> "EnergyUse":
        """Return the sum of two uses."""
        return EnergyUse(*(_sum_of_values(getattr(self, name), getattr(other, name)) for name in _NAMES))

    @property
    def used_j(self) -> float | None:
        """Measured and estimated energy of GPUs, for which cost and emissions are computed."""
        return add_known(self.energy_j, self.estimated_j)

    @property
    def gpu_time_s(self) -> float:
        """GPU time with measured, estimated or missing energy."""
        return self.measured_s + self.estimated_s + self.missing_s

    def host_power_w(self, num_gpus: int) -> float | None:
        """Return the mean power assumed for the rest of the hosts of this many GPUs; None if none was assumed."""
        if self.assumed_host_j is None or not self.gpu_time_s:
            return None
        return self.assumed_host_j / self.gpu_time_s * num_gpus

    def to_dict(self) -> dict[str, Any]:
        """Return energies and durations by name, without cost and emissions."""
        names = ("energy_j", "estimated_j", "measured_s", "estimated_s", "missing_s")
        return {name: getattr(self, name) for name in names}

    def carbon_to_dict(self) -> dict[str, Any]:
        """Return emissions, and how much energy they include and leave out, by JSON and CSV name."""
        return {
            "carbon_g": self.carbon_g,
            "estimated_carbon_g": self.estimated_carbon_g,
            "priced_energy_j": self.priced_j,
            "unpriced_energy_j": self.unpriced_j,
            "assumed_host_j": self.assumed_host_j,
        }


_NAMES = tuple(field.name for field in fields(EnergyUse))
NO_ENERGY = EnergyUse()


def use_of(part: EnergySum, rates: Rates) -> EnergyUse:
    """Return a part of attributed energy with its cost and emissions."""
    used_j, host_j = add_known(part.energy_j, part.estimated_j), rates.assumed_host_j(part)
    priced: dict[str, float | None] = {}
    if rates.intensities:
        mean = rates.intensity(part)
        known_ratio = mean.known_ratio if mean is not None else 0.0
        if used_j is not None:
            priced = {"priced_j": known_ratio * used_j, "unpriced_j": (1.0 - known_ratio) * used_j}
        if mean is not None:
            all_j = add_known(used_j, host_j)
            priced["carbon_g"] = None if all_j is None else rates.emissions_g(all_j, mean)
            estimated_j = part.estimated_j
            priced["estimated_carbon_g"] = None if estimated_j is None else rates.emissions_g(estimated_j, mean)
            priced["measured_intensity_j"] = None if used_j is None else mean.measured_ratio * used_j
    return EnergyUse(
        energy_j=part.energy_j,
        estimated_j=part.estimated_j,
        measured_s=part.measured_s,
        estimated_s=part.estimated_s,
        missing_s=part.missing_s,
        cost=None if used_j is None else rates.cost(part, used_j),
        assumed_host_j=host_j,
        **priced,
    )


def sum_of(uses: Iterable[EnergyUse]) -> EnergyUse:
    """Return the sum of several energy uses; a value that is missing in all of them is missing in the sum."""
    total = NO_ENERGY
    for use in uses:
        total = total.with_use(use)
    return total


def add_known(total: float | None, more: float | None) -> float | None:
    """Return the sum of two values, either of which may be missing."""
    return total if more is None else (total or 0.0) + more


def _sum_of_values(total: Any, more: Any) -> Any:
    return total if more is None else more if total is None else total + more
