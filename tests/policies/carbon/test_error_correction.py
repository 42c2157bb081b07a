"""Error correction of forecasts, and the recent dynamics of a zone."""

from datetime import UTC, datetime

import numpy as np
import pytest

from gpuenergyd_policies.carbon.error_correction import USUAL_PERSISTENCE_RATIO, ErrorCorrection
from gpuenergyd_policies.carbon.features import WEEK_HOURS, FilledHistory, shape_features
from gpuenergyd_policies.carbon.forecast import ZoneForecaster
from gpuenergyd_policies.carbon.recent_dynamics import dynamics_features, dynamics_forecasts

FIRST_AT = datetime(2024, 1, 1, tzinfo=UTC)


def going_on(share: float, num: int, seed: int = 1) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return errors with this persistence from hour to hour."""
    draw = np.random.default_rng(seed)
    errors = np.zeros(num)
    for k in range(1, num):
        errors[k] = share * errors[k - 1] + draw.normal()
    return errors


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_four_weeks_of_errors_show_their_persistence(share: float) -> None:
    memory = ErrorCorrection.fitted(going_on(share, 672), USUAL_PERSISTENCE_RATIO)

    assert memory.persistence_ratio == pytest.approx(share, abs=0.1)


def test_few_errors_change_the_usual_persistence_little() -> None:
    none = ErrorCorrection.fitted(np.zeros(0), 0.3)
    unknown = ErrorCorrection.fitted(np.full(5, np.nan), 0.3)
    few = ErrorCorrection.fitted(np.array([1.0, -1.0, 1.0]), 0.3)

    assert none.persistence_ratio == unknown.persistence_ratio == 0.3
    assert 0.1 < few.persistence_ratio < 0.3


def test_persistence_is_never_negative_nor_explosive() -> None:
    swinging = ErrorCorrection.fitted(np.tile([1.0, -1.0], 300), 0.3)
    constant = ErrorCorrection.fitted(np.ones(600), 0.3)

    assert swinging.persistence_ratio == 0.0
    assert constant.persistence_ratio <= 0.9


def test_an_unknown_error_corrects_nothing_and_an_outlier_is_limited() -> None:
    memory = ErrorCorrection(0.5, mean_error=10.0)
    added = memory.expected(np.array([np.nan, 10.0, 1e6]), 3)

    np.testing.assert_array_equal(added[0], 0.0)
    assert added[1, 0] == pytest.approx(5.0)
    assert added[1, 1] > added[1, 0]  # what changed in the grid stays changed
    assert added[2, 0] == pytest.approx(15.0)


def test_a_filled_value_is_not_an_error() -> None:
    values = 200.0 + 80.0 * np.sin(2 * np.pi * np.arange(240) / 24) + going_on(0.9, 240)
    jumped = values.copy()
    jumped[-1] += 60.0
    is_filled = np.zeros(240, dtype=bool)
    is_filled[-1] = True
    forecaster = ZoneForecaster()
    forecaster.refit(FilledHistory(FIRST_AT, values, np.zeros(240, dtype=bool)), 239)

    origin = np.array([240])
    known, invented = (
        forecaster._uncorrected(FilledHistory(FIRST_AT, jumped, filled), origin)[1]
        for filled in (np.zeros(240, dtype=bool), is_filled)
    )

    assert known[0] > 20.0
    assert np.isnan(invented[0])


def test_one_week_distinguishes_persistent_from_reverting_zones() -> None:
    trending = np.cumsum(going_on(0.8, 400)) + 500.0
    white = 500.0 + 10.0 * going_on(0.0, 400)
    origins = np.arange(200, 380)

    def error(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        """Return the error of the next hour relative to that of a persistence forecast."""
        forecast, _ = dynamics_forecasts(values, origins)
        truth = values[origins]
        return float(np.abs(forecast[:, 0] - truth).mean() / np.abs(values[origins - 1] - truth).mean())

    assert error(trending) < 0.8
    assert error(white) < 0.8


def test_dynamics_forecasts_do_not_depend_on_other_origins_or_future_values() -> None:
    values = 300.0 + 50.0 * np.sin(2 * np.pi * np.arange(500) / 24) + going_on(0.5, 500)
    origins = np.arange(WEEK_HOURS, 480)
    together, _ = dynamics_forecasts(values, origins)
    changed = values.copy()
    changed[300:] = 1.0
    alone, _ = dynamics_forecasts(changed, np.array([300]))

    np.testing.assert_allclose(alone[0], together[300 - WEEK_HOURS], rtol=1e-9)


@pytest.mark.parametrize("values", [np.full(200, 5.0), np.zeros(200), 1e-3 * going_on(0.5, 200), 1e6 * np.ones(200)])
def test_any_week_gives_finite_features(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    history, origins = FilledHistory(FIRST_AT, values, np.zeros(200, dtype=bool)), np.array([WEEK_HOURS, 199])
    features = dynamics_features(values, origins, shape_features(history, origins))

    assert features.shape == (2, 36)
    assert np.isfinite(features).all()
