"""A forecast model of one zone: a ridge regression that is updated with each new day in milliseconds.

Theory of operation. A weighted ridge regression for all 72 target hours needs two matrices only: the sums of x x' and
of x y' over the origins so far. A new day is added to them, the weight of old days halves in a year, and a refit is one
solve. It minimises absolute instead of squared errors: the weight of an origin decreases with the model's error there
when it was added, one step of iterative re-weighting per day instead of many over the whole history. Penalties are
relative to the size of each feature; otherwise they would suppress the small features of a zone with little variation.
"""

import numpy as np

from gpuenergyd_policies.carbon.features import (
    NUM_TARGET_HOURS,
    WEEK_HOURS,
    Array,
    FilledHistory,
    Origins,
    targets,
    zone_features,
)

HALF_LIFE_HOURS = 365 * 24
SEASON_HOURS = 400 * 24
"""History from which on the season is a feature; with less, it would act as a trend."""
PENALTY_ROWS = 1.0
"""Penalty on a coefficient, in rows of its feature's mean square."""
_ERROR_FLOOR_RATIO = 0.3
_CHUNK_ROWS = 2048


class ZoneModel:
    """A ridge regression on one zone's history; updates take a longer history with the same beginning."""

    def __init__(self, *, with_season: bool) -> None:
        self._with_season = with_season
        self._next_origin = WEEK_HOURS
        self._gram: Array = np.zeros((0, 0))
        self._cross: Array = np.zeros((0, 0))
        self._coefficients: Array | None = None
        self._mean_error = 0.0

    @property
    def is_fitted(self) -> bool:
        """Whether any origin with all its targets has been added."""
        return self._coefficients is not None

    def update(self, history: FilledHistory, end: int) -> None:
        """Add every new origin whose targets are all before `end`."""
        origins = np.arange(self._next_origin, end - NUM_TARGET_HOURS + 1)
        if not len(origins):
            return
        if self._coefficients is None:  # an unweighted first fit gives the errors that weight the second
            self._add(history, origins)
            self._solve()
            self._gram, self._cross = np.zeros((0, 0)), np.zeros((0, 0))
        fade = 0.5 ** (len(origins) / HALF_LIFE_HOURS)
        self._gram, self._cross = self._gram * fade, self._cross * fade
        self._add(history, origins)
        self._solve()
        self._next_origin = int(origins[-1]) + 1

    def predict(self, history: FilledHistory, origins: Origins) -> Array:
        """Return 72 hours for each origin, in the unit of the history.

        Raises:
            ValueError: the model is not fitted yet.
        """
        if self._coefficients is None:
            raise ValueError("the zone model is not fitted: update it with a longer history first")
        rows = []
        for k in range(0, len(origins), _CHUNK_ROWS):
            features, level = zone_features(history, origins[k : k + _CHUNK_ROWS], with_season=self._with_season)
            rows.append((features @ self._coefficients) * level[:, None])
        return np.concatenate(rows)

    def _add(self, history: FilledHistory, origins: Origins) -> None:
        newest = origins[-1]
        for k in range(0, len(origins), _CHUNK_ROWS):
            some = origins[k : k + _CHUNK_ROWS]
            features, level = zone_features(history, some, with_season=self._with_season)
            truth = targets(history.values, some) / level[:, None]
            weights = 0.5 ** ((newest - some) / HALF_LIFE_HOURS)
            if self._coefficients is not None:
                errors = np.abs(truth - features @ self._coefficients)[:, :24].mean(axis=1)
                mean_error = self._mean_error or float(errors.mean())
                self._mean_error = mean_error
                weights = weights / (errors / max(mean_error, 1e-12) + _ERROR_FLOOR_RATIO)
            root = np.sqrt(weights)[:, None]
            weighted = features * root
            gram, cross = weighted.T @ weighted, weighted.T @ (truth * root)  # the product with itself costs half
            self._gram = self._gram + gram if self._gram.size else gram
            self._cross = self._cross + cross if self._cross.size else cross

    def _solve(self) -> None:
        penalised = self._gram.copy()
        size = np.diag(self._gram) / max(float(self._gram[0, 0]), 1e-12)
        penalty = PENALTY_ROWS * size + 1e-9
        penalty[0] = 0.0
        penalised[np.diag_indices_from(penalised)] += penalty
        self._coefficients = np.asarray(np.linalg.solve(penalised, self._cross), dtype=np.float64)
