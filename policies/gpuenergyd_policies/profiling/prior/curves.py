"""The Bayesian curve model: time and power of every instruction class over the clock, shared across stages and kinds.

Theory of operation. Relative to full speed, log time and log power are a mean shape (see `shape`) plus deviations of
the job, of the kind, of the stage and of the class, smooth in the clock and zero at the maximum, plus a deviation of
each single clock. All are Gaussian. Times of instructions observe log time directly; the energy of a GPU in an
iteration observes a weighted mean of log powers, linearized at the present estimate. So the posterior is exact linear
algebra.

The sizes of the deviations of the job, of its stages and of single clocks are multiplied by factors, those under which
the measurements so far are most probable: a prior that was too sure of itself is thereby widened, and stages that
differ are pooled less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from gpuenergyd_policies.profiling.prior.shape import Coefficients, FloatArray, features

IntArray = NDArray[np.int64]


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
    single_clock: float


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
    single_clock=0.002,
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
    single_clock=0.003,
)
"""Instructions of a kind differ little between stages of equal layers; single clocks scatter by 0.2 to 0.4 % in
repeated measurements; a bend is known as well as the SM clock is read (steps of 15 MHz are 1 %)."""
_LENGTH = 0.15
"""Length scale of smooth deviations, in log clock: about a tenth of the range from a bend to a voltage knee."""
JOB_FACTORS = (1.0, 2.0, 4.0)
STAGE_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
SINGLE_FACTORS = (1.0, 2.0, 4.0)
_BEND_EFFECT = 0.03
"""Distance below a bend, in log clock, from which on its whole shift counts."""
_LOG_FACTOR_SIGMA = 0.7
"""Of the factors on deviations: a factor of 4 must make the measurements seven times as probable."""


@dataclass(frozen=True, slots=True)
class Points:
    """Points of curves: each a class at a clock. Arrays of one length."""

    stage: IntArray
    kind: IntArray
    clock_mhz: FloatArray
    full_speed_mhz: FloatArray
    max_mhz: FloatArray

    @property
    def shape(self) -> FloatArray:
        """The features of the mean shape."""
        return features(self.clock_mhz, self.full_speed_mhz, self.max_mhz)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measured log ratios: `values = weights @ curve + noise`, with the covariance of the noise."""

    weights: FloatArray
    values: FloatArray
    noise: FloatArray


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors on the assumed deviations of a job from the prior, of its stages, and of single clocks."""

    job: float = 1.0
    stage: float = 1.0
    single: float = 1.0


@dataclass(frozen=True, slots=True)
class Posterior:
    """Gaussian belief about a curve at points, with the factors that it was found with."""

    mean: FloatArray
    sigma: FloatArray
    factors: Factors
    covariance: FloatArray | None
    """None unless asked for: it takes most of the time."""
    explained: FloatArray
    """The misfit of the evidence from the prior, weighted by its precision."""
    evidence_score: float
    """Log probability of the evidence under the prior with these factors, up to a constant."""


@dataclass(frozen=True, slots=True)
class CurveModel:
    """The prior of one curve, time or power, as a Gaussian process over points."""

    prior: Coefficients
    deviations: Deviations
    are_pooled: bool = True
    """Whether classes share deviations; without, every class is on its own, for comparison."""
    can_widen: bool = True
    """Whether factors are estimated; without, all are 1, for comparison."""

    def posterior(
        self, wanted: Points, observed: Points, evidence: Evidence, *, want_covariance: bool = False
    ) -> Posterior:
        """Return the belief about the curve at the wanted points, given evidence on the observed ones."""
        parts = [evidence.weights @ part @ evidence.weights.T for part in self._parts(observed, observed)]
        misfit = evidence.values - evidence.weights @ self._mean(observed)
        factors = _most_probable(parts, misfit, evidence.noise) if self.can_widen else Factors()
        across = _scaled(self._parts(wanted, observed), factors) @ evidence.weights.T
        root = _root(_scaled(parts, factors) + evidence.noise)
        solved = np.linalg.solve(root, across.T)
        white = np.linalg.solve(root, misfit)
        mean = self._mean(wanted) + solved.T @ white
        explained: FloatArray = np.asarray(np.linalg.solve(root.T, white), dtype=np.float64)
        score = -0.5 * float(white @ white) - float(np.log(np.diag(root)).sum())
        if not want_covariance:
            variance = self._variances(wanted, factors) - np.sum(np.square(solved), axis=0)
            return Posterior(mean, np.sqrt(np.maximum(variance, 0.0)), factors, None, explained, score)
        covariance = _scaled(self._parts(wanted, wanted), factors) - solved.T @ solved
        sigma = np.sqrt(np.maximum(np.diag(covariance), 0.0))
        return Posterior(mean, sigma, factors, covariance, explained, score)

    def _mean(self, points: Points) -> FloatArray:
        return np.asarray(points.shape @ np.array(self.prior.mean), dtype=np.float64)

    def _parts(self, a: Points, b: Points) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return the covariances of the deviations of job, stages, single clocks, and all others between points."""
        own = self.deviations
        same_stage = a.stage[:, None] == b.stage[None, :]
        same_kind = a.kind[:, None] == b.kind[None, :]
        same_class = same_stage & same_kind
        at_a, at_b = a.shape, b.shape
        along_a, along_b = at_a[:, 0] + at_a[:, 2], at_b[:, 0] + at_b[:, 2]
        near = np.exp(-0.5 * np.square((along_a[:, None] - along_b[None, :]) / _LENGTH))
        smooth = near * np.outer(along_a, along_b)
        shifted = np.outer(_below_bend(at_a), _below_bend(at_b))
        level = 1.0 if own.level_kind else np.outer(a.clock_mhz < a.max_mhz, b.clock_mhz < b.max_mhz)
        job = _product(at_a, at_b, self.prior.sigma) + own.smooth_job**2 * smooth + own.cap_job**2 * shifted
        kind = same_kind * (_product(at_a, at_b, own.kind) + own.smooth_kind**2 * smooth + own.level_kind**2)
        if not self.are_pooled:
            job, kind = job * same_class, kind * same_class
        stage = same_stage * _product(at_a, at_b, own.stage) + same_class * (
            _product(at_a, at_b, own.instruction_class) + own.cap_class**2 * shifted
        )
        same_clock = same_class & (a.clock_mhz[:, None] == b.clock_mhz[None, :])
        single = own.single_clock**2 * (same_clock & (a.clock_mhz < a.max_mhz)[:, None])
        return job, stage, single, kind + own.level_class**2 * level * same_class

    def _variances(self, points: Points, factors: Factors) -> FloatArray:
        """Return the diagonal of the scaled sum of `_parts` of points with themselves."""
        own, at = self.deviations, points.shape
        smooth = np.square(at[:, 0] + at[:, 2])
        shifted = np.square(_below_bend(at))
        below = points.clock_mhz < points.max_mhz
        squares = np.square(at)
        job = squares @ np.square(self.prior.sigma) + own.smooth_job**2 * smooth + own.cap_job**2 * shifted
        kind = squares @ np.square(own.kind) + own.smooth_kind**2 * smooth + own.level_kind**2
        stage = squares @ (np.square(own.stage) + np.square(own.instruction_class)) + own.cap_class**2 * shifted
        level = own.level_class**2 * (np.ones_like(smooth) if own.level_kind else below)
        parts = [np.asarray(part, dtype=np.float64) for part in (job, stage, own.single_clock**2 * below, kind + level)]
        return _scaled(parts, factors)


