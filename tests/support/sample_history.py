"""A history as the daemon would leave it: one job with baseline, profiling and tuned iterations, timelines kept."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpuenergyd.core.pipeline import Instruction, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.plan import BASELINE_PLAN_ID, ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.core.telemetry import ObservedSpan
from gpuenergyd.core.timeline import timeline
from gpuenergyd.store import HistoryWriter
from gpuenergyd.store.records import IterationRecord, JobEndRecord, JobRecord, PlanRecord, RankRecord, RollupRecord

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
PROFILE = ClockPlan(plan_id="try-1", purpose=PlanPurpose.PROFILE)


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


def write_sample_history(path: Path, *, job_name: str = "gpt", is_measured: bool = True) -> Path:
    """Write the history of one ended job: 2 irregular, 10 baseline, 4 profiling and 12 tuned iterations."""
    noise = random.Random(7)
    writer = HistoryWriter(path, batch_s=0.01)
    writer.start()
    job_id = f"{job_name}-1"
    writer.write(
        JobRecord(
            job_id,
            job_name,
            "run-1",
            0,
            "bubble-aware",
            "1f1b",
            "torch",
            True,
            NUM_RANKS,
            NUM_MICROBATCHES,
            0.0,
            0,
            START,
            tags=TAGS,
        )
    )
    for rank in range(NUM_RANKS):
        writer.write(RankRecord(job_id, rank, f"GPU-{rank}", "A100", 100 + rank, 0, START))
    writer.write(PlanRecord(job_id, 1, PROFILE, START + timedelta(seconds=6), 12))
    writer.write(PlanRecord(job_id, 2, TUNED, START + timedelta(seconds=8), 16))
    for index in range(28):
        plan = None if index < 12 else PROFILE if index < 16 else TUNED
        energy_j = {None: 100.0, PROFILE: 95.0, TUNED: 82.0}[plan] + noise.gauss(0.0, 0.5)
        writer.write(
            IterationRecord(
                job_id,
                index,
                START + timedelta(seconds=0.5 * index),
                0.5 + noise.gauss(0.0, 0.001),
                energy_j if is_measured else None,
                plan.plan_id if plan else BASELINE_PLAN_ID,
                plan.purpose if plan else PlanPurpose.BASELINE,
                index >= 2,
                spans(is_tuned=plan is TUNED) if index >= 2 else (),
            )
        )
    if is_measured:
        for second in range(-2, 14):
            at, owner = START + timedelta(seconds=second), job_id if second >= 0 else ""
            for rank in range(NUM_RANKS):
                power_w = 60.0 if second < 0 else 50.0 + rank
                for bucket_s in (1, 60, 3600):
                    begin = at - timedelta(seconds=(60 * at.minute + at.second) % bucket_s)
                    energy_j = power_w  # of one second
                    writer.write(
                        RollupRecord(
                            bucket_s,
                            f"GPU-{rank}",
                            begin,
                            owner,
                            energy_j,
                            power_w,
                            power_w,
                            1410.0,
                            10,
                            measured_s=1.0,
                        )
                    )
    writer.write(JobEndRecord(job_id, START + timedelta(seconds=14), "released"))
    assert writer.flush(10.0)
    writer.close()
    return path
