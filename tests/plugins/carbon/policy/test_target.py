"""The carbon target follows the grid, never exceeds its budget, and is neutral without a signal."""

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, ForecastHour, HourlySeries, IntensityBasis
from gpuenergyd.core.policy_api.policy import BaselineView, FrontierPoint
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.target_policy import TargetView
from gpuenergyd_carbon.policy.target import CarbonTarget, ConstantSlowdown
from tests.support.carbon_traces import FIRST_AT
from tests.support.examples import examples

POINTS = ((1.0, 100.0), (1.02, 96.0), (1.05, 92.0), (1.1, 88.0), (1.2, 85.0))
FRONTIER = tuple(FrontierPoint(t, e, None) for t, e in POINTS)
HISTORY_DAYS = 20
START_AT = FIRST_AT + timedelta(days=HISTORY_DAYS)


def series(values: list[float]) -> HourlySeries:
    return HourlySeries("XX", FIRST_AT, values=tuple(values))


def forecast(values: list[float], at: object = START_AT) -> CarbonForecast:
    assert at is not None
    hours = tuple(ForecastHour(START_AT + k * HOUR, v, v, v) for k, v in enumerate(values))
    return CarbonForecast("XX", START_AT, "given", hours)


VIEW = TargetView(
    job_id="j", now_at=START_AT, max_slowdown_ratio=0.05, baseline=BaselineView(1.0, 100.0, 10),
    num_iterations_done=0, active_time_s=0.0, frontier=FRONTIER, num_iterations_total=24 * 3600,
    history=series([200.0] * 24 * HISTORY_DAYS),
)  # fmt: skip


def asked_time_s(view: TargetView) -> float:
    return CarbonTarget().next_target(view).iteration_time_s(view.baseline.iteration_time_s)


def test_a_dirty_hour_runs_slower_than_a_clean_one() -> None:
    dirty = replace(VIEW, forecast=forecast([500.0] + [100.0] * 23))
    clean = replace(VIEW, forecast=forecast([20.0] + [300.0] * 23))

    assert asked_time_s(dirty) > 1.1
    assert asked_time_s(clean) == 1.0


@pytest.mark.parametrize(
    ("change", "basis"),
    [
        ({"history": None}, IntensityBasis.NEUTRAL),
        ({"history": series([math.nan] * 480)}, IntensityBasis.NEUTRAL),
        ({"history": series([200.0] * 24)}, IntensityBasis.NEUTRAL),
        ({"history": series([200.0] * 24 * (HISTORY_DAYS - 2))}, IntensityBasis.HISTORICAL_MEAN),
        ({"history": None, "forecast": forecast([500.0] * 24)}, IntensityBasis.FORECAST),
        ({}, IntensityBasis.LIVE),
    ],
    ids=["nothing", "all-missing", "too-old", "days-old", "forecast-only", "fresh"],
)
def test_a_decision_names_its_basis(change: dict[str, Any], basis: IntensityBasis) -> None:
    decision = CarbonTarget().explain(replace(VIEW, **change))

    assert decision.basis is basis
    assert decision.reason


@pytest.mark.fault(22)
def test_without_a_signal_the_budget_is_spent_evenly() -> None:
    assert asked_time_s(replace(VIEW, history=None)) == pytest.approx(1.05, rel=2e-3)


def test_a_forecast_without_skill_is_not_followed() -> None:
    from gpuenergyd.core.carbon.intensity import ForecastSkill  # noqa: PLC0415  one use

    unskilled = replace(forecast([500.0] + [100.0] * 23), skill=ForecastSkill(0.1, 0.0, -0.05, 500))

    assert asked_time_s(replace(VIEW, forecast=unskilled)) == pytest.approx(1.05, rel=2e-3)


def test_without_a_frontier_the_budget_is_spent_as_a_constant_slowdown() -> None:
    view = replace(VIEW, frontier=(), straggler_time_s=1.3)

    assert (
        CarbonTarget().next_target(view)
        == ConstantSlowdown().next_target(view)
        == PerformanceTarget(0.05, straggler_time_s=1.3)
    )


