"""The records of one simulated host at the default rates of the daemon: eight GPUs at 10 Hz, one job."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store.records import HostRollupRecord, IterationRecord, JobRecord, Record, RollupRecord, SampleRecord
from gpuenergyd.store.writing.series_buffer import SeriesBuffer

NUM_GPUS = 8
RATE_HZ = 10
ITERATION_S = 1.7
HOST_PERIOD_S = 10
DOMAINS = ("package-0", "package-0/dram", "package-1", "package-1/dram")
"""The RAPL domains of two processors with their memory, as named by `daemon.gpus.host_energy`."""
POOL = 16


def gpu_uuid(host: int, index: int) -> str:
    return f"GPU-{host:08x}-0000-4000-8000-{index:012x}"


def host_name(host: int) -> str:
    return f"host-{host:04d}"


def job_of(host: int) -> JobRecord:
    """Return a job that a host starts now."""
    return JobRecord(
        f"job-{host}", "gpt", "run", 0, "bubble-aware", "1f1b", "torch", True, NUM_GPUS, 32, 0.0, 1000 + host % 50,
        datetime.now(tz=UTC),
    )  # fmt: skip


def piece(noise: random.Random, uuid: str, begun: datetime, job_id: str, bucket_s: int) -> RollupRecord:
    """Return the rollup of one second of one GPU in a bucket."""
    whole_s = int(begun.timestamp()) // bucket_s * bucket_s
    power_w = noise.uniform(150, 350)
    return RollupRecord(
        bucket_s, uuid, datetime.fromtimestamp(whole_s, tz=UTC), job_id, power_w, power_w, power_w * 1.1,
        noise.uniform(1100, 1410), RATE_HZ, measured_s=1.0,
    )  # fmt: skip


def readings(noise: random.Random, host: int, begun: datetime, seconds: int) -> Iterator[Record]:
    """Yield the records of some seconds that become rows: parts of minutes and hours, and iterations."""
    job_id = f"job-{host}"
    for second in range(seconds):
        at = begun + timedelta(seconds=second)
        for index in range(NUM_GPUS):
            for bucket_s in (60, 3600):
                yield piece(noise, gpu_uuid(host, index), at, job_id, bucket_s)
        at_s = at.timestamp()
        if int(at_s / ITERATION_S) != int((at_s + 1) / ITERATION_S):
            yield IterationRecord(
                job_id, int(at_s / ITERATION_S) % 2**31, at, ITERATION_S * noise.gauss(1, 0.002),
                8500.0 * noise.gauss(1, 0.005), "tuned-1", PlanPurpose.TUNED, is_regular=True,
            )  # fmt: skip
        if int(at_s) % HOST_PERIOD_S == host % HOST_PERIOD_S:
            for domain in DOMAINS:
                for bucket_s in (60, 3600):
                    bucket = datetime.fromtimestamp(int(at_s) // bucket_s * bucket_s, tz=UTC)
                    yield HostRollupRecord(bucket_s, bucket, domain, noise.uniform(500, 2000), 10.0, 0.0)


def fine_detail(noise: random.Random, host: int, at: datetime, tick: int) -> Iterator[Record]:
    """Yield one sample of each GPU and the one-second rollups: the records that are packed, in real time."""
    for index in range(NUM_GPUS):
        uuid = gpu_uuid(host, index)
        yield SampleRecord(uuid, at, noise.uniform(100, 400), 25.0 * tick, noise.choice((1410, 1200)), 52.0)
        if tick % RATE_HZ == 0:
            yield piece(noise, uuid, at, f"job-{host}", 1)


def packed_pool(noise: random.Random, connection: Connection, *, is_raw: bool) -> list[tuple[int, bytes]]:
    """Return different packed minutes of one GPU, with drifting power and a matching energy counter."""
    pool, uuid, begin = [], gpu_uuid(0, 0), datetime(2026, 1, 1, tzinfo=UTC)
    for _ in range(POOL):
        buffer, power_w, total_j = SeriesBuffer(), noise.uniform(150, 350), noise.uniform(1e6, 1e9)
        for k in range(60 * (RATE_HZ if is_raw else 1)):
            at = begin + timedelta(seconds=k / RATE_HZ if is_raw else k)
            if not is_raw:
                buffer.add(piece(noise, uuid, at, "j", 1))
                continue
            power_w = min(400.0, max(60.0, power_w + noise.gauss(0, 5)))
            total_j += power_w / RATE_HZ
            late_s = abs(noise.gauss(0, 0.0005))
            clock_mhz = noise.choice((1410, 1410, 1410, 1200, 1095))
            power_now_w = power_w + noise.gauss(0, 2)
            buffer.add(SampleRecord(uuid, at + timedelta(seconds=late_s), power_now_w, total_j, clock_mhz, 52.0))
        (row,) = buffer.rows(connection, buffer.due(0.0, is_all=True))
        pool.append((row["num_points"], row["points"]))
    return pool
