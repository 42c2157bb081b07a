"""Synthetic hourly carbon intensities with daily, weekly, seasonal and weather patterns, seeded."""

from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.carbon.intensity import HourlySeries

FIRST_AT = datetime(2023, 1, 1, tzinfo=UTC)


def made_up_values(num_days: int, seed: int = 0) -> NDArray[np.float64]:
    """Return values that a model can forecast better than naive rules, but not perfectly."""
    rng = np.random.default_rng(seed)
    hours = np.arange(num_days * 24)
    weather = np.zeros(len(hours))
    for k in range(1, len(hours)):
        weather[k] = 0.97 * weather[k - 1] + rng.normal(0, 0.06)
    daily = 0.25 * np.sin(2 * np.pi * hours / 24) + 0.1 * np.sin(4 * np.pi * hours / 24 + 1)
    weekend = -0.1 * ((hours // 24 + 6) % 7 >= 5)
    season = 0.1 * np.cos(2 * np.pi * hours / 8766)
    values: NDArray[np.float64] = 250 * np.exp(daily + weekend + season + weather)
    return np.minimum(values, 1500)


def made_up_trace(zone: str = "XX", num_days: int = 60, seed: int = 0) -> HourlySeries:
    """Return such values as a trace."""
    return HourlySeries(zone, FIRST_AT, values=tuple(made_up_values(num_days, seed).tolist()))
