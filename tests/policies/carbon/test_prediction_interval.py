"""Intervals contain as many hours as they say, know no future, and grow with the grid's variation."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd_policies.carbon.history import NUM_TARGET_HOURS
from gpuenergyd_policies.carbon.prediction_interval import INTERVAL_RATIO
from gpuenergyd_policies.carbon.prediction_interval import prediction_interval as interval_with
from tests.support.thorough import thorough

WEEK = 168
prediction_interval = partial(interval_with, usual_margins=np.linspace(0.5, 2.5, NUM_TARGET_HOURS))


def noisy_history(num_days: int, seed: int, spread_g_per_kwh: float = 40.0) -> np.ndarray:
    return 300.0 + spread_g_per_kwh * np.random.default_rng(seed).standard_normal(num_days * 24)


def means_before(values: np.ndarray, origins: np.ndarray) -> np.ndarray:
    levels = [values[origin - WEEK : origin].mean() for origin in origins]
    return np.repeat(np.array(levels)[:, None], NUM_TARGET_HOURS, axis=1)


@pytest.mark.parametrize("num_days", [30, 120])
def test_the_stated_share_of_hours_lies_inside(num_days: int) -> None:
    inside = []
    for seed in range(12):
        values = noisy_history(num_days + 3, seed)
        origin = num_days * 24
        origins = np.arange(max(WEEK, origin - 90 * 24), origin)
        predicted = np.full(NUM_TARGET_HOURS, values[origin - WEEK : origin].mean())
        low, high = prediction_interval(
            values[:origin], origin, predicted, recorded_origins=origins, recorded=means_before(values, origins)
        )
        truth = values[origin : origin + NUM_TARGET_HOURS]
        inside += list((low <= truth) & (truth <= high))

    assert np.mean(inside) == pytest.approx(INTERVAL_RATIO, abs=0.025)


@given(num_origins=st.integers(0, 200), seed=st.integers(0, 99), num_hours=st.integers(1, NUM_TARGET_HOURS))
def test_bounds_are_finite_around_the_forecast_and_know_no_future(num_origins: int, seed: int, num_hours: int) -> None:
    values = noisy_history(20, seed)
    origin = WEEK + 220
    origins = np.arange(origin - num_origins, origin)
    recorded = means_before(values, origins) if num_origins else np.zeros((0, NUM_TARGET_HOURS))
    predicted = np.full(num_hours, 250.0)

    low, high = prediction_interval(values, origin, predicted, recorded_origins=origins, recorded=recorded)
    known = prediction_interval(values[:origin], origin, predicted, recorded_origins=origins, recorded=recorded)

    assert np.all((low >= 0.0) & (low <= predicted) & (predicted <= high) & np.isfinite(high))
    assert np.array_equal(low, known[0])
    assert np.array_equal(high, known[1])


def test_a_grid_that_varies_twice_as_much_has_twice_the_interval() -> None:
    widths = []
    for spread in (10.0, 20.0):
        values = noisy_history(40, 1, spread)
        origins = np.arange(WEEK, 40 * 24)
        low, high = prediction_interval(
            values, 40 * 24, np.full(24, 300.0), recorded_origins=origins, recorded=means_before(values, origins)
        )
        widths.append(high - low)

    np.testing.assert_allclose(widths[1], 2.0 * widths[0], rtol=1e-6)


def test_without_variation_or_history_the_interval_is_the_forecast() -> None:
    nothing = np.zeros((0, NUM_TARGET_HOURS))
    for values in (np.full(200, 50.0), np.zeros(0)):
        low, high = prediction_interval(
            values, len(values), np.full(3, 50.0), recorded_origins=np.zeros(0, dtype=np.int64), recorded=nothing
        )
        assert low.tolist() == high.tolist() == [50.0, 50.0, 50.0]


def issued_day_by_day(values: np.ndarray, first_day: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, by day, the share of its hours inside the interval issued before it, and the mean width."""
    origins = np.arange(WEEK, len(values))
    recorded = means_before(values, origins)
    shares, widths = [], []
    for origin in range(first_day * 24, len(values) - 23, 24):
        known = (origins >= origin - 90 * 24) & (origins < origin)
        low, high = prediction_interval(
            values[:origin],
            origin,
            recorded[origin - WEEK, :24],
            recorded_origins=origins[known],
            recorded=recorded[known],
        )
        truth = values[origin : origin + 24]
        shares.append(((low <= truth) & (truth <= high)).mean())
        widths.append((high - low).mean())
    return np.array(shares), np.array(widths)


@pytest.mark.parametrize("later_spread_g_per_kwh", [80.0, *thorough(20.0)])
def test_a_grid_that_becomes_calmer_or_wilder_is_covered_as_stated_after_a_month(later_spread_g_per_kwh: float) -> None:
    values = np.concatenate([noisy_history(90, 3), noisy_history(60, 4, later_spread_g_per_kwh)])

    shares, widths = issued_day_by_day(values, 89)

    assert shares[31:].mean() == pytest.approx(INTERVAL_RATIO, abs=0.015)
    assert widths[-1] / widths[0] == pytest.approx(later_spread_g_per_kwh / 40.0, rel=0.25)


@given(num_hours=st.integers(1, NUM_TARGET_HOURS), num_origins=st.integers(0, 200), seed=st.integers(0, 9))
def test_an_hour_has_the_same_bounds_however_many_hours_are_asked_for(
    num_hours: int, num_origins: int, seed: int
) -> None:
    values = noisy_history(17, seed)
    origin = len(values)
    origins = np.arange(origin - num_origins, origin)
    recorded = means_before(values, origins) if num_origins else np.zeros((0, NUM_TARGET_HOURS))
    predicted = np.full(NUM_TARGET_HOURS, 300.0)

    all_hours = prediction_interval(values, origin, predicted, recorded_origins=origins, recorded=recorded)
    asked = prediction_interval(values, origin, predicted[:num_hours], recorded_origins=origins, recorded=recorded)

    assert all(np.array_equal(one[:num_hours], other) for one, other in zip(all_hours, asked, strict=True))


def test_hours_that_have_not_passed_change_nothing() -> None:
    values = noisy_history(40, 5)
    origin = len(values)
    origins = np.arange(WEEK, origin)
    recorded = means_before(values, origins)
    is_ahead = origins[:, None] + np.arange(NUM_TARGET_HOURS) >= origin
    predicted = np.full(NUM_TARGET_HOURS, 300.0)

    tables = (recorded, np.where(is_ahead, 1000.0, recorded))
    bounds = [
        prediction_interval(values, origin, predicted, recorded_origins=origins, recorded=table) for table in tables
    ]

    assert np.array_equal(bounds[0], bounds[1])
