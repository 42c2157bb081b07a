"""What a zone's own history teaches: a ridge that takes in each new day in milliseconds.

Theory of operation. A weighted ridge for all 72 target hours needs two matrices only: the sums of x x' and of x y'
over the origins seen. A new day is added to them, old days fade by half in a year, and a refit is one solve. Absolute
errors count, not squares, so an origin weighs less the larger the model's error there was when it came: one step of
iterative re-weighting per day instead of many over everything. Penalties are relative to each feature's own size, or a
flat zone, whose features vary by per cents, would be penalised out of all skill.
"""

import numpy as np

from gpuenergyd_policies.carbon.features import (
    NUM_TARGET_HOURS,
    WEEK_HOURS,
    Array,
    History,
    Origins,
    own_features,
    targets,
)

HALF_LIFE_HOURS = 365 * 24
SEASON_HOURS = 400 * 24
"""From so much history on, the season is a feature: before, it would be a trend without bounds."""
PENALTY_ROWS = 1.0
"""The penalty on a coefficient, in rows of its feature's mean square."""
_ERROR_FLOOR_RATIO = 0.3
_CHUNK_ROWS = 2048


class OwnModel:
    """A ridge on one zone's history; it may be updated at any time with a longer history that begins alike."""

    def __init__(self, *, with_season: bool) -> None:
        self._with_season = with_season
        self._next_origin = WEEK_HOURS
        self._gram: Array = np.zeros((0, 0))
        self._cross: Array = np.zeros((0, 0))
        self._coefficients: Array | None = None
        self._mean_error = 0.0

    @property
    def is_fitted(self) -> bool:
        """Whether it has seen any origin with all its targets."""
        return self._coefficients is not None

    def update(self, history: History, end: int) -> None:
        """Take in every origin not seen yet whose targets all lie before `end`."""
        origins = np.arange(self._next_origin, end - NUM_TARGET_HOURS + 1)
        if not len(origins):
            return
        if self._coefficients is None:  # a first fit without weights finds the errors for the second
            self._add(history, origins)
            self._solve()
            self._gram, self._cross = np.zeros((0, 0)), np.zeros((0, 0))
        fade = 0.5 ** (len(origins) / HALF_LIFE_HOURS)
        self._gram, self._cross = self._gram * fade, self._cross * fade
        self._add(history, origins)
        self._solve()
        self._next_origin = int(origins[-1]) + 1

    def predict(self, history: History, origins: Origins) -> Array:
        """Return 72 hours for each origin, in the unit of the history.

        Raises:
            ValueError: nothing was fitted yet.
        """
        if self._coefficients is None:
            raise ValueError("the model has seen no origin with all its targets yet")
        rows = []
        for k in range(0, len(origins), _CHUNK_ROWS):
            features, level = own_features(history, origins[k : k + _CHUNK_ROWS], with_season=self._with_season)
            rows.append((features @ self._coefficients) * level[:, None])
        return np.concatenate(rows)

    def _add(self, history: History, origins: Origins) -> None:
        newest = origins[-1]
        for k in range(0, len(origins), _CHUNK_ROWS):
            some = origins[k : k + _CHUNK_ROWS]
            features, level = own_features(history, some, with_season=self._with_season)
            truth = targets(history.values, some) / level[:, None]
            weights = 0.5 ** ((newest - some) / HALF_LIFE_HOURS)
            if self._coefficients is not None:
                errors = np.abs(truth - features @ self._coefficients)[:, :24].mean(axis=1)
                mean_error = self._mean_error or float(errors.mean())
                self._mean_error = mean_error
                weights = weights / (errors / max(mean_error, 1e-12) + _ERROR_FLOOR_RATIO)
            weighted = features * weights[:, None]
            gram, cross = weighted.T @ features, weighted.T @ truth
            self._gram = self._gram + gram if self._gram.size else gram
            self._cross = self._cross + cross if self._cross.size else cross

    def _solve(self) -> None:
        penalised = self._gram.copy()
        size = np.diag(self._gram) / max(float(self._gram[0, 0]), 1e-12)
        penalty = PENALTY_ROWS * size + 1e-9
        penalty[0] = 0.0
        penalised[np.diag_indices_from(penalised)] += penalty
        self._coefficients = np.asarray(np.linalg.solve(penalised, self._cross), dtype=np.float64)
