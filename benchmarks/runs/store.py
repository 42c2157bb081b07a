"""Cost of the history: bytes per GPU and day, duration of a 30-day report and its queries, write rates, CPU time.

The history is the steady state of 8 GPUs at 10 Hz after 30 days with one job after another: packed samples of the last
two days, packed seconds of the last week, minutes and hours of the whole time, and the iterations of 60 jobs, merged
into blocks as by a running daemon. Minutes of samples are drawn from a pool of different ones.

    python benchmarks/runs/store.py [--days 30] [--json] [--keep DIR]
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sized
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import Connection

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.store import History, HistoryWriter, WriterOptions, open_history
from gpuenergyd.store.database import create_tables, writing_engine
from gpuenergyd.store.maintenance.compaction import compact_iterations
from gpuenergyd.store.maintenance.retention import Retention, used_bytes
from gpuenergyd.store.maintenance.stored_summaries import store_summaries
from gpuenergyd.store.records import (
    IterationRecord,
    JobEndRecord,
    JobRecord,
    PlanRecord,
    RankRecord,
    Record,
    RollupRecord,
    SampleRecord,
)
from gpuenergyd.store.writing.rows import insert_records, replace_series
from gpuenergyd.store.writing.series_buffer import SeriesBuffer

NUM_GPUS = 8
RATE_HZ = 10
JOB_HOURS = 12
ITERATION_S = 1.7
POOL = 64
DAYS_OF_TARGETS = 30
"""Shorter histories have no targets."""
MAX_BYTES_PER_GPU_DAY = 3e6
MAX_REPORT_S, MAX_QUERY_S = 0.5, 0.05
LEAST_ROWS_PER_S = 100_000
MAX_WRITER_CPU_RATIO = 0.01
TUNED = ClockPlan("tuned-1", PlanPurpose.TUNED, (), PlanPrediction(ITERATION_S, 8500.0, 8450.0, ITERATION_S, 10_000.0))
GPU_UUIDS = [f"GPU-{k:08x}-0000-4000-8000-000000000000" for k in range(NUM_GPUS)]


def sample(noise: random.Random, gpu_uuid: str, at: datetime, number: int, power_w: float, total_j: float) -> Record:
    late_s = abs(noise.gauss(0, 0.0005))
    clock = noise.choice((1410, 1410, 1410, 1200, 1095))
    return SampleRecord(gpu_uuid, at + timedelta(seconds=late_s), power_w, total_j, clock, 52.0 + number // 400)


def minute_of_samples(noise: random.Random, gpu_uuid: str, at: datetime) -> Iterator[Record]:
    """Yield ten samples per second with drifting, noisy power and a matching energy counter."""
    power_w, total_j = noise.uniform(150, 350), noise.uniform(1e6, 1e9)
    for k in range(60 * RATE_HZ):
        power_w = min(400.0, max(60.0, power_w + noise.gauss(0, 5)))
        total_j += power_w / RATE_HZ
        yield sample(noise, gpu_uuid, at + timedelta(seconds=k / RATE_HZ), k, power_w + noise.gauss(0, 2), total_j)


def second(noise: random.Random, gpu_uuid: str, at: datetime, job_id: str, bucket_s: int = 1) -> RollupRecord:
    power_w = noise.uniform(150, 350)
    return RollupRecord(
        bucket_s, gpu_uuid, at, job_id, power_w * bucket_s, power_w, power_w * 1.1, noise.uniform(1100, 1410),
        bucket_s * RATE_HZ, measured_s=float(bucket_s),
    )  # fmt: skip


def packed_pool(noise: random.Random, connection: object, *, is_raw: bool) -> list[tuple[int, bytes]]:
    """Return a pool of different packed minutes."""
    pool = []
    at = datetime(2026, 1, 1, tzinfo=UTC)
    for _ in range(POOL):
        buffer = SeriesBuffer()
        records = (
            minute_of_samples(noise, GPU_UUIDS[0], at)
            if is_raw
            else (second(noise, GPU_UUIDS[0], at + timedelta(seconds=k), "j") for k in range(60))
        )
        for record in records:
            buffer.add(record)  # type: ignore[arg-type]
        (row,) = buffer.rows(connection, buffer.due(0.0, is_all=True))  # type: ignore[arg-type]
        pool.append((row["num_points"], row["points"]))
    return pool


def job_records(noise: random.Random, job_id: str, begun: datetime, hours: float) -> Iterator[Record]:
    yield JobRecord(job_id, "gpt", "run", 0, "bubble-aware", "1f1b", "torch", False, 8, 32, 0.0, 1000, begun)
    for rank, gpu_uuid in enumerate(GPU_UUIDS):
        yield RankRecord(job_id, rank, gpu_uuid, "NVIDIA A100-SXM4-80GB", 1000 + rank, 1000, begun)
    yield PlanRecord(job_id, 1, TUNED, begun, 20)
    num_iterations = int(hours * 3600 / ITERATION_S)
    for k in range(num_iterations):
        is_baseline = k < 12 or k % 500 < 4
        energy_j = (10_000.0 if is_baseline else 8_500.0) * noise.gauss(1, 0.005)
        purpose = PlanPurpose.BASELINE if is_baseline else PlanPurpose.TUNED
        yield IterationRecord(
            job_id, k, begun + timedelta(seconds=k * ITERATION_S), ITERATION_S * noise.gauss(1, 0.002), energy_j,
            f"{purpose}-1", purpose, is_regular=k % 97 != 0,
        )  # fmt: skip
    yield JobEndRecord(job_id, begun + timedelta(hours=hours), "released")


def tidy(connection: Connection, now: datetime) -> None:
    """Store summaries of ended jobs and merge their iterations, as a running daemon does."""
    while store_summaries(connection, now):
        pass
    while compact_iterations(connection, now):
        pass


def generate(path: Path, days: int, now: datetime) -> int:
    """Write the history; return its size in bytes."""
    noise, kept = random.Random(1), Retention()
    engine = writing_engine(path, busy_timeout_s=5)
    with engine.begin() as connection:
        create_tables(connection)
        raw_pool = packed_pool(noise, connection, is_raw=True)
        second_pool = packed_pool(noise, connection, is_raw=False)
    begin = now - timedelta(days=days)
    for day in range(days):
        with engine.begin() as connection:
            since = begin + timedelta(days=day)
            rows = []
            for minute in range(24 * 60):
                at = since + timedelta(minutes=minute)
                job_id = f"job-{int((at - begin).total_seconds() // 3600 // JOB_HOURS):04d}"
                for tier, pool, age, owner in ((0, raw_pool, kept.samples, ""), (1, second_pool, kept.seconds, job_id)):
                    if at >= now - age:
                        for gpu_uuid in GPU_UUIDS:
                            num_points, points = noise.choice(pool)
                            rows.append(
                                {"tier": tier, "started_at": at, "gpu_uuid": gpu_uuid, "job_id": owner,
                                 "num_points": num_points, "points": points}
                            )  # fmt: skip
                insert_records(connection, [second(noise, g, at, job_id, 60) for g in GPU_UUIDS])
                if minute % 60 == 0:
                    insert_records(connection, [second(noise, g, at, job_id, 3600) for g in GPU_UUIDS])
            replace_series(connection, rows)
        with engine.begin() as connection:
            for k in range(24 // JOB_HOURS):
                begun = since + timedelta(hours=k * JOB_HOURS)
                job_id = f"job-{(day * 24 + k * JOB_HOURS) // JOB_HOURS:04d}"
                insert_records(connection, job_records(noise, job_id, begun, JOB_HOURS))
        with engine.begin() as connection:
            tidy(connection, since + timedelta(days=1))
        print(f"day {day + 1} of {days}", file=sys.stderr)
    with engine.begin() as connection:
        tidy(connection, now)
        held = used_bytes(connection)
    engine.dispose()
    return held


def timed_reports(path: Path, repeats: int) -> dict[str, list[float]]:
    """Return wall times of cold starts of the report command, and of `--version` for comparison."""
    commands = {
        "job": ["report", "--database", str(path), "--since", "30d", "--group-by", "job", "--json"],
        "day": ["report", "--database", str(path), "--since", "30d", "--group-by", "day", "--json"],
        "version": ["--version"],
    }
    times_s: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, arguments in commands.items():
            begin = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "gpuenergyd.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL
            )
            times_s[name].append(time.perf_counter() - begin)
    return times_s


def timed_queries(path: Path, since: datetime, repeats: int) -> dict[str, list[float]]:
    """Return wall times of the queries of a 30-day report, each as the first query of an opened history."""
    queries: dict[str, Callable[[History], Sized]] = {
        "all jobs": lambda history: history.job_summaries(since=since),
        "all hours of all GPUs": lambda history: history.rollups(bucket_s=3600, since=since),
        "energy by job and hour": lambda history: history.energy_sums(since=since, by_time=True),
        "the same where days begin at half an hour": lambda history: history.energy_sums(
            since=since, by_time=True, is_split=lambda hour: hour.hour == 18
        ),
    }
    times_s: dict[str, list[float]] = {name: [] for name in queries}
    for _ in range(repeats):
        for name, query in queries.items():
            with open_history(path) as history:
                begin = time.perf_counter()
                assert len(query(history)) > 0
                times_s[name].append(time.perf_counter() - begin)
    return times_s


def insert_rates(folder: Path) -> dict[str, float]:
    """Return the records per second that the writer takes including the final flush: samples and iterations."""
    noise, at = random.Random(2), datetime(2026, 1, 1, tzinfo=UTC)
    samples = [r for k in range(40) for r in minute_of_samples(noise, GPU_UUIDS[k % 8], at + timedelta(minutes=k // 8))]
    iterations = [
        IterationRecord("j", k, at, 1.7, 100.0, "tuned-1", PlanPurpose.TUNED, is_regular=True) for k in range(40_000)
    ]
    rates = {}
    for name, records in (("samples", samples), ("iterations", iterations)):
        writer = HistoryWriter(folder / f"{name}.sqlite3", WriterOptions(max_waiting=len(records) + 1, batch_s=0.5))
        writer.start()
        assert writer.flush(30)
        begin = time.perf_counter()
        for record in records:
            writer.write(record)
        assert writer.flush(120)
        rates[name] = len(records) / (time.perf_counter() - begin)
        writer.close()
    return rates


def writer_cpu_ratio(folder: Path, seconds: float) -> float:
    """Return the CPU time of the writer thread per second, fed in real time like by a daemon."""
    noise = random.Random(3)
    writer = HistoryWriter(folder / "live.sqlite3")
    writer.start()
    assert writer.flush(30)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "history-writer")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    begin, begin_cpu = time.monotonic(), time.clock_gettime(clock)
    tick = 0
    while (elapsed := time.monotonic() - begin) < seconds:
        now = datetime.now(tz=UTC)
        for gpu_uuid in GPU_UUIDS:
            writer.write(sample(noise, gpu_uuid, now, tick, noise.uniform(100, 400), 25.0 * tick))
            if tick % RATE_HZ == 0:
                for bucket_s in (1, 60, 3600):
                    whole = int(now.timestamp()) // bucket_s * bucket_s
                    writer.write(second(noise, gpu_uuid, datetime.fromtimestamp(whole, tz=UTC), "j", bucket_s))
        tick += 1
        time.sleep(max(0.0, tick / RATE_HZ - (time.monotonic() - begin)))
    ratio = (time.clock_gettime(clock) - begin_cpu) / elapsed
    writer.close()
    return ratio


def main() -> int:
    """Run and print; return 1 if a history of 30 days misses a target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--live-seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, default=None, help="write the history here and leave it")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpuenergyd-bench-"))
    try:
        path = (options.keep or folder) / "history.sqlite3"
        now = datetime.now(tz=UTC).replace(minute=0, second=0, microsecond=0)
        held = generate(path, options.days, now)
        per_gpu_day = held / (NUM_GPUS * options.days)
        reports_s = timed_reports(path, options.repeats)
        queries_s = timed_queries(path, now - timedelta(days=30), options.repeats)
        rates = insert_rates(folder)
        ratio = writer_cpu_ratio(folder, options.live_seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    slower = max(("job", "day"), key=lambda name: median(reports_s[name]))
    slowest = max(queries_s, key=lambda name: median(queries_s[name]))
    figures = {
        "bytes_per_gpu_day": round(per_gpu_day),
        "report_s": round(median(reports_s[slower]), 3),
        "query_s": round(median(queries_s[slowest]), 4),
        "insert_rows_per_s": round(rates["samples"]),
        "writer_cpu_ratio": round(ratio, 5),
        "days": options.days,
        "num_gpus": NUM_GPUS,
        "rate_hz": RATE_HZ,
        "insert_iterations_per_s": round(rates["iterations"]),
        "live_seconds": options.live_seconds,
        "reports_s": {name: [round(s, 3) for s in sorted(times_s)] for name, times_s in reports_s.items()},
        "queries_s": {name: [round(s, 4) for s in sorted(times_s)] for name, times_s in queries_s.items()},
    }
    status = 0 if options.days < DAYS_OF_TARGETS or is_met(figures) else 1
    if options.json:
        print(json.dumps(figures))
        return status
    per_day = f"{per_gpu_day / 1e6:.2f} MB per GPU-day"
    print(f"{options.days} days of {NUM_GPUS} GPUs at {RATE_HZ} Hz: {held / 1e6:.0f} MB, {per_day}")
    for name, times_s in reports_s.items():
        print(f"{'gpuenergyd --version' if name == 'version' else f'report by {name}'}, cold: {spread(times_s)}")
    for name, times_s in queries_s.items():
        print(f"query, {name}: {spread(times_s)}{' (query_s)' if name == slowest else ''}")
    print(f"rows a second: samples {rates['samples']:,.0f}, iterations {rates['iterations']:,.0f}")
    print(f"writer: {ratio:.2%} of a core over {options.live_seconds:g} s; load average {os.getloadavg()[0]:.1f}")
    return status


def is_met(figures: dict[str, Any]) -> bool:
    """Return whether all targets are met."""
    return bool(
        figures["bytes_per_gpu_day"] <= MAX_BYTES_PER_GPU_DAY
        and figures["report_s"] <= MAX_REPORT_S
        and figures["query_s"] <= MAX_QUERY_S
        and figures["insert_rows_per_s"] >= LEAST_ROWS_PER_S
        and figures["writer_cpu_ratio"] <= MAX_WRITER_CPU_RATIO
    )


def spread(times_s: list[float]) -> str:
    return f"{median(times_s):.4f} s ({min(times_s):.4f}-{max(times_s):.4f}, n={len(times_s)})"


if __name__ == "__main__":
    sys.exit(main())
