"""PostgreSQL under the load of a fleet: required and maximum write rates, write latency, sizes and report times."""

import argparse
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Self

from fleet_history import make_history
from fleet_hosts import NUM_GPUS, RATE_HZ, fine_detail, gpu_uuid, host_name, job_of, packed_pool, readings
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from gpuenergyd.daemon.settings import Settings
from gpuenergyd.store import HistoryWriter, WriterOptions
from gpuenergyd.store.database import create_tables, writing_engine
from gpuenergyd.store.maintenance.retention import Retention
from gpuenergyd.store.writing.rows import insert_records, record_gpu_hosts, replace_series
from tests.support.postgresql import NoServerError, PostgresqlServer, running_postgresql

BATCH_S: float = Settings.model_fields["database_batch_s"].default
NUM_PROCESSES = 2
THREADS = 4
BURST_THREADS = 2
GROUPS = ("host", "user", "job", "day", "gpu")
LEAN = {"samples": 2 / 24, "seconds": 1.0}
"""Shorter retention of detail, in days, for a large fleet."""


@dataclass(slots=True)
class Writes:
    """The results of the writes of some hosts."""

    num_writes: int = 0
    num_rows: int = 0
    num_failed: int = 0
    server_cpu_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)

    def add(self, other: "Writes") -> None:
        self.num_writes += other.num_writes
        self.num_rows += other.num_rows
        self.num_failed += other.num_failed
        self.times_s += other.times_s
        self.late_s += other.late_s


@dataclass(slots=True)
class Host:
    """The history writes of one simulated host."""

    number: int
    num_writes: int = 0

    def write(
        self, engine: Engine, noise: random.Random, pools: Sequence[Sequence[tuple[int, bytes]]]
    ) -> tuple[int, float]:
        """Write the records of `BATCH_S` seconds as the history writer does; return number of rows and duration."""
        now = datetime.now(tz=UTC)
        records = list(readings(noise, self.number, now - timedelta(seconds=BATCH_S), round(BATCH_S)))
        series = []
        if (self.num_writes + self.number) % round(60 / BATCH_S) == 0:
            minute = now.replace(second=0, microsecond=0) - timedelta(minutes=2)
            for tier, pool in enumerate(pools):
                for index in range(NUM_GPUS):
                    num_points, points = noise.choice(pool)
                    series.append(
                        {"tier": tier, "started_at": minute, "gpu_uuid": gpu_uuid(self.number, index),
                         "job_id": f"job-{self.number}" if tier else "", "num_points": num_points, "points": points}
                    )  # fmt: skip
        name = host_name(self.number)
        begin = time.perf_counter()
        with engine.begin() as connection:
            if self.num_writes == 0:
                record_gpu_hosts(connection, [gpu_uuid(self.number, index) for index in range(NUM_GPUS)], host=name)
            num_rows = insert_records(connection, records, host=name)
            replace_series(connection, series)
        self.num_writes += 1
        return num_rows + len(series), time.perf_counter() - begin


class Pace(StrEnum):
    """When hosts write and on which connections."""

    DUE = "due"
    """Each write when due, on its own connection, like the history writer."""
    BURST = "burst"
    """One write after another as fast as possible, each on its own connection."""
    POOLED = "pooled"
    """As fast as possible on a few persistent connections, like with a connection pooler."""


def write_for(url: str, numbers: Sequence[int], num_hosts: int, start_s: float, end_s: float, pace: Pace) -> Writes:
    """Let hosts write until a given time."""
    noise, is_paced = random.Random(numbers[0]), pace is Pace.DUE
    engine = create_engine(_with_driver(url)) if pace is Pace.POOLED else writing_engine(url, busy_timeout_s=1.0)
    with engine.begin() as connection:
        pools = [packed_pool(noise, connection, is_raw=is_raw) for is_raw in (True, False)]
    hosts = [Host(number, num_writes=number % 6) for number in numbers]
    due = _due(hosts, num_hosts, start_s, is_paced=is_paced)
    guard = threading.Lock()

    def work() -> Writes:
        own = Writes()
        while True:
            with guard:
                host, due_s = next(due)
            if max(due_s, time.time()) >= end_s:
                return own
            time.sleep(max(0.0, due_s - time.time()))
            late_s = time.time() - due_s
            try:
                num_rows, took_s = host.write(engine, noise, pools)
            except SQLAlchemyError:
                own.num_failed += 1
                continue
            own.add(Writes(1, num_rows, times_s=[took_s], late_s=[late_s]))

    total = Writes()
    num_threads = THREADS if is_paced else BURST_THREADS
    time.sleep(max(0.0, start_s - time.time()))
    with ThreadPoolExecutor(num_threads) as pool:
        for own in [future.result() for future in [pool.submit(work) for _ in range(num_threads)]]:
            total.add(own)
    return total


