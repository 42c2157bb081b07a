"""Forecasts beat naive ones, use no future values, and work with short or incomplete histories."""

import math
from dataclasses import replace
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.lab.replay import issue_forecasts
from gpuenergyd_carbon.policy.forecast import Forecasts, ZoneForecaster, naive_forecasts, skill_against_naive
from gpuenergyd_carbon.policy.history import NUM_TARGET_HOURS, FilledHistory, filled_history
from gpuenergyd_carbon.policy.prediction_interval import INTERVAL_RATIO
from gpuenergyd_carbon.policy.prediction_interval import prediction_interval as interval_with
from tests.support.carbon_traces import FIRST_AT, made_up_trace, made_up_values
from tests.support.thorough import thorough

WEEK = 168
prediction_interval = partial(interval_with, usual_margins=np.linspace(0.5, 2.5, NUM_TARGET_HOURS))


def history(values: np.ndarray) -> FilledHistory:
    return FilledHistory(FIRST_AT, values)


def test_a_regular_grid_is_forecast_better_than_by_any_naive_method() -> None:
    values = made_up_values(120, seed=3)
    first = 90 * 24

    issued = issue_forecasts(history(values), first)
    origins = np.arange(first, len(values) - 23)
    skill = skill_against_naive(values, origins, issued.rows[: len(origins)])

    assert skill.skill_6h_ratio > 0.1
    assert skill.skill_24h_mean_ratio > 0.1


def test_eight_days_of_history_suffice_for_an_unknown_zone() -> None:
    values = made_up_values(60, seed=5)
    first = 30 * 24

    issued = issue_forecasts(history(values), first, history_days=8)
    origins = np.arange(first, len(values) - 23)
    skill = skill_against_naive(values, origins, issued.rows[: len(origins)])

    assert skill.skill_24h_mean_ratio > 0.05


def test_a_forecast_uses_no_future_values() -> None:
    values = made_up_values(80)
    changed = values.copy()
    changed[70 * 24 + 5 :] = 1.0

    honest = issue_forecasts(history(values), 60 * 24).rows
    other = issue_forecasts(history(changed), 60 * 24).rows

    known = 10 * 24 + 5  # forecasts issued before the change, and at its hour
    np.testing.assert_allclose(honest[: known + 1], other[: known + 1], rtol=1e-9)  # rows are multiplied in batches
    assert not np.array_equal(honest[known + 1], other[known + 1])


@pytest.mark.parametrize("num_hours", [1, 5, 23, 24, 30, 100, 167, 168, 200, 1500])
def test_any_length_of_history_gives_a_forecast_with_bounds_around_it(num_hours: int) -> None:
    trace = made_up_trace(num_days=70)
    forecast = Forecasts()(replace(trace, values=trace.values[:num_hours]), num_hours=48)

    assert len(forecast.hours) == 48
    assert forecast.issued_at == trace.first_hour_at + num_hours * HOUR
    assert forecast.hours[0].target_at == forecast.issued_at
    for hour in forecast.hours:
        assert 0 <= hour.low_g_per_kwh <= hour.carbon_intensity_g_per_kwh <= hour.high_g_per_kwh < math.inf


def test_models_are_added_as_the_history_grows() -> None:
    trace = made_up_trace(num_days=60)
    models = [Forecasts()(replace(trace, values=trace.values[:n])).model for n in (5, 50, 300, 1400)]

    assert models == ["persistence", "same-hour-mean", "pooled-prior", "pooled-prior+zone-model"]


