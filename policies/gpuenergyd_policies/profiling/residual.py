"""Residuals of the power model: a Gaussian process on relative energy errors, smooth in the clock.

Each kind of instruction of each GPU has an unknown relative error g(clock), smooth and near zero. The error of an
iteration is a mixture of these, weighted by their contributions to its energy, plus noise. The size of g and of the
noise are estimated by marginal likelihood; where the power model fits, g is estimated as zero.

A Gaussian process is linear in features phi with phi(f) . phi(f') = exp(-(f - f')^2 / 2 l^2), here approximated at a
few nodes (Nystroem). The features of a mixture are therefore the mixture of features, and the covariance of the errors
is misfit^2 * features . features' + noise^2 * I. One eigendecomposition inverts it for all sizes of misfit and noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuenergyd_policies.profiling.power import PowerFit, WorkKey

FloatArray = NDArray[np.float64]

_LENGTH_RATIO = 0.14
"""Length scale of g, as a share of the maximum clock."""
_NODES = np.linspace(0.5, 1.0, 9)
_MISFIT_RATIO, _MISFIT_BOUNDS = 0.02, (1e-4, 0.08)
_NOISE_RATIO, _NOISE_BOUNDS = 0.02, (3e-4, 0.1)
_MIN_ITERATIONS = 8
"""GPU iterations below which residuals are not fitted."""


@dataclass(frozen=True, slots=True)
class Residual:
    """Relative error of the power model by work, at the clocks it was evaluated for."""

    mean_ratio: Mapping[WorkKey, FloatArray]
    sigma_ratio: Mapping[WorkKey, FloatArray]


def fit_residual(fit: PowerFit, clocks_of: Mapping[WorkKey, Sequence[int]]) -> Residual:
    """Return the error of the power model for each work at its clocks, with its standard deviation."""
    shares = fit.shares
    num_rows = len(shares.energy_j)
    if num_rows < _MIN_ITERATIONS:
        zero = {work: np.zeros(len(clocks)) for work, clocks in clocks_of.items()}
        return Residual(zero, zero)
    top_of_rank = np.array([model.max_sm_clock_mhz for model in fit.models()], dtype=np.float64)
    errors_of = _errors_of_ranks(fit, top_of_rank)
    eigenvalues = np.concatenate([own.eigenvalues for own in errors_of.values()])
    rotated = np.concatenate([own.rotated for own in errors_of.values()])
    misfit_ratio, noise_ratio = _most_probable_sizes(eigenvalues, rotated)
    means: dict[WorkKey, FloatArray] = {}
    sigmas: dict[WorkKey, FloatArray] = {}
    for work, clocks in clocks_of.items():
        own = errors_of[work[0]]
        variances = misfit_ratio**2 * own.eigenvalues + noise_ratio**2
        wanted = _features(np.asarray(clocks, dtype=np.float64) / top_of_rank[work[0]])
        covariance = misfit_ratio**2 * (wanted @ own.features_of(shares.index_of[work]).T)
        means[work] = np.asarray(covariance @ (own.rotated / variances), dtype=np.float64)
        variance = misfit_ratio**2 * np.sum(wanted**2, axis=1) - np.sum(covariance**2 / variances, axis=1)
        sigmas[work] = np.asarray(np.sqrt(np.maximum(0.0, variance)), dtype=np.float64)
    return Residual(means, sigmas)


@dataclass(frozen=True, slots=True)
class _RankErrors:
    """Errors of one GPU's iterations, and features of their works, in the basis in which errors are independent.

    Works belong to one GPU each, so that the covariance of errors is a block for each GPU.
    """

    eigenvalues: FloatArray
    rotated: FloatArray
    """The errors."""
    features: FloatArray
    """A row per error, `len(_NODES)` columns per work."""
    column_of: Mapping[int, int]
    """The first column of each work, by its index."""

    def features_of(self, work_index: int) -> FloatArray:
        """Return the columns of one work."""
        begin = self.column_of[work_index]
        return self.features[:, begin : begin + len(_NODES)]


def _errors_of_ranks(fit: PowerFit, top_of_rank: FloatArray) -> dict[int, _RankErrors]:
    """Return the errors of each rank that has a work."""
    shares, size = fit.shares, len(_NODES)
    num_rows = len(shares.energy_j)
    contributed_j = _contributed_j(fit)
    total_j = np.bincount(shares.row_of, weights=contributed_j, minlength=num_rows)
    weight = contributed_j / np.maximum(total_j[shares.row_of], 1e-9)
    of_shares = weight[:, None] * _features(shares.locked_mhz / top_of_rank[shares.rank_of])
    works_of: dict[int, list[int]] = {}
    for work, index in shares.index_of.items():
        works_of.setdefault(work[0], []).append(index)
    found: dict[int, _RankErrors] = {}
    for rank, works in works_of.items():
        own = np.flatnonzero(shares.rank_of == rank)
        rows, row_of = np.unique(shares.row_of[own], return_inverse=True)
        column_of = {index: size * place for place, index in enumerate(works)}
        columns = np.array([column_of[index] for index in shares.work_of[own].tolist()], dtype=np.int64)
        features = np.zeros((len(rows), size * len(works)))
        np.add.at(features, (row_of[:, None], columns[:, None] + np.arange(size)), of_shares[own])
        eigenvalues, basis = np.linalg.eigh(features @ features.T)
        found[rank] = _RankErrors(
            np.maximum(eigenvalues, 0.0), basis.T @ fit.residual_ratios[rows], basis.T @ features, column_of
        )
    return found


def _most_probable_sizes(eigenvalues: FloatArray, rotated: FloatArray) -> tuple[float, float]:
    """Return the sizes of misfit and noise of greatest marginal likelihood, from a grid.

    The errors `rotated` to the eigenvectors of features . features' are independent.
    """
    misfits = np.geomspace(*_MISFIT_BOUNDS, 6)
    noises = np.geomspace(*_NOISE_BOUNDS, 9)
    sizes = [(_MISFIT_RATIO, _NOISE_RATIO), *((float(a), float(b)) for a in misfits for b in noises)]
    misfit2, noise2 = np.array(sizes).T ** 2
    variances = misfit2[:, None] * eigenvalues + noise2[:, None]
    likelihoods = -np.sum(np.log(variances) + rotated**2 / variances, axis=1)
    return sizes[int(np.argmax(likelihoods))]


def _features(position: FloatArray) -> FloatArray:
    """Return phi at clocks given as shares of the maximum clock."""
    root = np.linalg.cholesky(_kernel(_NODES, _NODES) + 1e-6 * np.eye(len(_NODES)))
    return np.asarray(np.linalg.solve(root, _kernel(_NODES, position)).T, dtype=np.float64)


def _kernel(a: FloatArray, b: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-0.5 * ((a[:, None] - b[None, :]) / _LENGTH_RATIO) ** 2), dtype=np.float64)


def _contributed_j(fit: PowerFit) -> FloatArray:
    """Return the contribution of each share to its iteration's energy by the power model."""
    shares, models = fit.shares, fit.models()
    of_index = {index: work for work, index in shares.index_of.items()}
    joules = np.zeros(len(shares.row_of))
    for k, index in enumerate(shares.work_of.tolist()):
        rank, kind, chunk, part = of_index[index]
        clock, time_s, amount = float(shares.clock_mhz[k]), float(shares.time_s[k]), float(shares.amount[k])
        if kind is None:
            joules[k] = models[rank].waiting_power_w(clock) * time_s
        elif kind.is_wait:
            joules[k] = models[rank].energy_j((kind, chunk, part), clock, time_s)
        elif amount > 0:
            joules[k] = amount * models[rank].energy_j((kind, chunk, part), clock, time_s / amount)
    return joules
