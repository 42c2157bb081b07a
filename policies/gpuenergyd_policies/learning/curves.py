"""The Bayesian curve model: time and power of every instruction class over the clock, shared across stages and kinds.

Theory of operation. Relative to full speed, log time and log power are a mean shape (see `shape`) plus deviations of
the job, of the kind, of the stage and of the class, smooth in the clock and zero at the maximum (see `deviations`),
plus deviations of single clocks (see `single_clocks`). Times of instructions observe log time directly; the energy of a
GPU in an iteration observes a weighted mean of log powers, linearized at the present estimate. Given the sizes of the
deviations, which are estimated too (see `sizes`), all are Gaussian, and the posterior is exact linear algebra.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gpuenergyd_policies.learning.deviations import Deviations, Points, SmoothParts, smooth_parts
from gpuenergyd_policies.learning.shape import Coefficients, FloatArray
from gpuenergyd_policies.learning.single_clocks import SingleClocks, solved
from gpuenergyd_policies.learning.sizes import Factors, Sized


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measured log ratios: `values = weights @ curve + noise`, with the covariance of the noise."""

    weights: FloatArray
    values: FloatArray
    noise: FloatArray


@dataclass(frozen=True, slots=True)
class Posterior:
    """Gaussian belief about a curve at points, with the factors that it was found with."""

    mean: FloatArray
    sigma: FloatArray
    single: FloatArray
    """The part of the mean by which single clocks were measured to be off the curve through their neighbours."""
    factors: Factors
    covariance: FloatArray
    explained: FloatArray
    """The misfit of the evidence from the prior, weighted by its precision."""


@dataclass(frozen=True, slots=True)
class CurveModel:
    """The prior of one curve, time or power, as a Gaussian process over points."""

    prior: Coefficients
    deviations: Deviations
    are_sizes_estimated: bool = True
    """Whether the sizes of deviations are those that explain the evidence best; without, the assumed ones."""

    def posterior(self, wanted: Points, observed: Points, evidence: Evidence) -> Posterior:
        """Return the belief about the curve at the wanted points, given evidence on the observed ones."""
        pairs, smooth = self._among(observed), partial(smooth_parts, self.deviations, self.prior.sigma)
        sized = self._with_sizes(wanted, observed, evidence)
        factors, root = sized.factors, sized.root()
        of_singles = sized.across()
        with_observed = pairs if wanted is observed else smooth(wanted, observed)
        across = factors.scaled(with_observed) @ evidence.weights.T + of_singles
        shares, white = solved(root, across.T), solved(root, sized.misfit)
        explained: FloatArray = np.asarray(np.linalg.solve(root.T, white), dtype=np.float64)
        mean, single = self._mean(wanted) + across @ explained, of_singles @ explained
        prior = pairs if wanted is observed else smooth(wanted, wanted)
        covariance = factors.scaled(prior) + sized.among_wanted() - shares.T @ shares
        sigma = np.sqrt(np.maximum(np.diag(covariance), 0.0))
        return Posterior(mean, sigma, single, factors, covariance, explained)

    def mean(self, observed: Points, evidence: Evidence) -> FloatArray:
        """Return the mean of the belief at the points of the evidence."""
        sized = self._with_sizes(observed, observed, evidence)
        across = sized.factors.scaled(self._among(observed)) @ evidence.weights.T + sized.across()
        root = sized.root()
        return np.asarray(self._mean(observed) + across @ np.linalg.solve(root.T, solved(root, sized.misfit)))

    def score(self, observed: Points, evidence: Evidence) -> float:
        """Return the log probability of the evidence under the prior with the best sizes, up to a constant."""
        return self._with_sizes(observed, observed, evidence).score()

    def amounts(
        self, observed: Points, evidence: Evidence, columns: FloatArray, sigma: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return amounts whose effects on the values are `columns`, and their errors; the noise contains them.

        Without any evidence they would be 0 with the standard deviations `sigma`.
        """
        sized = self._sized(observed, observed, evidence).with_best_sizes()
        root = sized.root()
        across, white = solved(root, columns * sigma), solved(root, sized.misfit)
        left = 1 - np.sum(np.square(across), axis=0)
        return np.asarray(sigma * (across.T @ white)), np.asarray(sigma * np.sqrt(np.maximum(left, 0.0)))

    def left_out(self, observed: Points, evidence: Evidence, factors: Factors) -> tuple[FloatArray, FloatArray]:
        """Return by how much each value is off what all others let expect, and the standard deviation of that.

        The sizes of deviations are the assumed ones times the factors.
        """
        sized = replace(self._sized(observed, observed, evidence), factors=factors)
        inverse = solved(sized.root(), np.eye(len(evidence.values)))
        precision = inverse.T @ inverse
        variance = 1 / np.diag(precision)
        return np.asarray(precision @ sized.misfit * variance), np.sqrt(variance)

    def _with_sizes(self, wanted: Points, observed: Points, evidence: Evidence) -> Sized:
        """Return the evidence with the sizes that explain it best, or those assumed if they are not estimated."""
        sized = self._sized(wanted, observed, evidence)
        return sized.with_best_sizes() if self.are_sizes_estimated and len(evidence.values) else sized

    def _sized(self, wanted: Points, observed: Points, evidence: Evidence) -> Sized:
        """Return the evidence with the sizes that are assumed."""
        weights = evidence.weights
        return Sized(
            smooth=tuple(weights @ part @ weights.T for part in self._among(observed)),
            noise=evidence.noise,
            misfit=evidence.values - weights @ self._mean(observed),
            singles=tuple(
                SingleClocks.of(wanted, observed, weights, are_of_kinds=are_of_kinds) for are_of_kinds in (False, True)
            ),
            scales=(self.deviations.single_class, self.deviations.single_kind),
            factors=Factors.assumed(),
        )

    def _mean(self, points: Points) -> FloatArray:
        return np.asarray(points.shape @ np.array(self.prior.mean), dtype=np.float64)

    def _among(self, points: Points) -> SmoothParts:
        key = self.deviations, self.prior.sigma
        if key not in points.parts:
            points.parts[key] = smooth_parts(*key, points, points)
        return points.parts[key]
