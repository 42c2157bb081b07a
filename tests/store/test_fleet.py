"""Many hosts share one history: their jobs stay separate and their sums add up to the fleet."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select

from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.report.group_keys import GroupBy
from gpuenergyd.report.groups import EnergyQuery, Group, grouped
from gpuenergyd.report.job import job_reports
from gpuenergyd.report.trainings import trainings_report
from gpuenergyd.store import History, HistoryWriter, JobSummary, WriterOptions, open_history, schema
from gpuenergyd.store.database import create_tables, writing_engine
from gpuenergyd.store.maintenance.advisory_locks import try_lock_cleanup
from gpuenergyd.store.maintenance.retention import Retention, delete_expired
from gpuenergyd.store.records import (
    HostRollupRecord,
    IterationRecord,
    JobEndRecord,
    JobRecord,
    RankRecord,
    Record,
    RollupRecord,
)
from gpuenergyd.store.writing.rows import close_abandoned_jobs, insert_records
from tests.support.postgresql import PostgresqlServer
from tests.support.stored_history import write_records
from tests.support.training_history import TrainingJob

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NUM_HOSTS = 20


@pytest.fixture
def fleet_url(postgresql: PostgresqlServer) -> str:
    return postgresql.new_database()


def job(job_id: str, uid: int = 1000) -> JobRecord:
    return JobRecord(job_id, "gpt", "run", 0, "bubble-aware", "1f1b", "torch", True, 2, 8, 0.0, uid, START)


def iteration(job_id: str, index: int, scale: float = 1.0) -> IterationRecord:
    is_tuned = index >= 100 and index % 50 < 46
    jitter = 1.0 + 0.01 * (index * 7919 % 101 / 101 - 0.5)
    return IterationRecord(
        job_id,
        index,
        START + timedelta(seconds=index),
        jitter,
        scale * (80.0 if is_tuned else 100.0) * jitter,
        "tuned-1" if is_tuned else BASELINE_PLAN_ID,
        PlanPurpose.TUNED if is_tuned else PlanPurpose.BASELINE,
        is_regular=True,
    )


def what_a_host_records(number: int) -> Iterator[Record]:
    """Yield a job of two GPUs, an hour of both in pieces of ten seconds, idling before it, and the processor."""
    job_id, scale = f"job-{number}", 1.0 + number / 10
    gpu_uuids = [f"GPU-{number}-{k}" for k in range(2)]
    yield job(job_id, uid=1000 + number % 3)
    for rank, gpu_uuid in enumerate(gpu_uuids):
        yield RankRecord(job_id, rank, gpu_uuid, "A100", 1, 1000, START)
        for piece in range(12):
            begun = START + timedelta(seconds=10 * piece)
            owner = "" if piece < 3 else job_id
            for bucket_s in (1, 60, 3600):
                bucket = begun - timedelta(seconds=(10 * piece) % bucket_s)
                energy_j = None if piece == 5 else 100.0 * scale
                missing_s = 10.0 if piece == 5 else 0.0
                yield RollupRecord(
                    bucket_s, gpu_uuid, bucket, owner, energy_j, 10.0 * scale, 12.0, 1410.0, 10,
                    measured_s=10.0 - missing_s, missing_s=missing_s,
                )  # fmt: skip
    for bucket_s in (60, 3600):
        yield HostRollupRecord(bucket_s, START, "package-0", 500.0 * scale, 10.0, 0.0)
    yield from (iteration(job_id, k, scale) for k in range(220))
    yield JobEndRecord(job_id, START + timedelta(seconds=120), "released")


def group_figures(groups: tuple[Group, ...]) -> dict[str, tuple[float | None, ...]]:
    figures = {group.name: group.to_dict() for group in groups}
    names = ("num_jobs", "energy_j", "job_energy_j", "idle_energy_j", "missing_s", "saved_energy_j", "host_energy_j")
    return {name: tuple(row[key] for key in names) for name, row in figures.items()}


def by_host(history: History) -> tuple[Group, ...]:
    return grouped(EnergyQuery(history), job_reports(history), [GroupBy.HOST])


def test_hosts_that_start_together_share_a_history_and_the_fleet_report_is_the_sum_of_theirs(
    fleet_url: str, tmp_path: Path
) -> None:
    """Each host also writes a file of its own: what that says of it, the fleet's report by host says too."""
    with ExitStack() as ends:
        for number in range(NUM_HOSTS):
            for place in (fleet_url, tmp_path / f"{number}.sqlite3"):
                writer = HistoryWriter(place, WriterOptions(host=f"host-{number}", retry_s=0.1))
                ends.callback(writer.close, 60.0)
                writer.start()
                for record in what_a_host_records(number):
                    writer.write(record)

    own: dict[str, tuple[float | None, ...]] = {}
    own_jobs: dict[str, JobSummary] = {}
    for number in range(NUM_HOSTS):
        with open_history(tmp_path / f"{number}.sqlite3") as history:
            own |= group_figures(by_host(history))
            own_jobs |= {summary.job_id: summary for summary in history.job_summaries()}
    with open_history(fleet_url) as history:
        fleet = group_figures(by_host(history))
        users = grouped(EnergyQuery(history), job_reports(history), [GroupBy.USER])
        (day,) = grouped(EnergyQuery(history), (), [GroupBy.DAY], zone=UTC)
        fleet_jobs = {summary.job_id: summary for summary in history.job_summaries()}

    assert set(fleet) == {f"host-{number}" for number in range(NUM_HOSTS)}
    for name, figures in own.items():
        # The fleet sums aggregated iterations.
        assert fleet[name] == pytest.approx(figures, rel=5e-3), name
    assert day.energy_j == pytest.approx(sum(figures[1] or 0.0 for figures in own.values()))
    assert sum(group.energy_j or 0.0 for group in users) == pytest.approx(day.energy_j)
    assert day.host_energy_j == pytest.approx(sum(figures[6] or 0.0 for figures in own.values()))
    for job_id, summary in own_jobs.items():
        reported = fleet_jobs[job_id]
        assert reported.host == summary.host == f"host-{job_id.removeprefix('job-')}"
        assert reported.energy_j == pytest.approx(summary.energy_j)
        assert reported.saving_ratio == pytest.approx(summary.saving_ratio, rel=1e-2)
        assert reported.is_saving_significant
        assert (reported.gpu_uuids, reported.num_iterations) == (summary.gpu_uuids, summary.num_iterations)


