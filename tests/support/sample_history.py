"""A sample history: one job with baseline, profiling and tuned iterations, timelines included."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from gpuenergyd.core.carbon.intensity import EmissionFactor, IntensityBasis, SampleStatus, SignalKind
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.store import HistoryWriter, WriterOptions
from gpuenergyd.store.records import (
    IntensityRecord,
    IterationRecord,
    JobEndRecord,
    JobRecord,
    PlanRecord,
    RankRecord,
    Record,
    RollupRecord,
    TargetRecord,
)

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
NUM_RANKS = 4
NUM_MICROBATCHES = 8
MAX_CLOCK_MHZ = 1410
SLOW_CLOCK_MHZ = 1050
TUNED = ClockPlan(
    plan_id="tuned-1",
    purpose=PlanPurpose.TUNED,
    predicted=PlanPrediction(0.5, 80.5, 80.0, 0.5, 100.0),
    reason="slack on 3 of 4 ranks",
)
TAGS = (("git_commit", "0123456789abcdef" * 2 + "01234567"), ("slurm_job_id", "4711"), ("user", "ada"))
PROFILE = ClockPlan(plan_id="try-1", purpose=PlanPurpose.TRIAL)


def spans(*, is_tuned: bool) -> tuple[ObservedSpan, ...]:
    """Return the timeline of an iteration; the last rank is the slowest, tuned runs the others slower."""
    graph = dependency_graph(one_forward_one_backward(NUM_RANKS, NUM_MICROBATCHES))

    def is_slow(instruction: Instruction) -> bool:
        return is_tuned and instruction.pp_rank < NUM_RANKS - 1

    def duration_s(instruction: Instruction) -> float:
        plain_s = (0.010 if instruction.kind is InstructionKind.F else 0.020) * (1.0 + 0.1 * instruction.pp_rank)
        return plain_s * (1.1 if is_slow(instruction) else 1.0)

    drawn = timeline(graph, [duration_s(instruction) for instruction in graph.instructions])
    return tuple(
        ObservedSpan(
            span.instruction.pp_rank,
            span.instruction.kind,
            span.instruction.microbatch_index,
            span.instruction.chunk_index,
            span.start_s,
            span.end_s,
            SLOW_CLOCK_MHZ if is_slow(span.instruction) else MAX_CLOCK_MHZ,
        )
        for span in drawn.spans
    )


def write_sample_history(
    path: Path, *, job_name: str = "gpt", is_measured: bool = True, has_grid: bool = False
) -> Path:
    """Write the history of one ended job: 2 irregular, 10 baseline, 4 profiling and 12 tuned iterations.

    Four of the baseline are in two blocks between the tuned ones.

    With a grid, a day of it passes in the job's 14 seconds, targets follow it, and days with and without gaps follow.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_sample_history(job_name, is_measured=is_measured, has_grid=has_grid))
    return path


@cache
def _sample_history(job_name: str, *, is_measured: bool, has_grid: bool) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder, "history.sqlite3")
        writer = HistoryWriter(path, WriterOptions(batch_s=0.01))
        writer.start()
        for record in _records(job_name, is_measured=is_measured, has_grid=has_grid):
            writer.write(record)
        assert writer.flush(10.0)
        writer.close()
        return path.read_bytes()


def _records(job_name: str, *, is_measured: bool, has_grid: bool) -> Iterator[Record]:
    noise = random.Random(7)
    job_id = f"{job_name}-1"
    yield JobRecord(
        job_id, job_name, "run-1", 0, "bubble-aware", "1f1b", "torch", True, NUM_RANKS, NUM_MICROBATCHES, 0.0, 0, START,
        tags=TAGS,
    )  # fmt: skip
    for rank in range(NUM_RANKS):
        yield RankRecord(job_id, rank, f"GPU-{rank}", "A100", 100 + rank, 0, START)
    yield PlanRecord(job_id, 1, PROFILE, START + timedelta(seconds=4), 8)
    yield PlanRecord(job_id, 2, TUNED, START + timedelta(seconds=6), 12)
    usual, slow = spans(is_tuned=False), spans(is_tuned=True)
    for index in range(28):
        plan = None if index < 8 or index in {16, 17, 22, 23} else PROFILE if index < 12 else TUNED
        energy_j = {None: 100.0, PROFILE: 95.0, TUNED: 82.0}[plan] + noise.gauss(0.0, 0.2)
        yield IterationRecord(
            job_id,
            index,
            START + timedelta(seconds=0.5 * index),
            0.5 + noise.gauss(0.0, 0.0005),
            energy_j if is_measured else None,
            plan.plan_id if plan else BASELINE_PLAN_ID,
            plan.purpose if plan else PlanPurpose.BASELINE,
            index >= 2,
            (slow if plan is TUNED else usual) if index >= 2 else (),
        )
    for second in range(-2, 14) if is_measured else ():
        at, owner = START + timedelta(seconds=second), job_id if second >= 0 else ""
        for rank in range(NUM_RANKS):
            power_w = 60.0 if second < 0 else 50.0 + rank
            for bucket_s in (1, 60, 3600):
                begin = at - timedelta(seconds=(60 * at.minute + at.second) % bucket_s)
                energy_j = power_w  # of one second
                yield RollupRecord(
                    bucket_s, f"GPU-{rank}", begin, owner, energy_j, power_w, power_w, 1410.0, 10, measured_s=1.0
                )
    if has_grid:
        yield from (*grid_of_the_job(job_id), *days_after_it())
    yield JobEndRecord(job_id, START + timedelta(seconds=14), "released")


def grid_of_the_job(job_id: str) -> Iterator[IntensityRecord | TargetRecord]:
    """Yield one hour of a grid for each second of the job, the last ones forecast, and targets that follow it."""
    for hour in range(14):
        begin, grid_from = START + timedelta(seconds=hour), START + timedelta(hours=hour)
        yield IntensityRecord(
            "GB", "csv", SignalKind.AVERAGE, EmissionFactor.LIFECYCLE,
            SampleStatus.MEASURED if hour < 11 else SampleStatus.FORECAST,
            begin, begin + timedelta(seconds=1), grid_from, 120.0 + 15 * hour - 14 * max(0, hour - 8), START,
        )  # fmt: skip
    frontier = tuple((0.5 + 0.01 * k, 82.0 - 6.0 * k / (k + 2)) for k in range(8))
    for second, permitted_s in ((0.0, None), (4.0, 0.505), (8.0, 0.525), (11.0, 0.51)):
        yield TargetRecord(
            job_id, START + timedelta(seconds=second), "carbon", permitted_s, "the grid is dirty now",
            IntensityBasis.LIVE, 150.0, "g/kWh", 0.01, 0.05, 0.0, frontier if second == 4.0 else None,
        )  # fmt: skip


def days_after_it() -> Iterator[RollupRecord]:
    """Yield six days after the job on which other jobs ran for some hours; on one of them much is missing."""
    for day in range(1, 7):
        for hour in range(24):
            at = START.replace(hour=0) + timedelta(days=day, hours=hour)
            for rank in range(NUM_RANKS):
                owner, power_w = ("later-1", 300.0) if hour < 3 * day else ("", 60.0)
                missing_s = 1800.0 if day == 4 and hour > 12 else 0.0
                yield RollupRecord(
                    3600, f"GPU-{rank}", at, owner, 3600 * power_w, power_w, power_w, 1410.0, 36_000,
                    90 * power_w, 3600 - missing_s, 0.0, missing_s,
                )  # fmt: skip
