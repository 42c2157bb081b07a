"""Residuals of the power model: a Gaussian process on relative energy errors, smooth in the clock.

Each kind of instruction of each GPU has an unknown relative error g(clock), smooth and near zero. The error of an
iteration is a mixture of these, weighted by their contributions to its energy, plus noise. The size of g and of the
noise are estimated by marginal likelihood; where the power model fits, g is estimated as zero.

A Gaussian process is linear in features phi with phi(f) . phi(f') = exp(-(f - f')^2 / 2 l^2), here approximated at a
few nodes (Nystroem). The features of a mixture are therefore the mixture of features, and the kernel is a dot product.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, WhiteKernel

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
    contributed_j = _contributed_j(fit)
    total_j = np.bincount(shares.row_of, weights=contributed_j, minlength=num_rows)
    weight = contributed_j / np.maximum(total_j[shares.row_of], 1e-9)
    size = len(_NODES)
    features = np.zeros((num_rows, size * len(shares.index_of)))
    of_shares = weight[:, None] * _features(shares.locked_mhz / top_of_rank[shares.rank_of])
    columns = shares.work_of[:, None] * size + np.arange(size)
    np.add.at(features, (shares.row_of[:, None], columns), of_shares)
    misfit = ConstantKernel(_MISFIT_RATIO**2, tuple(b**2 for b in _MISFIT_BOUNDS))
    noise = WhiteKernel(_NOISE_RATIO**2, tuple(b**2 for b in _NOISE_BOUNDS))
    optimizer: Any = _best_of_grid
    process: Any = GaussianProcessRegressor(misfit * DotProduct(0.0, "fixed") + noise, optimizer=optimizer)
    with warnings.catch_warnings():
        # A misfit at its lower bound means that the power model fits.
        warnings.simplefilter("ignore", ConvergenceWarning)
        process.fit(features, fit.residual_ratios)
    noise_ratio2 = float(process.kernel_.get_params()["k2__noise_level"])
    means: dict[WorkKey, FloatArray] = {}
    sigmas: dict[WorkKey, FloatArray] = {}
    for work, clocks in clocks_of.items():
        wanted = np.zeros((len(clocks), features.shape[1]))
        begin = shares.index_of[work] * size
        wanted[:, begin : begin + size] = _features(np.asarray(clocks, dtype=np.float64) / top_of_rank[work[0]])
        mean, sigma = process.predict(wanted, return_std=True)
        means[work] = np.asarray(mean, dtype=np.float64)
        sigmas[work] = np.sqrt(np.maximum(0.0, np.asarray(sigma, dtype=np.float64) ** 2 - noise_ratio2))
    return Residual(means, sigmas)


def _best_of_grid(objective: Any, start: FloatArray, bounds: FloatArray) -> tuple[FloatArray, float]:
    """Return the best of a grid of misfit and noise sizes, and its value; gradients would cost ten times as much."""
    low, high = bounds.T.tolist()
    points = [
        start,
        *(np.array([a, b]) for a in np.linspace(low[0], high[0], 6) for b in np.linspace(low[1], high[1], 9)),
    ]
    values = [float(objective(point, eval_gradient=False)) for point in points]
    best = int(np.argmin(values))
    return points[best], values[best]


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
        elif amount > 0:
            joules[k] = amount * models[rank].energy_j((kind, chunk, part), clock, time_s / amount)
    return joules