def test_a_training_on_several_hosts_is_one_row_of_the_fleet_and_a_part_in_the_history_of_each(
    fleet_url: str, tmp_path: Path
) -> None:
    """A pipeline of one stage per host: each host knows its own job, the fleet both."""
    places = [fleet_url, *(str(tmp_path / f"{stage}.sqlite3") for stage in range(2))]
    for stage in range(2):
        member = TrainingJob(
            f"gpt-{stage}", START, START + timedelta(minutes=9), run_key=f"pp{stage}.0,id=7", num_gpus=1,
            tags=(("world_size", "2"),),
        )  # fmt: skip
        for place in (fleet_url, places[1 + stage]):
            write_records(place, *member.records([100.0 + stage]), host=f"host-{stage}")

    rows, lines = [], []
    for place in places:
        with open_history(place) as history:
            report = trainings_report(EnergyQuery(history), job_reports(history))
            rows += report.rows(has_parts=True)
            lines.append(report.incomplete_line())

    of_fleet, *own = rows
    counts = ("num_jobs", "num_hosts", "num_stages", "num_ranks", "world_size")
    assert [of_fleet[name] for name in counts] == [2, 2, 2, 2, 2]
    assert of_fleet["energy_j"] == sum(part["energy_j"] for part in of_fleet["by_host"]) == 201.0
    assert [(part["host"], part["energy_j"]) for part in of_fleet["by_host"]] == [("host-0", 100.0), ("host-1", 101.0)]
    assert [(row["energy_j"], row["num_ranks"], row["world_size"]) for row in own] == [(100.0, 1, 2), (101.0, 1, 2)]
    assert ["(1 of 2 ranks)" in line for line in lines] == [False, True, True]


def test_a_restarted_host_ends_only_its_own_jobs(fleet_url: str) -> None:
    for host in ("a", "b"):
        writer = HistoryWriter(fleet_url, WriterOptions(host=host))
        writer.start()
        writer.write(job(f"of-{host}"))
        writer.close(60.0)

    again = HistoryWriter(fleet_url, WriterOptions(host="a"))
    again.start()
    again.write(job("next-of-a"))
    again.close(60.0)

    with open_history(fleet_url) as history:
        ended = {summary.job_id: summary.end_reason for summary in history.job_summaries()}
    assert ended == {"of-a": "the daemon stopped before the job", "of-b": None, "next-of-a": None}