def _due(hosts: Sequence[Host], num_hosts: int, start_s: float, *, is_paced: bool) -> Iterator[tuple[Host, float]]:
    """Yield hosts and their write times, spread over the period like hosts that started at different times."""
    turn = 0
    while True:
        for host in hosts:
            yield host, start_s + (turn + host.number / num_hosts) * BATCH_S if is_paced else 0.0
        turn += 1


def fleet_writes(url: str, num_hosts: int, seconds: float, pace: Pace) -> Writes:
    """Return the writes of all hosts within some seconds."""
    start_s = time.time() + 4.0  # every process has started and filled its pools by then
    shares = [range(k, num_hosts, NUM_PROCESSES) for k in range(NUM_PROCESSES)]
    total = Writes()
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(write_for, url, share, num_hosts, start_s, start_s + seconds, pace) for share in shares]
        for future in futures:
            total.add(future.result())
    return total


@contextmanager
def whole_writers(url: str, first: int, number: int) -> Iterator[list[HistoryWriter]]:
    """Run the complete history writer for some more hosts, fed in real time like by a daemon."""
    writers = [
        HistoryWriter(url, WriterOptions(host=host_name(first + k), server_batch_s=BATCH_S)) for k in range(number)
    ]
    is_over, noise = threading.Event(), random.Random(7)

    def feed() -> None:
        tick, begin = 0, time.monotonic()
        while not is_over.wait(max(0.0, begin + tick / RATE_HZ - time.monotonic())):
            now = datetime.now(tz=UTC)
            for k, writer in enumerate(writers):
                for record in fine_detail(noise, first + k, now, tick):
                    writer.write(record)
                if tick % RATE_HZ == 0:
                    for record in readings(noise, first + k, now, 1):
                        writer.write(record)
            tick += 1

    for k, writer in enumerate(writers):
        writer.start()
        writer.write(job_of(first + k))
    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield writers
    finally:
        is_over.set()
        thread.join()
        for writer in writers:
            writer.close(30.0)


class ServerWatch:
    """Monitors the connections and the CPU time of the server."""

    def __init__(self, server: PostgresqlServer, url: str) -> None:
        self._engine = create_engine(_with_driver(url), poolclass=NullPool)
        self._postmaster = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
        self._is_over = threading.Event()
        self.connections: list[int] = []
        self.used_s = 0.0

    def cpu_s(self) -> float:
        """Return the CPU time of the server, including closed connections."""
        ticks = _cpu_ticks(self._postmaster, is_with_ended=True)
        children = Path(f"/proc/{self._postmaster}/task/{self._postmaster}/children").read_text().split()
        return (ticks + sum(_cpu_ticks(int(pid)) for pid in children)) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Self:
        self._begin_s = self.cpu_s()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.used_s = self.cpu_s() - self._begin_s

    def _watch(self) -> None:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
        with self._engine.connect() as connection:
            while not self._is_over.wait(0.25):
                self.connections.append(connection.execute(query).scalar_one() - 1)
                connection.rollback()


def _cpu_ticks(pid: int, *, is_with_ended: bool = False) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(int(value) for value in fields[11 : 15 if is_with_ended else 13])


