"""Deviations of single clocks: mostly tiny, sometimes large, some the same in all stages.

Published tables show both: repeated measurements scatter by 0.1 %, and a few clocks are 1 to 3 % off the curve through
their neighbours, which a Gaussian would bend towards them. So these deviations have Student's t distribution: each has
a variance of its own, learned only from its measurements (expectation maximization).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import get_lapack_funcs

from gpuenergyd_policies.learning.deviations import IntArray, Points
from gpuenergyd_policies.learning.shape import FloatArray

DEGREES_OF_FREEDOM = 3.0
"""Of Student's t distribution: deviations in published tables have a kurtosis of 4 to 16."""
_UNSEEN = 2.0
"""Variance of a deviation that was not seen, in units of its squared scale: 90 % intervals are as wide as those of the
t distribution."""
(_TRTRS,) = get_lapack_funcs(["trtrs"])


@dataclass(frozen=True, slots=True)
class SingleClocks:
    """One family of deviations of single clocks; variances are in units of the squared scale of the family."""

    of_wanted: IntArray
    """Number of the deviation of each wanted point; those that were seen come first; -1 at the maximum clock."""
    weights: FloatArray
    """Of each deviation that was seen (column) in each value of the evidence (row)."""
    variances: FloatArray
    """Of the deviations that were seen; that of all others is `_UNSEEN`."""

    @classmethod
    def of(cls, wanted: Points, observed: Points, weights: FloatArray, *, are_of_kinds: bool) -> "SingleClocks":
        """Return the deviations of classes, or of kinds, in the evidence `weights @ observed`."""
        number: dict[tuple[float, ...], int] = {}
        of_observed = _numbered(observed, number, are_of_kinds=are_of_kinds)
        member = (of_observed[:, None] == np.arange(len(number))[None, :]).astype(np.float64)
        variances = np.ones(len(number))
        of_wanted = of_observed if wanted is observed else _numbered(wanted, number, are_of_kinds=are_of_kinds)
        return cls(of_wanted, weights @ member, variances)

    def of_evidence(self) -> FloatArray:
        return np.asarray((self.weights * self.variances) @ self.weights.T, dtype=np.float64)

    def across(self) -> FloatArray:
        """Return the covariance of the wanted points with the evidence."""
        seen = np.concatenate([self.variances * self.weights, np.zeros((len(self.weights), 1))], axis=1)
        column = np.where(self.of_wanted < len(self.variances), self.of_wanted, -1)
        return np.asarray(seen[:, column].T, dtype=np.float64)

    def among_wanted(self) -> FloatArray:
        """Return the covariance of the wanted points."""
        of_each = np.append(self.variances, [_UNSEEN, 0.0])[np.minimum(self.of_wanted, len(self.variances))]
        return np.asarray((self.of_wanted[:, None] == self.of_wanted[None, :]) * of_each, dtype=np.float64)

    def with_better_variances(self, root: FloatArray, white: FloatArray, scale: float) -> "SingleClocks":
        """Return more probable variances.

        `root` is the Cholesky root of the covariance of the evidence under the present ones, `white` the misfit of the
        evidence divided by it, `scale` that of the family.
        """
        across = solved(root, self.weights)
        prior = scale**2 * self.variances
        mean = prior * (across.T @ white)
        spread = np.maximum(prior - np.square(prior) * np.sum(np.square(across), axis=0), 0.0)
        squares = (np.square(mean) + spread) / scale**2
        return replace(self, variances=(DEGREES_OF_FREEDOM + squares) / (DEGREES_OF_FREEDOM + 1))


def solved(root: FloatArray, values: FloatArray) -> FloatArray:
    """Return the lower triangular root's inverse times the values, as scipy.linalg.solve_triangular does."""
    return np.asarray(_TRTRS(root.T, values, lower=0, trans=1)[0] if values.size else values, dtype=np.float64)


def _numbered(points: Points, number: dict[tuple[float, ...], int], *, are_of_kinds: bool) -> IntArray:
    stages: Sequence[int] = [0] * len(points.stage) if are_of_kinds else points.stage.tolist()
    keys = zip(stages, points.kind.tolist(), points.clock_mhz.tolist(), strict=True)
    below = points.is_below_max.tolist()
    found = [number.setdefault(key, len(number)) if low else -1 for key, low in zip(keys, below, strict=True)]
    return np.array(found, dtype=np.int64).reshape(-1)
