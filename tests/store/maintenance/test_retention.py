"""Expired detail is deleted and its space released; jobs and hours stay."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store import HistoryWriter, WriterOptions, open_history, schema
from gpuenergyd.store.database import writing_engine
from gpuenergyd.store.maintenance.retention import Retention, delete_expired, used_bytes
from gpuenergyd.store.records import (
    ControlEventRecord,
    IterationRecord,
    JobEndRecord,
    JobRecord,
    RankRecord,
    Record,
    RollupRecord,
    SampleRecord,
)
from tests.support.stored_history import write_records
from tests.support.waiting import wait_until

NOW = datetime(2026, 6, 1, tzinfo=UTC)
KEPT = Retention()
SPANS = (ObservedSpan(0, InstructionKind.F, 0, 0, 0.0, 0.5, 1000.0),)


def rollup(started_at: datetime, bucket_s: int) -> RollupRecord:
    return RollupRecord(bucket_s, "GPU-a", started_at, "", 1.0, 1.0, 1.0, 1.0, 1)


def noisy_samples(begin: datetime, num_samples: int) -> list[SampleRecord]:
    """Return samples that cannot be packed well, one every five seconds."""
    noise = random.Random(3)
    return [
        SampleRecord(
            "GPU-a", begin + timedelta(seconds=5 * k), noise.uniform(50, 400), noise.uniform(0, 1e9), 1000, 50.0
        )
        for k in range(num_samples)
    ]


def test_expired_seconds_are_deleted_in_portions_and_minutes_stay(place: str) -> None:
    begin = NOW - KEPT.seconds - timedelta(hours=10)
    hours = [begin + timedelta(hours=k) for k in range(20)]
    write_records(place, *(rollup(at, bucket_s) for at in hours for bucket_s in (1, 60)))
    engine = writing_engine(place, busy_timeout_s=1)

    portions = []
    for _ in range(4):
        with engine.begin() as connection:
            portions.append(delete_expired(connection, NOW, KEPT))
    engine.dispose()

    assert portions == [True, False, False, False]
    with open_history(place) as history:
        assert [r.started_at for r in history.rollups(bucket_s=1)] == hours[10:]
        assert len(history.rollups(bucket_s=60)) == 20


def test_expired_timelines_are_deleted_and_their_iterations_stay(place: str) -> None:
    ended = {"old": NOW - KEPT.timelines - timedelta(days=1), "recent": NOW - timedelta(days=1), "running": None}
    records: list[Record] = []
    for job_id, ended_at in ended.items():
        start = NOW - timedelta(days=60)
        records.append(JobRecord(job_id, job_id, "1", 0, "p", "1f1b", "", True, 1, 1, 0.0, 0, start))
        records.append(
            IterationRecord(job_id, 0, start, 1.0, 1.0, "b", PlanPurpose.TUNED, is_regular=True, spans=SPANS)
        )
        if ended_at is not None:
            records.append(JobEndRecord(job_id, ended_at, "released"))
    write_records(place, *records)
    engine = writing_engine(place, busy_timeout_s=1)

    with engine.begin() as connection:
        delete_expired(connection, NOW, KEPT)
    engine.dispose()

    with open_history(place) as history:
        kept = {job_id: history.iterations_with_spans(job_id) for job_id in ended}
        assert kept == {"old": (), "recent": (0,), "running": (0,)}
        assert all(len(history.iterations(job_id)) == 1 for job_id in ended)


def test_the_writer_deletes_expired_rows_and_the_file_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    long_ago = datetime.now(tz=UTC) - timedelta(days=30)
    write_records(path, *noisy_samples(long_ago, 20_000))
    size_before = path.stat().st_size

    writer = HistoryWriter(path, WriterOptions(batch_s=0.0, cleanup_period_s=0.0))
    writer.start()

    def is_tidy() -> bool:
        writer.write(ControlEventRecord(NOW, "phase", "test", None, None, "tick"))
        writer.flush(10)
        with open_history(path) as history:
            return not history.samples("GPU-a")

    wait_until(is_tidy)
    writer.close()

    assert path.stat().st_size < size_before / 2
    assert writer.status().reason is None


def test_each_tier_expires_at_its_age_and_hours_never(place: str) -> None:
    ages = {
        "new": timedelta(hours=1),
        "days": timedelta(days=3),
        "weeks": timedelta(days=20),
        "years": timedelta(days=800),
    }
    records: list[Record] = []
    for age in ages.values():
        at = (NOW - age).replace(minute=0, second=0)
        records.append(SampleRecord("GPU-a", at, 100.0, 1.0, 1000, 50.0))
        records += [rollup(at, bucket_s) for bucket_s in (1, 60, 3600)]
    write_records(place, *records)

    engine = writing_engine(place, busy_timeout_s=1)
    with engine.begin() as connection:
        while delete_expired(connection, NOW, KEPT):
            pass
    engine.dispose()

    with open_history(place) as history:
        kept = [len(history.samples("GPU-a")), *(len(history.rollups(bucket_s=bucket_s)) for bucket_s in (1, 60, 3600))]
    assert kept == [1, 2, 3, 4]


@pytest.mark.fault(60)
def test_above_the_size_limit_the_oldest_ended_jobs_go_with_all_that_belongs_to_them(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    records: list[Record] = []
    for k in range(400):
        job_id, start = f"job-{k:03}", NOW - timedelta(hours=500 - k)
        tags = tuple((f"t{n}", f"{k}" * 80) for n in range(12))
        records += [
            JobRecord(job_id, job_id, "1", 0, "p", "1f1b", "", True, 1, 1, 0.0, 0, start, tags=tags),
            RankRecord(job_id, 0, "GPU-a", "A100", 1, 0, start),
            IterationRecord(job_id, 0, start, 1.0, 1.0, "b", PlanPurpose.TUNED, is_regular=True),
            ControlEventRecord(start, "phase", "daemon", job_id, None, "tuned"),
            rollup(start, 3600)._replace(job_id=job_id),
        ]
        if k >= 10:  # the first ten run still
            records.append(JobEndRecord(job_id, start + timedelta(minutes=5), "released"))
    write_records(path, *records)
    engine = writing_engine(path, busy_timeout_s=1)
    with engine.begin() as connection:
        while delete_expired(connection, NOW, KEPT):
            pass  # summaries are stored
        full = used_bytes(connection)
        bounded = replace(KEPT, max_bytes=full // 2)
        while delete_expired(connection, NOW, bounded):
            pass
        left = used_bytes(connection)
        kept = set(connection.execute(select(schema.jobs.c.job_id)).scalars())
        left_over = {
            name: owners - kept
            for name, table in schema.metadata.tables.items()
            if "job_id" in table.c and (owners := set(connection.execute(select(table.c.job_id)).scalars()))
        }
    engine.dispose()

    assert left <= full // 2
    assert kept >= {f"job-{k:03}" for k in (*range(10), *range(350, 400))}
    assert "job-010" not in kept
    assert set(left_over) == {"jobs", "ranks", "iterations", "control_events", "gpu_rollups", "job_summaries"}
    assert not any(left_over.values())


def test_a_size_limit_deletes_detail_before_it_expires(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    begin = NOW - timedelta(hours=30)
    samples = noisy_samples(begin, 20_000)
    write_records(path, *samples, *(rollup(begin + timedelta(minutes=k), 60) for k in range(100)))
    engine = writing_engine(path, busy_timeout_s=1)
    with engine.begin() as connection:
        full = used_bytes(connection)
        bounded = replace(KEPT, max_bytes=full // 2)
        while delete_expired(connection, NOW, bounded):
            pass
        left = used_bytes(connection)
    engine.dispose()

    assert left <= full // 2
    with open_history(path) as history:
        kept = history.samples("GPU-a")
        assert 0 < len(kept) < len(samples)
        assert kept[-1].at == samples[-1].at
        assert len(history.rollups(bucket_s=60)) == 100
