"""Carbon intensities: hourly means, precedence of statuses, boundaries of hours, and the basis of the present one."""

import math
from datetime import datetime, timedelta

import pytest

from gpuenergyd.core.carbon.intensity import (
    HOUR,
    CarbonForecast,
    CarbonSavings,
    ForecastHour,
    HourlySeries,
    IntensityBasis,
    IntensitySample,
    SampleStatus,
    SignalKind,
    grams,
)
from gpuenergyd.errors import CarbonDataError, CarbonSourceError
from gpuenergyd_carbon.rules.hourly_values import checked_intensity, hourly_series
from gpuenergyd_carbon.rules.present_intensity import IntensityNow, StalenessRules, intensity_now, same_hour_mean
from tests.support.carbon_traces import FIRST_AT

SECOND = timedelta(seconds=1)
NAN = math.nan


def series(*values: float) -> HourlySeries:
    return HourlySeries("XX", FIRST_AT, values=values)


def sample(hour: float, hours: float, value: float, status: SampleStatus = SampleStatus.MEASURED) -> IntensitySample:
    begin = FIRST_AT + hour * HOUR
    return IntensitySample(begin, begin + hours * HOUR, value, status)


def test_one_kilowatt_hour_at_one_gram_is_one_gram() -> None:
    assert grams(3.6e6, 1.0) == 1.0


@pytest.mark.parametrize("value", [None, -1, 2001, math.nan, math.inf, "3", True, [1]])
def test_only_values_in_the_range_of_real_grids_are_accepted(value: object) -> None:
    with pytest.raises(CarbonSourceError, match="0 to 2000"):
        checked_intensity(value)


def test_measured_values_take_precedence_over_estimates() -> None:
    both = [sample(0, 1, 100.0), sample(0, 1, 300.0, SampleStatus.ESTIMATED)]

    assert hourly_series("XX", both) == hourly_series("XX", both[::-1])


HISTORY = HourlySeries("XX", FIRST_AT, values=tuple(float(k % 24) for k in range(24 * 10)))
END_AT = HISTORY.end_at
AHEAD = CarbonForecast(
    "XX", END_AT, "m", tuple(ForecastHour(END_AT + k * HOUR, 500.0, 400.0, 600.0) for k in range(24))
)


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("after", "forecast", "basis", "value"),
    [
        (timedelta(minutes=30), AHEAD, IntensityBasis.LIVE, 23.0),
        (timedelta(hours=3), AHEAD, IntensityBasis.FORECAST, 500.0),
        (timedelta(hours=3), None, IntensityBasis.HISTORICAL_MEAN, 3.0),
        (timedelta(days=2), AHEAD, IntensityBasis.HISTORICAL_MEAN, 0.0),
        (timedelta(days=8), AHEAD, IntensityBasis.NEUTRAL, None),
        (timedelta(days=-2), None, IntensityBasis.LIVE, 0.0),
    ],
    ids=["fresh", "old-value", "no-forecast", "old-forecast", "very-old", "clock-set-back"],
)
def test_the_basis_of_the_current_intensity_degrades_with_age(
    after: timedelta, forecast: CarbonForecast | None, basis: IntensityBasis, value: float | None
) -> None:
    here = intensity_now(END_AT + after, HISTORY, forecast)

    assert (here.basis, here.carbon_intensity_g_per_kwh) == (basis, value)


def test_a_fixed_intensity_is_fixed_at_any_age() -> None:
    series = hourly_series("XX", [sample(0, 1, 210.0, SampleStatus.STATIC)])
    assert series is not None

    bases = [intensity_now(series.end_at + after, series, AHEAD) for after in (timedelta(), timedelta(days=30))]

    assert bases == [IntensityNow(210.0, IntensityBasis.FIXED, None)] * 2
    assert series.until(series.end_at).is_fixed


def test_without_history_the_basis_is_neutral() -> None:
    assert intensity_now(END_AT, None).basis is IntensityBasis.NEUTRAL