def test_a_lost_database_server_does_not_end_running_jobs(postgresql: PostgresqlServer, fleet_url: str) -> None:
    writer = HistoryWriter(fleet_url, WriterOptions(host="a", retry_s=0.05))
    writer.start()
    writer.write(job("j"))
    assert writer.flush(60.0)

    postgresql.stop()
    try:
        writer.write(iteration("j", 0))
        assert not writer.flush(0.5)
    finally:
        postgresql.start()
    assert writer.flush(60.0)
    writer.close()

    with open_history(fleet_url) as history:
        (summary,) = history.job_summaries()
    assert (summary.ended_at, summary.num_iterations) == (None, 1)


def test_one_host_at_a_time_deletes_expired_rows_and_only_of_its_own_jobs(fleet_url: str) -> None:
    engine = writing_engine(fleet_url, busy_timeout_s=5)
    with engine.begin() as connection:
        create_tables(connection)
        for host in ("a", "b"):
            end = JobEndRecord(host, START + timedelta(seconds=9), "released")
            records: list[Record] = [job(host), iteration(host, 0), end]
            insert_records(connection, records, host=host)

    with engine.begin() as mine, engine.begin() as of_another:
        assert try_lock_cleanup(mine)
        assert not try_lock_cleanup(of_another)
        delete_expired(mine, START + timedelta(days=1), Retention(), host="a")
    with engine.begin() as connection:
        kept = connection.execute(select(schema.job_summaries.c.job_id)).scalars().all()
        assert try_lock_cleanup(connection)
    engine.dispose()

    assert kept == ["a"]


def test_rollups_of_a_bucket_in_one_batch_give_the_same_row_as_one_by_one(place: str) -> None:
    pieces = [record for record in what_a_host_records(0) if isinstance(record, RollupRecord | HostRollupRecord)]
    rows = [record for record in pieces if record.bucket_s > 1]
    engine = writing_engine(place, busy_timeout_s=5)
    with engine.begin() as connection:
        create_tables(connection)
        insert_records(connection, rows, host="together")
        tables = (schema.gpu_rollups, schema.host_rollups)
        together = [sorted(connection.execute(select(table)).all()) for table in tables]
        for table in tables:
            connection.execute(table.delete())
        for row in rows:
            insert_records(connection, [row], host="together")
        one_by_one = [sorted(connection.execute(select(table)).all()) for table in tables]
    engine.dispose()

    assert [list(row) for table in together for row in table] == [
        [pytest.approx(value) if isinstance(value, float) else value for value in row]
        for table in one_by_one
        for row in table
    ]


def test_iterations_aggregated_by_the_server_give_the_summary_of_single_ones(fleet_url: str) -> None:
    """From sixteen jobs on the server adds up; sums are the same, medians of blocks differ by 0.1 % at most."""
    engine = writing_engine(fleet_url, busy_timeout_s=5)
    with engine.begin() as connection:
        create_tables(connection)
        for number in range(16):
            job_id = f"job-{number}"
            insert_records(connection, [job(job_id), *(iteration(job_id, k) for k in range(700))], host="a")
    engine.dispose()
    since = START + timedelta(seconds=333)

    with open_history(fleet_url) as history:
        for begin in (None, since):
            (one,) = history.job_summaries(begin, job="job-3", within_range_only=begin is not None)
            all_of_them = history.job_summaries(begin, within_range_only=begin is not None)
            reported = next(summary for summary in all_of_them if summary.job_id == "job-3")

            assert len(all_of_them) == 16
            assert (reported.num_iterations, reported.num_tuned_iterations) == (
                one.num_iterations,
                one.num_tuned_iterations,
            )
            assert reported.energy_j == pytest.approx(one.energy_j)
            assert reported.baseline_time_s == pytest.approx(one.baseline_time_s, rel=1e-3)
            assert reported.energy_per_iteration_j == pytest.approx(one.energy_per_iteration_j, rel=1e-3)
            assert reported.saving_ratio == pytest.approx(one.saving_ratio, rel=5e-3)
            assert reported.num_baseline_iterations == one.num_baseline_iterations


def test_jobs_left_open_by_an_older_version_are_ended_on_any_host(place: str) -> None:
    engine = writing_engine(place, busy_timeout_s=5)
    with engine.begin() as connection:
        create_tables(connection)
        insert_records(connection, [job("old")])
        close_abandoned_jobs(connection, host="a")
        of_a = connection.execute(select(func.count()).where(schema.jobs.c.ended_at.is_(None))).scalar()
        close_abandoned_jobs(connection, host=None)
        of_any = connection.execute(select(func.count()).where(schema.jobs.c.ended_at.is_(None))).scalar()
    engine.dispose()

    assert (of_a, of_any) == (1, 0)