def test_waiting_for_a_straggler_is_not_charged_to_the_budget() -> None:
    target = CarbonTarget().next_target(replace(VIEW, straggler_time_s=1.15))

    assert target.is_forced
    assert target.iteration_time_s(1.0) >= 1.15


def test_a_job_without_slack_runs_at_full_speed_and_reports_the_overrun() -> None:
    late = replace(VIEW, num_iterations_done=3600, active_time_s=3600 * 3.0)

    decision = CarbonTarget().explain(late)

    assert decision.target.iteration_time_s(1.0) == 1.0
    assert decision.overrun_s == pytest.approx(3600 * 3 + 23 * 3600 - 24 * 3600 * 1.05)


def test_a_deadline_has_precedence_over_the_budget() -> None:
    tight = replace(VIEW, deadline_at=START_AT + timedelta(hours=24.1), forecast=forecast([900.0] * 4 + [1.0] * 20))

    assert asked_time_s(tight) < asked_time_s(replace(tight, deadline_at=None))


def test_host_power_reduces_the_benefit_of_slowing_down() -> None:
    dirty = replace(VIEW, max_slowdown_ratio=0.3, forecast=forecast([500.0] + [490.0] * 23))

    assert asked_time_s(replace(dirty, host_power_w=60.0)) < asked_time_s(dirty)


def test_a_negative_price_means_full_speed() -> None:
    prices = HourlySeries("XX", FIRST_AT, values=(80.0,) * 24 * HISTORY_DAYS, unit="EUR/MWh")
    given = replace(forecast([-20.0] + [80.0] * 23), unit="EUR/MWh")

    assert asked_time_s(replace(VIEW, history=prices, forecast=given)) == 1.0


def test_an_insignificant_change_keeps_the_target() -> None:
    view = replace(VIEW, forecast=forecast([220.0] + [200.0] * 23))
    wanted = asked_time_s(view)

    assert asked_time_s(replace(view, current_target_time_s=wanted * 0.999)) == pytest.approx(wanted * 0.999)


@settings(max_examples=examples(25), deadline=None)
@example([0.0] * 26 + [2.9961552247705265e306] + [0.0] * 13, 0.125, False, 144)
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=40, max_size=40),
    st.floats(0.0, 0.15),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_no_signal_or_straggler_makes_a_job_exceed_its_budget(
    signal: list[float],
    budget: float,
    is_total_known: bool,  # noqa: FBT001  hypothesis passes it by name
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    total = 20 * 3600
    done, active_s, now_at = 0.0, 0.0, START_AT + timedelta(minutes=float(rng.uniform(0, 59)))
    hour = 0
    while done < total:
        view = replace(
            VIEW,
            now_at=now_at,
            max_slowdown_ratio=budget,
            num_iterations_done=int(done),
            active_time_s=active_s,
            num_iterations_total=total if is_total_known else None,
            forecast=forecast(signal[hour % 40 :]) if rng.uniform() < 0.8 else None,
            history=VIEW.history if rng.uniform() < 0.8 else None,
        )
        time_s = asked_time_s(view)
        assert 1.0 <= time_s <= 1.2 * (1 + 1e-9)
        lasts_s = min(3600.0 - now_at.timestamp() % 3600.0, (total - done) * time_s)
        done += lasts_s / time_s
        active_s += lasts_s
        now_at += timedelta(seconds=math.ceil(lasts_s))
        hour += 1

    if is_total_known:
        assert active_s <= total * (1 + budget) * (1 + 1e-9) + 2.0  # whole iterations are counted
    else:  # inside a window the account may be negative, by no more than full speed repays until its end
        overdrawn_s = active_s - total * (1 + budget)
        assert overdrawn_s <= budget * (72 * 3600 - active_s) + 2.0
