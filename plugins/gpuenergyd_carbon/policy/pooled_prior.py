"""A pretrained forecast model for any zone, which needs only the zone's last week.

`pooled_prior.npz` contains a ridge regression that was fitted by `benchmarks/runs/carbon_prior.py TRACES --out
pooled_prior.npz` to public hourly traces up to 2023 (Electricity Maps, ODbL 1.0; EIA; ENTSO-E). It contains
coefficients, no data. Its input is only the shape of the last week and the day of the week, not time of day, season or
level, so it applies to zones that it was not fitted to. Random nonlinear features of the input (Rahimi and Recht 2007)
let it distinguish times of day by the shape of the mean day. Replaying one of its zones before TRAINED_UNTIL_AT is not
a test, because those years are training data.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import numpy as np

from gpuenergyd_carbon.policy.history import Array, FilledHistory, Origins, same_hour_means, weekdays, weeks_before

TRAINED_UNTIL_AT = datetime(2024, 1, 1, tzinfo=UTC)
TRAINED_ZONES = frozenset({"AU-SA", "CA-ON", "CISO", "DE", "ES", "GB", "KR", "PJM"})
_LARGEST_DEVIATIONS = 8.0


def prior_features(history: FilledHistory, origins: Origins, projection: Array) -> tuple[Array, Array, Array]:
    """Return the features of the week before each origin that models for all zones use; origins are >= 168.

    The result has the features, normalised by level and spread; the naive forecast, which models correct; and the
    spread, which is the unit of their corrections.
    """
    week = weeks_before(history.values, origins)
    level = week.mean(axis=1, keepdims=True)
    spread = week.std(axis=1, keepdims=True) + 1e-3 * level + 1e-9
    variation = np.log(spread / np.maximum(level, 1e-9))
    week = np.clip((week - level) / spread, -_LARGEST_DEVIATIONS, _LARGEST_DEVIATIONS)
    features = np.concatenate([week, variation, weekdays(history.hours_at(origins))], axis=1)
    features = np.concatenate([features, np.tanh(features @ projection)], axis=1)
    return features, same_hour_means(history.values, origins), spread


@dataclass(frozen=True, slots=True)
class PooledPrior:
    """The fitted model: corrections to the naive forecast, in units of the spread, per feature."""

    projection: Array
    coefficients: Array
    usual_margins: Array
    """Usual half-width of a 95 % interval by hour ahead, in standard deviations of the week before."""

    def predict(self, history: FilledHistory, origins: Origins) -> Array:
        """Return 72 hours for each origin, in the unit of the history; origins are >= 168."""
        features, naive, spread = prior_features(history, origins, self.projection)
        result: Array = naive + spread * (features @ self.coefficients)
        return result


@cache
def shipped_prior() -> PooledPrior:
    return read_prior(Path(__file__).with_name("pooled_prior.npz"))


def read_prior(path: Path) -> PooledPrior:
    with np.load(path, allow_pickle=False) as stored:
        return PooledPrior(**{name: values.astype(np.float64) for name, values in stored.items()})
