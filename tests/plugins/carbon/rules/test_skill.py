"""Live skill of issued forecasts, and the grid clock."""

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, ForecastHour, HourlySeries
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.rules.grid_clock import GridClock
from gpuenergyd_carbon.rules.skill import LiveSkill
from tests.support.carbon_traces import made_up_trace

TRACE = made_up_trace(num_days=16, seed=3)
FIRST = 8 * 24


def issued(first: int, off: float = 0.0) -> CarbonForecast:
    """Return a forecast that knows the truth but for `off`."""
    at = TRACE.first_hour_at + first * HOUR
    hours = tuple(
        ForecastHour(at + k * HOUR, value + off, value, value)
        for k, value in enumerate(TRACE.values[first : first + 24])
    )
    return CarbonForecast(TRACE.zone, at, "test", hours)


def tracked(off: float, num: int = 48, history: HourlySeries = TRACE) -> LiveSkill:
    skill = LiveSkill()
    for first in range(FIRST, FIRST + num):
        skill.add(issued(first, off))
    skill.update(history)
    return skill


def test_perfect_forecasts_have_skill_one_and_bad_ones_negative_skill() -> None:
    perfect, bad = tracked(0.0).skill(), tracked(500.0).skill()

    assert perfect is not None
    assert bad is not None
    assert (perfect.skill_1h_ratio, perfect.skill_24h_mean_ratio, perfect.num_origins) == (1.0, 1.0, 48)
    assert bad.skill_24h_mean_ratio < 0


def test_skill_is_unknown_before_a_day_of_forecasts_is_compared() -> None:
    assert tracked(0.0, num=23).skill() is None
    assert tracked(0.0, num=24).skill() is not None
    assert tracked(0.0, history=TRACE.until(TRACE.first_hour_at + (FIRST + 30) * HOUR)).skill() is None


def test_a_second_forecast_of_the_same_hour_cannot_improve_the_first() -> None:
    skill = LiveSkill()
    for first in range(FIRST, FIRST + 30):
        skill.add(issued(first, 500.0))
        skill.add(issued(first, 0.0))
    skill.update(TRACE)

    output = skill.skill()
    assert output is not None
    assert output.skill_1h_ratio < 0


def test_an_incomplete_forecast_is_not_compared() -> None:
    short, late = LiveSkill(), LiveSkill()
    for first in range(FIRST, FIRST + 48):
        whole = issued(first)
        short.add(replace(whole, hours=whole.hours[:23]))
        late.add(replace(whole, hours=issued(first + 1).hours))
    short.update(TRACE)
    late.update(TRACE)

    assert short.skill() is None
    assert late.skill() is None


def test_forecasts_of_unknown_hours_are_dropped_after_a_week() -> None:
    values = list(TRACE.values)
    values[FIRST + 50] = math.nan
    holed = replace(TRACE, values=tuple(values))

    skill = tracked(0.0, num=60, history=holed).skill()

    assert skill is not None
    assert skill.num_origins == 27  # those whose day ends before it; the hole is in every later week


def test_a_forecast_is_compared_once_and_not_before_its_day_is_known() -> None:
    values = list(TRACE.values)
    hole = FIRST + 40
    values[hole] = math.nan
    skill = LiveSkill()
    for first in range(FIRST, FIRST + 48):
        skill.add(issued(first))

    skill.update(replace(TRACE, values=tuple(values)).until(TRACE.first_hour_at + (hole + 40) * HOUR))
    early = skill.skill()
    skill.update(TRACE)  # the missing hour has become known within the week
    late = skill.skill()
    skill.update(TRACE)

    assert early is None
    assert late is not None
    assert late.num_origins == 48
    assert skill.skill() == late


def test_an_accelerated_grid_clock_maps_both_ways() -> None:
    host_at = datetime(2026, 5, 1, 12, 0, 30, tzinfo=UTC)
    clock = GridClock(host_at, datetime(2024, 1, 15, tzinfo=UTC), hour_s=6.0)

    assert clock.speed == 600.0
    assert clock.to_grid(host_at + timedelta(seconds=9)) == datetime(2024, 1, 15, 1, 30, tzinfo=UTC)
    assert clock.hour_of(host_at + timedelta(seconds=9)) == datetime(2024, 1, 15, 1, tzinfo=UTC)
    assert clock.to_host(datetime(2024, 1, 15, 1, tzinfo=UTC)) == host_at + timedelta(seconds=6)