def test_an_interval_requires_a_time_zone_and_a_positive_length() -> None:
    with pytest.raises(CarbonDataError, match="time zone"):
        IntensitySample(FIRST_AT.replace(tzinfo=None), FIRST_AT, 1.0)
    with pytest.raises(CarbonDataError, match="end after it begins"):
        IntensitySample(FIRST_AT, FIRST_AT, 1.0)


@pytest.mark.parametrize(
    "first_at",
    [
        *(FIRST_AT + off for off in (SECOND, timedelta(minutes=1), timedelta(microseconds=1))),
        FIRST_AT.replace(tzinfo=None),
    ],
)
def test_an_hourly_series_begins_at_a_full_hour_in_utc(first_at: datetime) -> None:
    with pytest.raises(CarbonDataError, match="must be a full hour in UTC"):
        HourlySeries("XX", first_at, values=(1.0,))


@pytest.mark.parametrize(
    ("value", "kind", "ok"),
    [
        (0, SignalKind.AVERAGE, True),
        (2000.0, SignalKind.AVERAGE, True),
        (2000.1, SignalKind.AVERAGE, False),
        (-0.1, SignalKind.AVERAGE, False),
        (3000, SignalKind.MARGINAL, True),
        (3000.1, SignalKind.MARGINAL, False),
    ],
)
def test_an_intensity_is_between_zero_and_the_maximum_of_its_kind(value: float, kind: SignalKind, *, ok: bool) -> None:
    if ok:
        assert checked_intensity(value, kind) == value
    else:
        with pytest.raises(CarbonSourceError, match="not a number from 0 to"):
            checked_intensity(value, kind)


def test_an_instant_belongs_to_its_current_hour() -> None:
    two = series(1.0, 2.0)

    assert [two.index_of(FIRST_AT + k * HOUR) for k in (-1, 0, 1, 2)] == [-1, 0, 1, 2]
    assert two.index_of(FIRST_AT + HOUR - SECOND) == 0
    assert two.index_of(FIRST_AT - SECOND) == -1
    assert two.end_at == FIRST_AT + 2 * HOUR


def test_a_replay_includes_complete_hours_only() -> None:
    two = series(1.0, 2.0)

    known = [len(two.until(FIRST_AT + at).values) for at in (-HOUR, HOUR - SECOND, HOUR, 2 * HOUR, 9 * HOUR)]

    assert known == [0, 0, 1, 2, 2]


def test_an_hour_known_for_less_than_half_is_unknown() -> None:
    half = hourly_series("XX", [sample(0, 0.5, 100.0), sample(1, 0.499, 100.0), sample(2, 1, 7.0)])

    assert half is not None
    assert half.values[0] == 100.0
    assert math.isnan(half.values[1])
    assert half.values[2] == 7.0
    assert half.first_hour_at == FIRST_AT


def test_a_sample_over_several_hours_counts_in_each_by_its_time() -> None:
    found = hourly_series("XX", [sample(0.5, 2, 100.0), sample(0, 0.5, 300.0), sample(2.5, 0.5, 500.0)])

    assert found is not None
    assert found.values == (200.0, 100.0, 300.0)


def test_of_two_samples_of_one_status_the_later_one_counts() -> None:
    found = hourly_series("XX", [sample(0, 1, 100.0), sample(0, 1, 200.0)])

    assert found is not None
    assert found.values == (200.0,)
    assert hourly_series("XX", []) is None


def test_a_forecast_value_is_valid_for_its_whole_hour() -> None:
    ahead = CarbonForecast("XX", FIRST_AT, "m", tuple(
        ForecastHour(FIRST_AT + k * HOUR, float(k), 0.0, 9.0) for k in range(2)
    ))  # fmt: skip

    assert [ahead.value_at(FIRST_AT + at) for at in (-SECOND, 0 * HOUR, HOUR - SECOND, HOUR, 2 * HOUR - SECOND)] == [
        None, 0.0, 0.0, 1.0, 1.0,
    ]  # fmt: skip
    assert ahead.value_at(FIRST_AT + 2 * HOUR) is None


DAYS = series(*[float(k % 24) for k in range(240)])