def test_gaps_in_the_history_are_filled_and_a_history_without_values_is_refused() -> None:
    trace = made_up_trace(num_days=20)
    holes = list(trace.values)
    holes[100:140] = [math.nan] * 40
    holes[-3:] = [math.nan] * 3
    holes[:2] = [math.nan] * 2

    forecast = Forecasts()(replace(trace, values=tuple(holes)))
    filled = filled_history(replace(trace, values=tuple(holes)))

    assert all(math.isfinite(hour.carbon_intensity_g_per_kwh) for hour in forecast.hours)
    assert filled is not None
    assert filled.first_hour_at == trace.first_hour_at + 2 * HOUR
    assert np.isfinite(filled.values).all()
    with pytest.raises(CarbonDataError, match="has no value"):
        Forecasts()(replace(trace, values=(math.nan,) * 50))


@pytest.mark.parametrize("level", [0.0, 1e-6, 500.0])
def test_a_constant_grid_has_a_constant_forecast(level: float) -> None:
    values = np.full(60 * 24, level)
    forecaster = ZoneForecaster()
    forecaster.refit(history(values), len(values))

    predicted = forecaster.predict(history(values), np.array([len(values)]))

    np.testing.assert_allclose(predicted, level, rtol=0.02, atol=1e-6)


def test_forecasts_scale_with_their_grid() -> None:
    trace = made_up_trace(num_days=60)
    tenfold = replace(trace, values=tuple(10 * v for v in trace.values))

    once = [h.carbon_intensity_g_per_kwh for h in Forecasts()(trace).hours]
    ten = [h.carbon_intensity_g_per_kwh for h in Forecasts()(tenfold).hours]

    np.testing.assert_allclose(ten, 10 * np.array(once), rtol=1e-6)


def test_the_interval_contains_about_95_percent_of_hours() -> None:
    inside = []
    for seed in range(9, 13):
        trace = made_up_trace(num_days=110, seed=seed)
        forecasts = Forecasts()
        for day in range(80, 105, 4):  # every day of the week; to fit all models anew takes most of the time
            end = day * 24
            for k, hour in enumerate(forecasts(replace(trace, values=trace.values[:end])).hours):
                inside.append(hour.low_g_per_kwh <= trace.values[end + k] <= hour.high_g_per_kwh)

    assert 0.92 <= float(np.mean(inside)) <= 0.98


def test_a_kept_forecaster_agrees_with_a_new_one_up_to_its_daily_refits() -> None:
    trace = made_up_trace(num_days=90)
    kept = Forecasts()
    kept(replace(trace, values=trace.values[: 80 * 24]))

    again = kept(trace).hours
    new = Forecasts()(trace).hours

    for a, b in zip(again, new, strict=True):
        assert a.carbon_intensity_g_per_kwh == pytest.approx(b.carbon_intensity_g_per_kwh, rel=0.05)


def test_skill_is_measured_on_unseen_hours_and_missing_while_they_are_few() -> None:
    trace = made_up_trace(num_days=90)

    early = Forecasts()(replace(trace, values=trace.values[:190])).skill
    later = Forecasts()(trace).skill

    assert early is None
    assert later is not None
    assert later.num_origins > 500


def test_a_perfect_forecast_has_skill_one_and_the_best_naive_one_zero() -> None:
    values = made_up_values(30)
    origins = np.arange(200, 500)
    truth = values[origins[:, None] + np.arange(24)]

    assert skill_against_naive(values, origins, truth).skill_24h_mean_ratio == 1.0
    best = max(
        skill_against_naive(values, origins, table).skill_6h_ratio
        for table in naive_forecasts(values, origins).values()
    )
    assert best == pytest.approx(0.0)


@pytest.mark.parametrize("num_hours", [0, NUM_TARGET_HOURS + 1])
def test_the_number_of_forecast_hours_is_limited(num_hours: int) -> None:
    with pytest.raises(CarbonDataError, match="valid: 1 to 72"):
        Forecasts()(made_up_trace(num_days=9), num_hours=num_hours)


def test_a_series_must_begin_at_a_full_hour_in_utc() -> None:
    with pytest.raises(CarbonDataError, match="full hour in UTC"):
        HourlySeries("XX", FIRST_AT + timedelta(minutes=30), values=(1.0,))


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
