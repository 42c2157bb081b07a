"""Curves of time and power over the SM clock by few coefficients, and the prior belief about these coefficients.

Relative to full speed, log time and log power of an instruction are, at a requested clock f,

    c1 x + c2 x^2 + c3 w        x = log(f_full / f) below f_full, else 0;   w = log(f_max / max(f, f_full))

where f_full is the SM clock that the GPU really runs the instruction at when the maximum is requested: below f_max, it
is under a power cap, and clocks between f_full and f_max change little. The clock fluctuates around a cap, which rounds
the bend. For time c1 is the share of the time that scales with the clock (0: bound by memory, 1: by the SMs).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

BEND_WIDTH = 0.02
"""Half width of a bend in log clock: the clock of a GPU under a power cap moves by a few of its 15 MHz steps."""


def features(sm_clocks_mhz: FloatArray, full_speed_mhz: FloatArray, max_mhz: FloatArray) -> FloatArray:
    """Return (x, x^2, w) for each clock, all zero at the maximum clock, shape (n, 3)."""
    width = np.minimum(BEND_WIDTH, 0.5 * np.log(max_mhz / full_speed_mhz))
    x = _softened(np.log(full_speed_mhz / sm_clocks_mhz), width)
    x = x - _softened(np.log(full_speed_mhz / max_mhz), width)
    w = np.log(max_mhz / np.maximum(sm_clocks_mhz, full_speed_mhz))
    return np.stack([x, x * x, w], axis=-1)


def _softened(values: FloatArray, width: FloatArray) -> FloatArray:
    """Return max(0, values) with a rounded bend; sharp where the width is 0."""
    safe = np.maximum(width, 1e-9)
    return np.where(width > 0, safe * np.logaddexp(0.0, values / safe), np.maximum(0.0, values))


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Gaussian belief about the coefficients of one curve: means and standard deviations."""

    mean: tuple[float, float, float]
    sigma: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class CurvePrior:
    """What is known of a job's curves before it runs, and where it comes from."""

    time: Coefficients
    power: Coefficients
    basis: str


GENERIC = CurvePrior(
    # A share k that scales with the clock: log(1 - k + k e^x) = k x + k (1 - k) x^2 / 2 + ...; k = 0.85 +- 0.15.
    time=Coefficients((0.85, 0.06, 0.0), (0.15, 0.10, 0.05)),
    # 15 % static power and voltage falling with the clock down to a knee: slope 1.6 +- 0.5, less below the knee.
    # Under a cap the power stays the same, unless the measured mean over an instruction stays below the cap.
    power=Coefficients((-1.6, 0.7, -0.3), (0.5, 0.7, 0.5)),
    basis="generic physics: roofline time, voltage that falls with the clock down to a knee",
)
"""For a GPU model of which nothing is known."""

_PSEUDO_FAMILIES = 2.0
"""Weight of the generic spread in families of models: two or three families say little about their spread."""
_SPREAD_WITHIN_MODEL = (np.array([0.08, 0.08, 0.03]), np.array([0.25, 0.4, 0.3]))
"""Spread assumed among jobs on one GPU model, for time and power: half of the generic one."""


def pooled(curves: Sequence[tuple[Sequence[float], Sequence[float]]], *, basis: str) -> CurvePrior:
    """Return the prior from (time, power) coefficients of other jobs on the same GPU model; GENERIC without any.

    The spread among jobs is estimated from them with that assumed as two further ones, and the mean is uncertain too.
    """
    if not curves:
        return GENERIC
    found = []
    for k, generic in enumerate((GENERIC.time, GENERIC.power)):
        own = np.array([pair[k] for pair in curves], dtype=np.float64)
        center = own.mean(axis=0)
        squares = np.square(own - center).sum(axis=0) + _PSEUDO_FAMILIES * np.square(_SPREAD_WITHIN_MODEL[k])
        spread = np.sqrt(squares / (len(own) - 1 + _PSEUDO_FAMILIES) * (1 + 1 / len(own)))
        sigma = np.minimum(spread, 2 * np.array(generic.sigma))
        found.append(Coefficients(_triple(center), _triple(sigma)))
    return CurvePrior(found[0], found[1], basis)


def _triple(values: FloatArray) -> tuple[float, float, float]:
    a, b, c = (float(v) for v in values)
    return a, b, c
