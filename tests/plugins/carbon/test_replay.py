"""A replay does what the controller would have done: exact accounting, no look-ahead, no exceeded budget."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon.lab.replay import chase_speeds, replay
from gpuenergyd_carbon.lab.results import ReplayRequest, ZoneReplay
from gpuenergyd_carbon.policy.budget import speed_hull
from gpuenergyd_carbon.policy.jobs import TraceJob
from tests.support.carbon_traces import FIRST_AT, made_up_trace, made_up_values

FRONTIER = ((1.0, 100.0), (1.02, 96.0), (1.05, 92.0), (1.1, 88.0), (1.2, 85.0))
REQUEST = ReplayRequest(
    (made_up_trace(num_days=70),), FRONTIER, FIRST_AT + timedelta(days=50), num_starts=12, job_hours=30.0
)


@pytest.fixture(scope="module")
def result() -> ZoneReplay:
    return replay(replace(REQUEST, want_forecasts=True))[0]


def replayed(result: ZoneReplay) -> list[tuple[float, float, float]]:
    """Return saving, time and constant saving of each job, computed from its choices alone."""
    energy_j = dict(FRONTIER)
    trace = REQUEST.traces[0]
    figures = []
    for job in result.jobs:
        left, time_s, carbon = REQUEST.job_hours * 3600 / 1.0, 0.0, 0.0
        full, full_left = 0.0, left
        for k, choice in enumerate(job.choices):
            truth = trace.values[trace.index_of(job.start_at) + k]
            now = min(3600.0, full_left)
            full += truth * now * energy_j[1.0]
            full_left -= now
            for time_per, share in choice if isinstance(choice, tuple) else ((choice, 1.0),):
                part_s = min(3600.0 * share, left * time_per)
                left -= part_s / time_per
                time_s += part_s
                carbon += truth * part_s / time_per * energy_j[time_per]
        assert left <= 1e-6 * REQUEST.job_hours * 3600
        figures.append((1 - carbon / full, time_s, full))
    return figures


def test_the_figures_follow_from_the_choices(result: ZoneReplay) -> None:
    figures = replayed(result)

    assert np.mean([saving for saving, _, _ in figures]) == pytest.approx(result.achieved_saving_ratio, abs=2e-4)
    assert max(time_s for _, time_s, _ in figures) <= 30 * 3600 * 1.025


def test_no_controlled_job_exceeds_its_budget(result: ZoneReplay) -> None:
    for method in result.methods:
        if method.name != "chase":
            assert method.time_used_ratio_max <= 1.0


def test_a_perfect_forecast_saves_most_and_every_forecast_beats_constant_speed(result: ZoneReplay) -> None:
    assert result.oracle_saving_ratio >= max(m.saving_ratio for m in result.methods if m.name != "chase")
    assert result.timing_gain_ratio > 0
    assert 0.2 < result.captured_ratio <= 1.0


def test_forecasts_are_issued_every_hour_for_a_day(result: ZoneReplay) -> None:
    assert result.first_issued_at == REQUEST.train_until_at
    assert len(result.forecasts) == 20 * 24
    assert {len(row) for row in result.forecasts} == {24}


def test_the_same_seed_draws_the_same_jobs() -> None:
    short = replace(REQUEST, num_starts=3)

    assert [j.start_at for j in replay(short)[0].jobs] == [j.start_at for j in replay(short)[0].jobs]


def test_given_starts_are_used_unchanged() -> None:
    start = REQUEST.train_until_at + timedelta(hours=7)

    zone = replay(replace(REQUEST, starts_at={"XX": (start,)}))[0]

    assert [job.start_at for job in zone.jobs] == [start]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_until_at": FIRST_AT + timedelta(days=3)}, "8 days before"),
        ({"train_until_at": FIRST_AT + timedelta(days=300)}, "a day after"),
        ({"num_starts": 10**6}, "is out of range"),
        ({"starts_at": {"XX": (FIRST_AT,)}}, "must be a full hour from"),
        ({"starts_at": {"XX": ()}}, "empty"),
        ({"max_slowdown_ratio": -0.1}, "budget"),
        ({"job_hours": 0.0}, "job length"),
        ({"frontier": ()}, "frontier"),
    ],
)
def test_an_invalid_request_is_refused_with_a_reason(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CarbonDataError, match=words):
        replay(replace(REQUEST, **change))


def test_constant_speed_of_equal_time_separates_the_two_savings() -> None:
    hull = speed_hull(FRONTIER)
    job = TraceJob(hull, made_up_values(5)[:60], 30 * 3600.0, 0.05)

    run = job.oracle()

    assert run.constant_g == pytest.approx(job.constant_g(run.time_s))
    assert run.carbon_g < run.constant_g < job.constant_g(job.job_s)


def test_a_replay_of_training_data_is_marked() -> None:
    named = replace(REQUEST, traces=(made_up_trace("GB", num_days=70),), num_starts=1)

    assert "not a test" in replay(named)[0].notes[0]
    assert replay(replace(REQUEST, num_starts=1))[0].notes == ()


def test_a_budget_of_zero_is_full_speed() -> None:
    job = TraceJob(speed_hull(FRONTIER), made_up_values(5)[:60], 30 * 3600.0, 0.0)

    assert job.oracle().carbon_g == pytest.approx(job.constant_g(job.job_s))


def test_chases_rule_slows_down_with_intensity_without_a_budget() -> None:
    hull = speed_hull(FRONTIER)
    speeds = chase_speeds(hull, np.array([0.0, 300.0, 1500.0, 1e5])).tolist()

    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] == hull.full_speed_per_s
    assert speeds[-1] == hull.speeds_per_s[0]
