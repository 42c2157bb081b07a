"""Grouped reports count every joule once: for a job or for nobody."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpuenergyd.report.groups import Group, groups_by_day, groups_by_gpu, groups_by_user
from gpuenergyd.report.job import job_reports
from gpuenergyd.store import History, open_history
from tests.support.sample_history import NUM_RANKS, START, write_sample_history

ALL_J = sum(14 * (50.0 + rank) + 2 * 60.0 for rank in range(NUM_RANKS))


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with open_history(write_sample_history(tmp_path / "history.sqlite3")) as history:
        yield history


def test_gpus_and_days_add_up_to_the_same_energy(history: History) -> None:
    by_gpu = groups_by_gpu(history, since=None, until=None)
    by_day = groups_by_day(history, since=None, until=None, zone=UTC)

    assert [group.name for group in by_gpu] == [f"GPU-{rank}" for rank in range(NUM_RANKS)]
    assert sum(group.energy_j or 0.0 for group in by_gpu) == pytest.approx(ALL_J)
    (day,) = by_day
    assert day.name == "2026-03-01"
    assert day.energy_j == pytest.approx(ALL_J)


def test_idle_energy_belongs_to_no_job(history: History) -> None:
    first = groups_by_gpu(history, since=None, until=None)[0]

    assert first.job_energy_j == pytest.approx(14 * 50.0)
    assert first.idle_energy_j == pytest.approx(2 * 60.0)
    assert first.job_ids == {"gpt-1"}


def test_a_day_ends_at_midnight_of_the_readers_zone(history: History) -> None:
    zone = timezone(timedelta(hours=12))  # the job began at its midnight, two idle seconds before

    days = groups_by_day(history, since=None, until=None, zone=zone)

    assert [(day.name, day.idle_energy_j, day.job_ids) for day in days] == [
        ("2026-03-01", pytest.approx(2 * 60.0 * NUM_RANKS), set()),
        ("2026-03-02", None, {"gpt-1"}),
    ]


def test_a_span_of_time_leaves_other_samples_out(history: History) -> None:
    groups = groups_by_gpu(history, since=None, until=START)

    assert [group.energy_j for group in groups] == [pytest.approx(2 * 60.0)] * NUM_RANKS


def test_users_are_charged_for_their_jobs(history: History) -> None:
    reports = job_reports(history)

    (group,) = groups_by_user(reports)

    assert group.name == "0"
    assert group.energy_j == reports[0].summary.energy_j
    assert group.saved_energy_j == reports[0].saved_energy_j


def test_a_group_in_which_nothing_was_measured_is_missing_and_costs_nothing_known() -> None:
    figures = Group("GPU-9").figures(0.3)

    assert figures["energy_j"] is figures["idle_energy_j"] is figures["cost"] is None


def test_cost_is_energy_times_price() -> None:
    group = Group("GPU-0", job_energy_j=1.8e6, idle_energy_j=1.8e6)

    assert group.figures(0.25)["cost"] == pytest.approx(0.25)


def test_an_empty_history_has_no_groups(history: History) -> None:
    later = datetime(2026, 4, 1, tzinfo=UTC)

    assert groups_by_gpu(history, since=later, until=None) == ()
