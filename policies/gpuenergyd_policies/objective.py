"""Costs of an iteration that weigh energy against time.

The cost of Zeus (You et al., NSDI 2023) is `eta * energy + (1 - eta) * max_power * time`: `eta` = 1 counts energy only,
0 time only. Energy-delay products are `energy * time ** exponent`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.errors import UsageError

FloatArray = NDArray[np.float64]

DEFAULT_ETA = 0.5
MAX_DELAY_EXPONENT = 8.0


@dataclass(frozen=True, slots=True)
class Objective:
    """A cost to be minimized; with `delay_exponent` an energy-delay product, else Zeus's cost."""

    eta: float = DEFAULT_ETA
    delay_exponent: float | None = None
    max_power_w: float = 0.0
    """Power that one unit of time is charged at in Zeus's cost: the GPUs' maximum."""

    def cost(self, time_s: float, energy_j: float) -> float:
        """Return the cost of an iteration: J, or J s^exponent."""
        return float(self.costs(np.array(time_s), np.array(energy_j)))

    def costs(self, times_s: FloatArray, energies_j: FloatArray) -> FloatArray:
        """Return the costs of iterations, for arrays of one shape."""
        if self.delay_exponent is not None:
            return np.asarray(energies_j * times_s**self.delay_exponent, dtype=np.float64)
        return np.asarray(self.eta * energies_j + (1 - self.eta) * self.max_power_w * times_s, dtype=np.float64)

    def __str__(self) -> str:
        """Return the cost as a formula."""
        if self.delay_exponent is not None:
            return f"energy * time^{self.delay_exponent:g}"
        return f"{self.eta:g} * energy + {1 - self.eta:g} * {self.max_power_w:.0f} W * time"


def objective_of(options: Mapping[str, str]) -> Objective:
    """Return the cost that a policy's options name.

    Raises:
        UsageError: an option is unknown or its value invalid; the message lists the valid ones.
    """
    unknown = sorted(options.keys() - {"eta", "delay_exponent"})
    if unknown:
        raise UsageError(f"policy cost has no option {unknown[0]!r}; valid are eta and delay_exponent")
    if len(options) > 1:
        raise UsageError("policy cost: give eta or delay_exponent, not both")
    if "delay_exponent" in options:
        return Objective(delay_exponent=_number(options, "delay_exponent", 0.0, MAX_DELAY_EXPONENT))
    return Objective(eta=_number(options, "eta", 0.0, 1.0) if "eta" in options else DEFAULT_ETA)


def _number(options: Mapping[str, str], name: str, low: float, high: float) -> float:
    try:
        value = float(options[name])
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise UsageError(f"policy cost: {name} = {options[name]}: must be a number from {low:g} to {high:g}")
    return value
