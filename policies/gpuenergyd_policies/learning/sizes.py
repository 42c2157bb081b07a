"""Sizes of deviations, estimated from a job's own evidence.

The deviations of the job, of its stages and of single clocks are multiplied by factors, those under which the
measurements so far are most probable: a prior that was too sure of itself is thereby widened, and stages that differ
are pooled less. Deviations of single clocks have a variance of their own each besides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuenergyd_policies.learning.shape import FloatArray
from gpuenergyd_policies.learning.single_clocks import SingleClocks, solved

_STEPS = {
    "job": (1.0, 1.4, 2.0, 2.8, 4.0),
    "stage": (0.5, 1.0, 2.0, 4.0, 8.0),
    "single_class": (0.5, 1.0, 2.0, 4.0),
    "single_kind": (0.25, 0.5, 1.0, 2.0, 4.0),
}
"""Factors that are tried."""
_ROUNDS = 2
"""Of the search for factors, one after the other; and of that for the variances of single clocks."""
_LOG_FACTOR_SIGMA = 0.7
"""Of the factors on deviations: a factor of 4 must make the measurements seven times as probable."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors on the assumed deviations of a job from the prior, of its stages, and of single clocks."""

    job: float
    stage: float
    single_class: float
    single_kind: float

    @classmethod
    def assumed(cls) -> "Factors":
        """Return the factors without any evidence."""
        return cls(1.0, 1.0, 1.0, 1.0)

    @property
    def log_penalty(self) -> float:
        """How improbable these factors are beforehand."""
        logs = np.log([self.job, self.stage, self.single_class, self.single_kind])
        return float(np.sum(np.square(logs))) / (2 * _LOG_FACTOR_SIGMA**2)

    def scaled(self, smooth: Sequence[FloatArray]) -> FloatArray:
        """Return the sum of the covariances of job, stages, bends and others."""
        job, stage, bends, others = smooth
        return self.job**2 * job + self.stage**2 * stage + min(self.stage, 1.0) ** 2 * bends + others


@dataclass(frozen=True, slots=True)
class Sized:
    """Evidence with the sizes of the deviations that explain it."""

    smooth: tuple[FloatArray, ...]
    """Covariances of the evidence by the smooth deviations of job, stages, bends and others."""
    noise: FloatArray
    misfit: FloatArray
    """Of the evidence from the mean shape."""
    singles: tuple[SingleClocks, ...]
    """Deviations of single clocks, of classes and of kinds."""
    scales: tuple[float, float]
    """Of these, before factors."""
    factors: Factors

    def with_best_sizes(self) -> "Sized":
        """Return the evidence with its most probable factors and variances of single clocks."""
        found = self.with_best_factors()
        for _ in range(_ROUNDS):
            found = found.with_better_variances()
        return found.with_best_factors()

    def root(self) -> FloatArray:
        """Return the Cholesky root of the covariance of the evidence."""
        return self._root([own.of_evidence() for own in self.singles], self.factors)

    def score(self) -> float:
        """Return the log probability of the evidence, up to a constant."""
        return self._score(self.root())

    def across(self) -> FloatArray:
        """Return the covariance of wanted points with the evidence by deviations of single clocks."""
        return self._sum([own.across() for own in self.singles])

    def among_wanted(self) -> FloatArray:
        """Return the covariance of deviations of single clocks among wanted points."""
        return self._sum([own.among_wanted() for own in self.singles])

    @property
    def _factored_scales(self) -> tuple[float, float]:
        return self.scales[0] * self.factors.single_class, self.scales[1] * self.factors.single_kind

    def _sum(self, of_singles: Sequence[FloatArray]) -> FloatArray:
        of_class, of_kind = (scale**2 * own for scale, own in zip(self._factored_scales, of_singles, strict=True))
        return of_class + of_kind

    def _root(self, of_singles: Sequence[FloatArray], factors: Factors) -> FloatArray:
        by_class, by_kind = self.scales[0] * factors.single_class, self.scales[1] * factors.single_kind
        covariance = factors.scaled(self.smooth) + self.noise + by_class**2 * of_singles[0] + by_kind**2 * of_singles[1]
        covariance.ravel()[:: len(covariance) + 1] += 1e-12
        return np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)

    def _score(self, root: FloatArray) -> float:
        white = solved(root, self.misfit)
        return -0.5 * float(white @ white) - float(np.log(np.diag(root)).sum())

    def with_better_variances(self) -> "Sized":
        """Return the evidence with more probable variances of single clocks."""
        root = self.root()
        white = solved(root, self.misfit)
        better = [
            own.with_better_variances(root, white, scale)
            for own, scale in zip(self.singles, self._factored_scales, strict=True)
        ]
        return replace(self, singles=tuple(better))

    def with_best_factors(self) -> "Sized":
        """Return the evidence with the most probable factors, found by coordinate ascent."""
        of_singles = [own.of_evidence() for own in self.singles]
        scores: dict[Factors, float] = {}
        best = self.factors
        for _ in range(_ROUNDS):
            for name, steps in _STEPS.items():
                tried = [replace(best, **{name: step}) for step in steps]
                for factors in tried:
                    if factors not in scores:
                        scores[factors] = self._score(self._root(of_singles, factors)) - factors.log_penalty
                best = max(tried, key=scores.__getitem__)
        return replace(self, factors=best)
