"""Grouped reports count every joule once: for a job or as idle."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpuenergyd.core.carbon.intensity import EmissionFactor, SampleStatus, SignalKind
from gpuenergyd.quantities.energy_use import EnergyUse
from gpuenergyd.quantities.rates import Rates
from gpuenergyd.quantities.tariff import Tariff, TariffPeriod
from gpuenergyd.report.carbon import CarbonReport
from gpuenergyd.report.group_keys import GroupBy
from gpuenergyd.report.groups import IDLE_GROUP, UNTAGGED_GROUP, EnergyQuery, Group, grouped
from gpuenergyd.report.job import job_reports
from gpuenergyd.store import History, open_history
from gpuenergyd.store.reading.energy_sums import EnergySum
from gpuenergyd.store.records import IntensityRecord, RollupRecord
from tests.store.maintenance.test_compaction import NOW, compact, write_long_job
from tests.support.sample_history import NUM_RANKS, START, write_sample_history
from tests.support.stored_history import write_records

ALL_J = sum(14 * (50.0 + rank) + 2 * 60.0 for rank in range(NUM_RANKS))
NUM_ITERATIONS = 6000
BEGUN = NOW - timedelta(days=10)


def part(
    energy_j: float | None,
    *,
    estimated_j: float | None = None,
    missing_s: float = 0.0,
    job_id: str = "",
    started_at: datetime | None = None,
) -> EnergySum:
    return EnergySum("GPU-0", started_at, job_id, energy_j, estimated_j, 0.0, 0.0, missing_s)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with open_history(write_sample_history(tmp_path / "history.sqlite3")) as history:
        yield history


def test_gpus_and_days_add_up_to_the_same_energy(history: History) -> None:
    by_gpu = grouped(EnergyQuery(history), (), [GroupBy.GPU])
    by_day = grouped(EnergyQuery(history), (), [GroupBy.DAY], zone=UTC)

    assert [group.name for group in by_gpu] == [f"GPU-{rank}" for rank in range(NUM_RANKS)]
    assert sum(group.energy_j or 0.0 for group in by_gpu) == pytest.approx(ALL_J)
    (day,) = by_day
    assert day.name == "2026-03-01"
    assert day.energy_j == pytest.approx(ALL_J)


def test_a_month_begins_at_midnight_in_the_time_zone_of_the_report(history: History) -> None:
    zone = timezone(timedelta(hours=-13))  # midnight one hour after the job

    (february,) = grouped(EnergyQuery(history), (), [GroupBy.MONTH], zone=zone)
    (march,) = grouped(EnergyQuery(history), (), [GroupBy.MONTH], zone=UTC)

    assert (february.name, march.name) == ("2026-02", "2026-03")
    assert february.energy_j == march.energy_j == pytest.approx(ALL_J)


def test_idle_energy_belongs_to_no_job(history: History) -> None:
    first = grouped(EnergyQuery(history), (), [GroupBy.GPU])[0]

    assert first.by_jobs.energy_j == pytest.approx(14 * 50.0)
    assert first.idle.energy_j == pytest.approx(2 * 60.0)
    assert first.job_ids == {"gpt-1"}


def test_a_day_ends_at_midnight_in_the_time_zone_of_the_report(history: History) -> None:
    zone = timezone(timedelta(hours=12))  # the job began at its midnight, two idle seconds before

    days = grouped(EnergyQuery(history), (), [GroupBy.DAY], zone=zone)

    assert [(day.name, day.idle.energy_j, day.job_ids) for day in days] == [
        ("2026-03-01", pytest.approx(2 * 60.0 * NUM_RANKS), set()),
        ("2026-03-02", None, {"gpt-1"}),
    ]


def test_a_time_range_excludes_other_samples(history: History) -> None:
    groups = grouped(EnergyQuery(history, until=START), (), [GroupBy.GPU])

    assert [group.energy_j for group in groups] == [pytest.approx(2 * 60.0)] * NUM_RANKS


def test_users_and_idle_time_add_up_to_the_energy_of_the_gpus(history: History) -> None:
    reports = job_reports(history)

    user, idle = grouped(EnergyQuery(history), reports, [GroupBy.USER])

    assert (user.name, idle.name) == ("root", IDLE_GROUP)
    assert user.saved_energy_j == reports[0].saved_energy_j
    assert (user.energy_j or 0) + (idle.energy_j or 0) == pytest.approx(ALL_J)
    assert idle.to_dict()["job_energy_j"] is None


def test_a_user_without_a_name_on_this_host_is_shown_by_uid(history: History) -> None:
    (report,) = job_reports(history)
    gone = replace(report, summary=replace(report.summary, uid=2_000_000_111))

    (user,) = grouped(EnergyQuery(history, only_jobs=True), [gone], [GroupBy.USER])

    assert user.name == "uid 2000000111"


def test_one_jobs_user_is_not_charged_for_idle_time(history: History) -> None:
    (user,) = grouped(EnergyQuery(history, only_jobs=True), job_reports(history), [GroupBy.USER])

    assert user.energy_j == pytest.approx(ALL_J - 2 * 60.0 * NUM_RANKS)


def test_jobs_are_grouped_by_the_value_of_a_tag(history: History) -> None:
    reports = job_reports(history)

    by_slurm = grouped(EnergyQuery(history), reports, [GroupBy.TAG], tag="slurm_job_id")
    by_team = grouped(EnergyQuery(history), reports, [GroupBy.TAG], tag="team")

    assert [group.name for group in by_slurm] == ["4711", IDLE_GROUP]
    assert [group.name for group in by_team] == [UNTAGGED_GROUP, IDLE_GROUP]
    assert by_slurm[0].energy_j == by_team[0].energy_j == reports[0].energy_use.energy_j


def test_energy_and_cost_of_an_unmeasured_group_are_missing() -> None:
    group = Group({"group": "GPU-9"})
    group.add(part(None, missing_s=7.0), Rates(Tariff(0.3)))
    figures = group.to_dict(Rates(Tariff(0.3)))

    assert figures["energy_j"] is figures["idle_energy_j"] is figures["estimated_j"] is figures["cost"] is None
    assert figures["missing_s"] == 7.0


def test_estimated_energy_is_separate_from_measured_and_included_in_the_cost() -> None:
    group = Group({"group": "GPU-0"})
    group.add(part(1.8e6, job_id="j"), Rates(Tariff(0.25)))
    group.add(part(None, estimated_j=1.8e6), Rates(Tariff(0.25)))
    figures = group.to_dict(Rates(Tariff(0.25)))

    assert (figures["energy_j"], figures["estimated_j"], figures["cost"]) == (1.8e6, 1.8e6, pytest.approx(0.25))


def test_each_hour_is_priced_at_its_own_tariff() -> None:
    night = TariffPeriod(0.10, 22, 6)
    saturday = TariffPeriod(0.20, weekdays=frozenset({5}))
    tariff = Tariff(0.40, (night, saturday), UTC)
    friday_noon = datetime(2026, 3, 6, 12, tzinfo=UTC)
    hours = (friday_noon, friday_noon + timedelta(hours=11), friday_noon + timedelta(hours=24))

    used = EnergyUse()
    for at in hours:
        used = used.plus(part(3.6e6, started_at=at), Rates(tariff))

    assert used.cost == pytest.approx(0.40 + 0.10 + 0.20)


def test_hours_and_the_minutes_at_both_ends_cover_a_time_range_once(tmp_path: Path) -> None:
    """Minutes and hours hold the same energy; a span that begins and ends within an hour takes each minute once."""
    path = tmp_path / "history.sqlite3"
    begin = datetime(2026, 3, 1, 10, 0, tzinfo=UTC)
    records = []
    for minute in range(240):
        at = begin + timedelta(minutes=minute)
        for bucket_s, begun in ((60, at), (3600, at.replace(minute=0))):
            records.append(RollupRecord(bucket_s, "GPU-0", begun, "", 1.0, 1.0, 1.0, 1410.0, 1, measured_s=60.0))
    write_records(path, *records)

    with open_history(path) as history:

        def minutes(since: int, until: int) -> float | None:
            edge = begin + timedelta(minutes=since), begin + timedelta(minutes=until)
            (group,) = grouped(EnergyQuery(history, *edge), (), [GroupBy.GPU])
            return group.energy_j

        spans = [(0, 240), (30, 210), (30, 50), (60, 120), (59, 61), (5, 60), (60, 61)]
        assert [minutes(*span) for span in spans] == [until - since for since, until in spans]


@pytest.mark.parametrize(("minutes_kept", "first_day_j"), [(True, 30 + 60), (False, 60 + 60)])
def test_a_day_that_starts_within_an_hour_uses_minutes_while_they_are_stored(
    tmp_path: Path, *, minutes_kept: bool, first_day_j: int
) -> None:
    """In India a day ends at 18:30 UTC. With minutes forgotten all of that hour counts where it begins: never less."""
    path = tmp_path / "history.sqlite3"
    begin = datetime(2026, 3, 1, 17, 0, tzinfo=UTC)
    records = []
    for minute in range(240):
        at = begin + timedelta(minutes=minute)
        # Of the hour that the day ends in, the first minutes may be forgotten already.
        kept = [(60, at)] if minutes_kept or not 60 <= minute < 70 else []
        for bucket_s, begun in (*kept, (3600, at.replace(minute=0))):
            records.append(RollupRecord(bucket_s, "GPU-0", begun, "", 1.0, 1.0, 1.0, 1410.0, 1, measured_s=60.0))
    write_records(path, *records)

    with open_history(path) as history:
        days = grouped(EnergyQuery(history), (), [GroupBy.DAY], zone=timezone(timedelta(hours=5, minutes=30)))

    assert [(day.name, day.energy_j) for day in days] == [
        ("2026-03-01", first_day_j),
        ("2026-03-02", 240 - first_day_j),
    ]


def test_an_empty_history_has_no_groups(history: History) -> None:
    later = datetime(2026, 4, 1, tzinfo=UTC)

    assert grouped(EnergyQuery(history, since=later), (), [GroupBy.GPU]) == ()


def reported(path: Path) -> CarbonReport:
    with open_history(path) as history:
        (job,) = job_reports(history)
        assert job.carbon is not None
    return job.carbon


def test_compaction_keeps_the_emissions_of_a_long_job(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    write_long_job(str(path), NUM_ITERATIONS, ended_at=NOW - timedelta(days=3))
    for hour in range(2):
        begin = BEGUN + timedelta(hours=hour)
        write_records(
            path,
            RollupRecord(3600, "GPU-0", begin, "j", 90.0 * 3600, 90.0, 90.0, 1410.0, 36_000, measured_s=3600.0),
            IntensityRecord(
                "GB", "test", SignalKind.AVERAGE, EmissionFactor.DIRECT, SampleStatus.MEASURED,
                begin, begin + timedelta(hours=1), begin, 100.0 + 300.0 * hour, NOW,
            )
        )  # fmt: skip
    before = reported(path)

    num_single, _ = compact(str(path))

    after = reported(path)
    assert num_single < NUM_ITERATIONS / 10
    assert before.use.unpriced_j == 0
    assert after.use == before.use
    assert before.use.carbon_g == pytest.approx(90.0 * 3600 * (100.0 + 400.0) / 3.6e6)
    assert after.slowdown_ratio == pytest.approx(before.slowdown_ratio)
