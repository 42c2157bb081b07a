"""Carbon intensities: hourly means, precedence of statuses, and the basis of the current intensity."""

import math
from datetime import datetime, timedelta

import pytest

from gpuenergyd.core.carbon.intensity import (
    HOUR,
    CarbonForecast,
    ForecastHour,
    HourlySeries,
    IntensityBasis,
    IntensityNow,
    IntensitySample,
    SampleStatus,
    checked_intensity,
    grams,
    hourly_series,
    intensity_now,
)
from gpuenergyd.errors import CarbonDataError, CarbonSourceError
from tests.support.carbon_traces import FIRST_AT


def sample(
    minutes: float, lasts_minutes: float, value: float, status: SampleStatus = SampleStatus.MEASURED
) -> IntensitySample:
    begin = FIRST_AT + timedelta(minutes=minutes)
    return IntensitySample(begin, begin + timedelta(minutes=lasts_minutes), value, status)


def test_one_kilowatt_hour_at_one_gram_is_one_gram() -> None:
    assert grams(3.6e6, 1.0) == 1.0


@pytest.mark.parametrize("value", [None, -1, 2001, math.nan, math.inf, "3", True, [1]])
def test_only_values_in_the_range_of_real_grids_are_accepted(value: object) -> None:
    with pytest.raises(CarbonSourceError, match="0 to 2000"):
        checked_intensity(value)


def test_measured_values_take_precedence_over_estimates() -> None:
    both = [sample(0, 60, 100.0), sample(0, 60, 300.0, SampleStatus.ESTIMATED)]

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
    series = hourly_series("XX", [sample(0, 60, 210.0, SampleStatus.STATIC)])
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


@pytest.mark.parametrize("first_at", [FIRST_AT + timedelta(minutes=30), FIRST_AT.replace(tzinfo=None)])
def test_an_hourly_series_begins_at_a_full_hour_in_utc(first_at: datetime) -> None:
    with pytest.raises(CarbonDataError, match="must be a full hour in UTC"):
        HourlySeries("XX", first_at, values=(1.0,))
