"""How the curves of one job may deviate from the mean shape: by job, kind, stage, class and single clock.

Deviations are Gaussian with zero mean, zero at full speed, and smooth in the clock but for those of single clocks, of
which a few are far larger than the others. Of these a part is the same in all stages, which run the same kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gpuenergyd_policies.learning.shape import FloatArray, features

IntArray = NDArray[np.int64]
SmoothParts = tuple[FloatArray, FloatArray, FloatArray, FloatArray]


@dataclass(frozen=True, slots=True)
class Deviations:
    """Standard deviations of the deviations from the mean shape; those with three values are of the coefficients."""

    kind: tuple[float, float, float]
    stage: tuple[float, float, float]
    instruction_class: tuple[float, float, float]
    smooth_job: float
    """Of the slope in log clock, by a smooth function of the clock that the whole job shares."""
    smooth_kind: float
    level_kind: float
    """At the maximum clock: 0 for times, which are measured there."""
    level_class: float
    cap_job: float
    """In log clock, of the bend of a power cap."""
    cap_class: float
    """An error of reading: smaller where stages are alike, but no larger where they differ more."""
    single_class: float
    """Scale of the deviation of a class at a single clock."""
    single_kind: float
    """Scale of that part of it that all stages share."""
    separate: tuple[float, float, float]
    """Further ones of kinds that do other work than forwards and backwards, as an optimizer bound by memory."""
    level_separate: float


TIME = Deviations(
    kind=(0.05, 0.04, 0.01),
    stage=(0.01, 0.01, 0.003),
    instruction_class=(0.012, 0.01, 0.004),
    smooth_job=0.04,
    smooth_kind=0.025,
    level_kind=0.0,
    level_class=0.001,
    cap_job=0.008,
    cap_class=0.01,
    single_class=0.001,
    single_kind=0.001,
    separate=(0.35, 0.1, 0.03),
    level_separate=0.0,
)
POWER = Deviations(
    kind=(0.1, 0.1, 0.05),
    stage=(0.02, 0.02, 0.02),
    instruction_class=(0.02, 0.02, 0.02),
    smooth_job=0.15,
    smooth_kind=0.05,
    level_kind=0.03,
    level_class=0.01,
    cap_job=0.0,
    cap_class=0.0,
    single_class=0.002,
    single_kind=0.002,
    separate=(0.5, 0.4, 0.2),
    level_separate=0.3,
)
"""Instructions of a kind differ little between stages of equal layers; single clocks scatter by 0.1 to 0.4 % in
repeated measurements; a bend is known as well as the SM clock is read (steps of 15 MHz are 1 %)."""
_LENGTH = 0.15
"""Length scale of smooth deviations, in log clock: about a tenth of the range from a bend to a voltage knee."""
_BEND_EFFECT = 0.03
"""Distance below a bend, in log clock, from which on its whole shift counts."""


@dataclass(frozen=True, eq=False)
class Points:
    """Points of curves: each a class at a clock. Arrays of one length."""

    stage: IntArray
    kind: IntArray
    clock_mhz: FloatArray
    full_speed_mhz: FloatArray
    max_mhz: FloatArray
    separate: FloatArray
    """1 for kinds that do other work than forwards and backwards, 0 for these."""

    @cached_property
    def shape(self) -> FloatArray:
        """The features of the mean shape."""
        return features(self.clock_mhz, self.full_speed_mhz, self.max_mhz)

    @cached_property
    def along(self) -> FloatArray:
        """How far each clock is below the maximum, in log clock."""
        return np.asarray(self.shape[:, 0] + self.shape[:, 2], dtype=np.float64)

    @property
    def is_below_max(self) -> FloatArray:
        """1 below the maximum clock, 0 at it."""
        return (self.clock_mhz < self.max_mhz).astype(np.float64)

    @cached_property
    def parts(self) -> dict[tuple[Deviations, Sequence[float]], SmoothParts]:
        """Covariances among these points that were computed already, by what they follow from."""
        return {}


def smooth_parts(own: Deviations, of_job: Sequence[float], a: Points, b: Points) -> SmoothParts:
    """Return the covariances of the smooth deviations of job, stages, bends and all others between points.

    `of_job` are the standard deviations of the job's coefficients.
    """
    same_stage = a.stage[:, None] == b.stage[None, :]
    same_kind = a.kind[:, None] == b.kind[None, :]
    same_class = same_stage & same_kind
    at_a, at_b = a.shape, b.shape
    smooth = closeness(a.along, b.along) * np.outer(a.along, b.along)
    shifted = np.outer(_below_bend(at_a), _below_bend(at_b))
    level = 1.0 if own.level_kind else np.outer(a.is_below_max, b.is_below_max)
    job = _product(at_a, at_b, of_job) + own.smooth_job**2 * smooth + own.cap_job**2 * shifted
    kind = same_kind * (_product(at_a, at_b, own.kind) + own.smooth_kind**2 * smooth + own.level_kind**2)
    if a.separate.any() and b.separate.any():
        both = same_kind * np.outer(a.separate, b.separate)
        kind = kind + both * (_product(at_a, at_b, own.separate) + own.level_separate**2)
    stage = same_stage * _product(at_a, at_b, own.stage) + same_class * _product(at_a, at_b, own.instruction_class)
    bends = same_class * own.cap_class**2 * shifted
    return job, stage, bends, kind + own.level_class**2 * level * same_class


def closeness(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the correlation of smooth deviations between clocks so far below the maximum."""
    return np.asarray(np.exp(-0.5 * np.square((a[:, None] - b[None, :]) / _LENGTH)), dtype=np.float64)


def _product(at_a: FloatArray, at_b: FloatArray, sigma: Sequence[float]) -> FloatArray:
    return np.asarray((at_a * np.square(np.array(sigma))) @ at_b.T, dtype=np.float64)


def _below_bend(shape: FloatArray) -> FloatArray:
    """Return the effect on log time of a bend that is higher by 1 in log clock: 0 at the maximum, about 1 below."""
    return np.asarray(np.minimum(1.0, shape[:, 0] / _BEND_EFFECT), dtype=np.float64)