def _with_driver(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


def size_figures(connection: Connection, *, num_hosts: int, days: int) -> dict[str, Any]:
    """Return bytes per GPU and day by tier, from the stored rows including indexes."""

    def one(sql: str) -> float:
        return float(connection.execute(text(sql)).scalar_one() or 0)

    def per_row(table: str) -> float:
        return one(f"SELECT pg_total_relation_size('{table}')") / max(1.0, one(f"SELECT count(*) FROM {table}"))

    points = "SELECT avg(octet_length(points)) FROM gpu_series WHERE tier = {}"
    overhead = per_row("gpu_series") - one("SELECT avg(octet_length(points)) FROM gpu_series")
    rollup, of_host = per_row("gpu_rollups"), per_row("host_rollups") * 4 / NUM_GPUS
    rest = sum(
        one(f"SELECT pg_total_relation_size('{table}')")
        for table in ("iterations", "iteration_blocks", "jobs", "ranks", "plans", "job_summaries")
    )
    per_gpu_day = {
        "samples": 1440 * (one(points.format(0)) + overhead),
        "seconds": 1440 * (one(points.format(1)) + overhead),
        "minutes": 1440 * (rollup + of_host),
        "hours": 24 * (rollup + of_host),
        "jobs": rest / (num_hosts * NUM_GPUS * days),
    }
    kept, day = Retention(), timedelta(days=1)
    usual = {"samples": kept.samples / day, "seconds": kept.seconds / day}
    return {
        "bytes_per_gpu_day": {name: round(value) for name, value in per_gpu_day.items()},
        "fleet_30_days_bytes": {
            name: round(num_hosts * NUM_GPUS * sum(held.get(key, 30) * value for key, value in per_gpu_day.items()))
            for name, held in (("usual", usual), ("lean", LEAN))
        },
        "held_bytes": round(one("SELECT pg_database_size(current_database())")),
    }


def report_figures(url: str, since: datetime, watch: "ServerWatch") -> tuple[dict[str, dict[str, float]], list[float]]:
    """Return the times of grouped reports on the whole fleet, and the energy sum of each."""
    times, sums_j = {}, []
    for by in GROUPS:
        begin, begin_cpu_s, begin_server_s = time.perf_counter(), _children_cpu_s(), watch.cpu_s()
        done = subprocess.run(
            [sys.executable, "-m", "gpuenergyd.cli.main", "report", "--database", url, "--since", since.isoformat(),
             "--group-by", by, "--json"], check=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        times[by] = {
            "wall_s": round(time.perf_counter() - begin, 2),
            "cpu_s": round(_children_cpu_s() - begin_cpu_s, 2),
            "server_cpu_s": round(watch.cpu_s() - begin_server_s, 2),
        }
        rows = json.loads(done.stdout)["jobs" if by == "job" else "groups"]
        sums_j.append(sum(row["gpu_energy_j" if by == "job" else "energy_j"] or 0.0 for row in rows))
    return times, sums_j


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def slow_statements(connection: Connection) -> list[dict[str, Any]]:
    """Return the slowest queries of the reports according to pg_stat_statements."""
    rows = connection.execute(
        text("""SELECT regexp_replace(query, '\\s+', ' ', 'g') AS query, calls, mean_exec_time, max_exec_time
            FROM pg_stat_statements WHERE query LIKE 'SELECT%' ORDER BY max_exec_time DESC LIMIT 3""")
    ).all()
    return [
        {"query": row.query[:160], "num_calls": row.calls, "mean_s": round(row.mean_exec_time / 1e3, 3),
         "max_s": round(row.max_exec_time / 1e3, 3)}
        for row in rows
    ]  # fmt: skip


def spread(times_s: Sequence[float]) -> dict[str, float]:
    hundredths = quantiles(times_s, n=100, method="inclusive")
    return {"p50": round(median(times_s), 4), "p99": round(hundredths[98], 4), "max": round(max(times_s), 4)}


def report_progress(what: str) -> None:
    """Print the current step on standard error."""
    print(f"{time.strftime('%X')} {what}", file=sys.stderr)


def postgresql_figures(options: argparse.Namespace) -> dict[str, Any]:
    """Return all results, or the reason why there are none."""
    try:
        with running_postgresql("-c shared_preload_libraries=pg_stat_statements") as server:
            return _figures(server, options)
    except NoServerError as error:
        return {"absent": str(error)}


def _cost(burst: Writes, needed_writes_per_s: float) -> dict[str, float | None]:
    """Return the cost of a write to the server; None if none completed in time."""
    if not burst.num_writes:
        return {"server_cpu_per_write_s": None, "needed_cores": None}
    cost_s = burst.server_cpu_s / burst.num_writes
    return {"server_cpu_per_write_s": round(cost_s, 5), "needed_cores": round(needed_writes_per_s * cost_s, 2)}


def _figures(server: PostgresqlServer, options: argparse.Namespace) -> dict[str, Any]:
    url = server.new_database()
    engine = create_engine(_with_driver(url), poolclass=NullPool)
    with engine.begin() as connection:
        version = connection.execute(text("SHOW server_version")).scalar_one()
        limits = {
            name: connection.execute(text(f"SHOW {name}")).scalar_one()
            for name in ("max_connections", "shared_buffers", "fsync")
        }
        create_tables(connection)
    report_progress("history")
    with engine.begin() as connection:
        made = make_history(connection, num_hosts=options.hosts, days=options.days)
    with engine.begin() as connection:
        connection.execute(text("CREATE EXTENSION pg_stat_statements"))
    report_progress("writes")
    with whole_writers(url, options.hosts, options.whole_writers) as writers, ServerWatch(server, url) as watch:
        paced = fleet_writes(url, options.hosts, options.write_seconds, Pace.DUE)
    states = [writer.status() for writer in writers]
    with engine.connect() as connection:
        # Measured before the burst, which writes more rows per minute than real hosts.
        sizes = size_figures(connection, num_hosts=options.hosts, days=options.days)
    report_progress("burst")
    bursts = {}
    for pace in (Pace.BURST, Pace.POOLED):
        with ServerWatch(server, url) as watched:
            bursts[pace] = fleet_writes(url, options.hosts, options.burst_seconds, pace)
        bursts[pace].server_cpu_s = watched.used_s
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_stat_statements_reset()"))
    report_progress("reports")
    times, sums = report_figures(url, datetime.now(tz=UTC) - timedelta(days=options.days), watch)
    with engine.connect() as connection:
        slowest = slow_statements(connection)
    engine.dispose()
    report_progress("done")
    if not paced.num_writes:
        raise SystemExit(f"no host wrote within {options.write_seconds:g} s: the machine is too busy")
    needed = paced.num_rows / paced.num_writes * options.hosts / BATCH_S
    needed_writes_per_s = options.hosts / BATCH_S
    cpu_per_write_s = watch.used_s / paced.num_writes
    return {
        "version": version,
        "settings": limits,
        "batch_s": BATCH_S,
        "rows_per_write": round(paced.num_rows / paced.num_writes, 1),
        "needed_rows_per_s": round(needed),
        "sustained": {
            pace: {
                "rows_per_s": round(burst.num_rows / options.burst_seconds),
                "ratio": round(burst.num_rows / options.burst_seconds / needed, 2),
                **_cost(burst, needed_writes_per_s),
            }
            for pace, burst in bursts.items()
        },
        "write_s": spread(paced.times_s),
        "late_s": spread(paced.late_s),
        "num_writes": paced.num_writes,
        "num_failed": paced.num_failed + sum(burst.num_failed for burst in bursts.values()),
        "write_seconds": options.write_seconds,
        "due_writes": round(needed_writes_per_s * options.write_seconds),
        "server_cpu_per_write_s": round(cpu_per_write_s, 5),
        "needed_cores": round(needed_writes_per_s * cpu_per_write_s, 2),
        "connections": {"median": median(watch.connections), "max": max(watch.connections)},
        "whole_writers": {
            "number": len(states),
            "num_dropped": sum(state.num_rows_dropped for state in states),
            "troubles": [state.reason for state in states if state.reason],
        },
        **sizes,
        **made,
        "report_days": options.days,
        "num_jobs": options.hosts * (2 * options.days + 1),
        "reports": times,
        "sum_difference_ratio": (max(sums) - min(sums)) / max(sums),
        "slowest_queries": slowest,
    }