def _scaled(parts: Sequence[FloatArray], factors: Factors) -> FloatArray:
    job, stage, single, others = parts
    return factors.job**2 * job + factors.stage**2 * stage + factors.single**2 * single + others


def _most_probable(parts: Sequence[FloatArray], misfit: FloatArray, noise: FloatArray) -> Factors:
    """Return the factors of greatest posterior probability, from a grid."""
    best, found = -np.inf, Factors()
    for job, stage, single in product(JOB_FACTORS, STAGE_FACTORS, SINGLE_FACTORS) if len(misfit) else ():
        factors = Factors(job, stage, single)
        root = _root(_scaled(parts, factors) + noise)
        white = np.linalg.solve(root, misfit)
        penalty = float(np.sum(np.square(np.log((job, stage, single))))) / (2 * _LOG_FACTOR_SIGMA**2)
        score = -0.5 * float(white @ white) - float(np.log(np.diag(root)).sum()) - penalty
        if score > best:
            best, found = score, factors
    return found


def _root(covariance: FloatArray) -> FloatArray:
    return np.asarray(np.linalg.cholesky(covariance + 1e-12 * np.eye(len(covariance))), dtype=np.float64)


def _product(at_a: FloatArray, at_b: FloatArray, sigma: Sequence[float]) -> FloatArray:
    return np.asarray((at_a * np.square(np.array(sigma))) @ at_b.T, dtype=np.float64)


def _below_bend(shape: FloatArray) -> FloatArray:
    """Return the effect on log time of a bend that is higher by 1 in log clock: 0 at the maximum, about 1 below."""
    return np.asarray(np.minimum(1.0, shape[:, 0] / _BEND_EFFECT), dtype=np.float64)