def forecast(issued_before: timedelta, value: float = 500.0) -> CarbonForecast:
    """Return one that reaches every hour looked at here, issued some time before the history ends."""
    hours = tuple(ForecastHour(DAYS.end_at + k * HOUR, value, 0.0, 9e9) for k in range(400))
    return CarbonForecast("XX", DAYS.end_at - issued_before, "m", hours)


@pytest.mark.parametrize(
    ("after", "basis"),
    [
        (2 * HOUR, IntensityBasis.LIVE),
        (2 * HOUR + SECOND, IntensityBasis.FORECAST),
        (23 * HOUR, IntensityBasis.FORECAST),
        (23 * HOUR + SECOND, IntensityBasis.HISTORICAL_MEAN),
        (timedelta(days=7), IntensityBasis.HISTORICAL_MEAN),
        (timedelta(days=7) + SECOND, IntensityBasis.NEUTRAL),
    ],
)
def test_default_maximum_ages_are_two_hours_one_day_and_one_week(after: timedelta, basis: IntensityBasis) -> None:
    found = intensity_now(DAYS.end_at + after, DAYS, forecast(HOUR))

    assert found.basis is basis
    assert found.age_s == after.total_seconds()


def test_maximum_ages_are_configurable() -> None:
    rules = StalenessRules(live_max_age_s=0.0, forecast_max_age_s=0.0, history_max_age_s=0.0)

    assert intensity_now(DAYS.end_at, DAYS, rules=rules).basis is IntensityBasis.LIVE
    assert intensity_now(DAYS.end_at + SECOND, DAYS, forecast(HOUR), rules=rules).basis is IntensityBasis.NEUTRAL


def test_a_single_known_hour_is_sufficient() -> None:
    now = FIRST_AT + 2 * HOUR

    assert intensity_now(now, series(5.0)).carbon_intensity_g_per_kwh == 5.0
    assert intensity_now(now, series(5.0, NAN)).carbon_intensity_g_per_kwh == 5.0
    assert intensity_now(now, series(5.0)).age_s == 3600.0
    assert intensity_now(now, series(NAN, NAN)).basis is IntensityBasis.NEUTRAL
    assert intensity_now(now, series(NAN)).age_s is None


def test_the_current_hour_is_used_if_known_else_the_newest() -> None:
    known = series(1.0, NAN, 3.0, 4.0)

    for hour, value in ((0.5, 1.0), (1.5, 4.0), (2.5, 3.0), (3.5, 4.0), (-5.0, 1.0)):
        assert intensity_now(FIRST_AT + hour * HOUR, known).carbon_intensity_g_per_kwh == value
    assert intensity_now(FIRST_AT + HOUR, known).age_s == 0.0


def test_a_forecast_without_a_value_is_not_used() -> None:
    found = intensity_now(DAYS.end_at + 3 * HOUR, DAYS, forecast(HOUR, NAN))

    assert found.basis is IntensityBasis.HISTORICAL_MEAN
    assert intensity_now(DAYS.end_at, None, forecast(HOUR)).basis is IntensityBasis.FORECAST


def test_the_same_hours_mean_is_of_the_last_seven_known_days() -> None:
    """Hour 3 of ten days holds 0 to 9; the second last is unknown."""
    values = [0.0] * 240
    values[3::24] = [float(day) for day in range(10)]
    values[8 * 24 + 3] = NAN
    known = series(*values)

    assert same_hour_mean(known, FIRST_AT + 3 * HOUR) == pytest.approx((9 + 7 + 6 + 5 + 4 + 3 + 2) / 7)
    assert same_hour_mean(known, known.end_at + 3 * HOUR + timedelta(minutes=59), 2) == 8.0
    assert same_hour_mean(series(1.0), FIRST_AT + HOUR) is None


def test_frontier_saving_and_timing_gain_are_separate() -> None:
    saved = CarbonSavings(actual_g=80.0, full_speed_g=100.0, equal_time_constant_g=90.0)

    assert (saved.saved_by_frontier_g, saved.saved_by_timing_g) == (10.0, 10.0)
    assert CarbonSavings(95.0, 100.0, 90.0).saved_by_timing_g == -5.0