def test_in_real_time_grid_time_equals_host_time() -> None:
    now_at = datetime(2026, 5, 1, 12, 0, 30, 123456, tzinfo=UTC)
    clock = GridClock.real_time(now_at)

    assert clock.to_grid(now_at + HOUR) == clock.to_host(now_at + HOUR) == now_at + HOUR
    assert clock.hour_of(now_at) == datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("hour_s", [0.0, -1.0, 3601.0, math.nan])
def test_an_invalid_length_of_a_grid_hour_is_rejected(hour_s: float) -> None:
    with pytest.raises(CarbonDataError, match="length of a grid hour"):
        GridClock(datetime(2026, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=UTC), hour_s)


def test_a_forecast_is_not_compared_without_a_week_of_history() -> None:
    skill = LiveSkill()
    for first in range(7 * 24):
        skill.add(issued(first))
    skill.update(TRACE)

    assert skill.skill() is None


def test_skill_is_one_minus_the_ratio_to_the_best_naive_error() -> None:
    """A grid that stands at 100 for a week and then rises by 10 an hour: persistence and all others are off alike."""
    values = (100.0,) * 168 + tuple(100.0 + 10 * (k + 1) for k in range(100))
    start = TRACE.first_hour_at
    history = HourlySeries("XX", start, values=values)
    skill = LiveSkill()
    at = start + 168 * HOUR
    hours = tuple(
        ForecastHour(at + k * HOUR, 100.0 + 10 * (k + 1) + (1.0 if k == 5 else 0.5), 0.0, 0.0) for k in range(24)
    )
    skill.add(CarbonForecast("XX", at, "m", hours))
    skill.update(HourlySeries("XX", start, values=values[: 168 + 23]))
    assert len(skill._waiting) == 1
    skill.update(history)

    ((ours, naive),) = skill._compared_errors

    assert ours == pytest.approx((0.5, 1.0, (23 * 0.5 + 1.0) / 24))
    assert len(naive) == 4
    for errors in naive:
        assert errors == pytest.approx((10.0, 60.0, 125.0))
    assert skill._waiting == {}


def test_naive_forecasts_are_persistence_yesterday_last_week_and_the_hourly_mean() -> None:
    """Every day holds its own number, so that each of them says another one of an eighth day of 100."""
    values = tuple(float(k // 24) for k in range(168)) + (100.0,) * 24
    start = TRACE.first_hour_at
    skill = LiveSkill()
    at = start + 168 * HOUR
    skill.add(CarbonForecast("XX", at, "m", tuple(ForecastHour(at + k * HOUR, 99.0, 0.0, 0.0) for k in range(24))))
    skill.update(HourlySeries("XX", start, values=values))

    ((ours, naive),) = skill._compared_errors

    assert ours == (1.0, 1.0, 1.0)
    assert [errors[0] for errors in naive] == [94.0, 94.0, 100.0, 97.0]


def test_an_exact_naive_forecast_gives_skill_zero() -> None:
    flat = HourlySeries(TRACE.zone, TRACE.first_hour_at, values=(100.0,) * len(TRACE.values))

    output = tracked(0.0, history=flat).skill()

    assert output is not None
    assert (output.skill_1h_ratio, output.skill_6h_ratio, output.skill_24h_mean_ratio) == (0.0, 0.0, 0.0)


def test_each_horizon_is_compared_with_its_best_naive_forecast() -> None:
    skill = LiveSkill()
    for _ in range(24):
        skill._compared_errors.append(((1.0, 3.0, 10.0), ((10.0, 10.0, 20.0), (20.0, 5.0, 40.0))))

    output = skill.skill()

    assert output is not None
    ratios = [output.skill_1h_ratio, output.skill_6h_ratio, output.skill_24h_mean_ratio]
    assert ratios == pytest.approx([0.9, 0.4, 0.5])
    assert output.num_origins == 24
