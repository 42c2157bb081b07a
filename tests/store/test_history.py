"""Records are read back as written, on SQLite and PostgreSQL."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPrediction, PlanPurpose, RankClocks
from gpuenergyd.store import HistoryWriter, open_history
from gpuenergyd.store.reader import SCHEMA_REVISION
from gpuenergyd.store.records import (
    ControlEventRecord,
    IterationRecord,
    JobEndRecord,
    JobRecord,
    PlanRecord,
    RankRecord,
    RollupRecord,
)

START = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
TUNED = ClockPlan(
    plan_id="tuned-1",
    purpose=PlanPurpose.TUNED,
    ranks=(RankClocks(0, (1200, None), (ClockChange(Instruction(0, InstructionKind.F, 0), 0.0015, 1200),)),),
    predicted=PlanPrediction(1.0, 80.0, 79.5, 1.0, 100.0),
    reason="slack on rank 0",
)


def job(job_id: str = "j1", *, name: str = "gpt", started_at: datetime = START) -> JobRecord:
    return JobRecord(job_id, name, "run-1", 0, "bubble-aware", "1f1b", "torch", True, 2, 8, 0.0, 1000, started_at)


def iteration(
    index: int,
    *,
    time_s: float = 1.0,
    energy_j: float | None = 100.0,
    plan: ClockPlan | None = None,
    is_regular: bool = True,
) -> IterationRecord:
    return IterationRecord(
        "j1",
        index,
        START + timedelta(seconds=index),
        time_s,
        energy_j,
        plan.plan_id if plan else "baseline",
        plan.purpose if plan else PlanPurpose.BASELINE,
        is_regular,
    )


def test_a_summary_compares_a_job_with_its_own_baseline(writer: HistoryWriter, place: str) -> None:
    trial, profile = ClockPlan("try-1", PlanPurpose.TRIAL), ClockPlan("try-0", PlanPurpose.PROFILE)
    writer.write(job())
    writer.write(RankRecord("j1", 1, "GPU-b", "A100", 11, 1000, START))
    writer.write(RankRecord("j1", 0, "GPU-a", "A100", 10, 1000, START))
    writer.write(PlanRecord("j1", 1, profile, START, 5))
    writer.write(PlanRecord("j1", 2, TUNED, START, 6))
    for record in (
        iteration(0, time_s=9.0, is_regular=False),
        *(iteration(i, time_s=1.0 + 0.1 * (i - 2)) for i in (1, 2, 3)),
        iteration(4, time_s=1.5, energy_j=85.0, plan=trial),
        iteration(5, time_s=1.4, energy_j=90.0, plan=profile),
        *(iteration(i, time_s=1.01, energy_j=80.0 + i - 7, plan=TUNED) for i in (6, 7, 8)),
        iteration(9, time_s=1.01, energy_j=None, plan=TUNED),
    ):
        writer.write(record)
    writer.write(JobEndRecord("j1", START + timedelta(seconds=12), "released"))
    assert writer.flush(10)

    with open_history(place) as history:
        (summary,) = history.job_summaries()

    assert (summary.job_name, summary.end_reason, summary.gpu_uuids) == ("gpt", "released", ("GPU-a", "GPU-b"))
    assert summary.duration_s == 12
    assert (summary.num_iterations, summary.num_measured_iterations) == (10, 8)
    assert summary.energy_j == pytest.approx(300 + 85 + 90 + 240)
    assert (summary.num_baseline_iterations, summary.baseline_time_s, summary.baseline_energy_j) == (3, 1.0, 100.0)
    assert (summary.num_tuned_iterations, summary.iteration_time_s) == (4, 1.01)
    assert summary.energy_per_iteration_j == 80.0
    assert (summary.num_profile_iterations, summary.profile_energy_j) == (1, 90.0)
    assert (summary.num_trial_iterations, summary.trial_energy_j) == (1, 85.0)
    assert (summary.saving_ratio, summary.slowdown_ratio) == (None, None)  # no block at full speed after the plan
    assert (summary.predicted_iteration_time_s, summary.predicted_energy_j, summary.lower_bound_j) == (1.0, 80.0, 79.5)


def test_full_speed_blocks_between_tuned_iterations_belong_to_the_baseline(writer: HistoryWriter, place: str) -> None:
    proof = ClockPlan("proof", PlanPurpose.BASELINE)
    writer.write(job())
    for index in range(60):
        plan = None if index < 10 else (proof if index in range(24, 28) or index in range(42, 46) else TUNED)
        drift = 1.0 + 0.0002 * index
        energy_j = 100.0 if plan is not TUNED else 80.0
        writer.write(iteration(index, time_s=drift, energy_j=energy_j * drift, plan=plan))
    assert writer.flush(10)

    with open_history(place) as history:
        (summary,) = history.job_summaries()

    assert summary.num_baseline_iterations == 18
    assert summary.num_tuned_iterations == 42
    assert summary.slowdown_interval is not None
    assert summary.saving_interval is not None
    assert summary.slowdown_interval == pytest.approx((0.0, 0.0), abs=1e-3)
    assert summary.saving_interval == pytest.approx((0.2, 0.2), abs=1e-3)


def test_missing_energy_is_none_and_never_zero(writer: HistoryWriter, place: str) -> None:
    writer.write(job())
    writer.write(iteration(0, energy_j=None))
    assert writer.flush(10)

    with open_history(place) as history:
        (summary,) = history.job_summaries()
        (row,) = history.iterations("j1")

    assert row.energy_j is None
    assert summary.energy_j is None
    assert summary.baseline_energy_j is None
    assert summary.saving_ratio is None
    assert summary.slowdown_ratio is None
    assert summary.ended_at is None


def test_plans_timelines_and_instants_are_read_back_unchanged(writer: HistoryWriter, place: str) -> None:
    spans = (
        ObservedSpan(0, InstructionKind.F, 0, 0, 0.0, 0.012345678, 1305.5),
        ObservedSpan(1, InstructionKind.B, 3, 1, 0.5, 0.75, None),
    )
    writer.write(job())
    writer.write(PlanRecord("j1", 4, TUNED, START, 17))
    writer.write(IterationRecord("j1", 3, START, 1.0, 5.0, "tuned-1", PlanPurpose.TUNED, True, spans))
    assert writer.flush(10)

    with open_history(place) as history:
        (plan,) = history.plans("j1")
        timeline = history.spans("j1", 3)
        (row,) = history.iterations("j1")
        without = history.spans("j1", 99)
        kept = history.iterations_with_spans("j1")

    assert plan.plan.ranks == TUNED.ranks
    assert (plan.plan.purpose, plan.plan.reason, plan.plan_epoch, plan.apply_at_iteration) == (
        PlanPurpose.TUNED,
        "slack on rank 0",
        4,
        17,
    )
    assert timeline == spans
    assert row.started_at == START
    assert without == ()
    assert kept == (3,)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"until": START}, []),
        ({"since": START + timedelta(days=2)}, ["late"]),
        ({"since": START, "until": START + timedelta(hours=1)}, ["early"]),
        ({"job": "gpt"}, ["early"]),
        ({"job": "late"}, ["late"]),
        ({"job": "nobody"}, []),
    ],
)
def test_jobs_are_found_by_time_id_and_name(
    writer: HistoryWriter, place: str, filters: dict[str, object], expected: list[str]
) -> None:
    writer.write(job("early"))
    writer.write(JobEndRecord("early", START + timedelta(hours=1), "released"))
    writer.write(job("late", name="other", started_at=START + timedelta(days=3)))
    assert writer.flush(10)

    with open_history(place) as history:
        found = [summary.job_id for summary in history.job_summaries(**filters)]  # type: ignore[arg-type]

    assert found == expected


def test_a_rollup_written_in_two_parts_is_their_sum(writer: HistoryWriter, place: str) -> None:
    def part(energy_j: float | None, power_w: float | None, num_samples: int) -> RollupRecord:
        return RollupRecord(60, "GPU-a", START, "j1", energy_j, power_w, power_w, 1000.0, num_samples)

    writer.write(part(10.0, 100.0, 3))
    assert writer.flush(10)
    writer.write(part(2.0, 200.0, 1))
    assert writer.flush(10)
    writer.write(part(None, None, 0))
    assert writer.flush(10)

    with open_history(place) as history:
        (rollup,) = history.rollups(bucket_s=60)

    assert (rollup.energy_j, rollup.max_power_w, rollup.num_samples) == (12.0, 200.0, 4)
    assert rollup.mean_power_w == pytest.approx(125.0)


def test_control_events_are_read_back_with_actor_reason_and_values(writer: HistoryWriter, place: str) -> None:
    writer.write(ControlEventRecord(START, "lease", "uid 1000", "j1", "GPU-a", "plan tuned-1", "unlocked", "leased"))
    assert writer.flush(10)

    with open_history(place) as history:
        (event,) = history.control_events("j1")

    assert (event.actor, event.action, event.reason) == ("uid 1000", "lease", "plan tuned-1")
    assert (event.before, event.after) == ("unlocked", "leased")


@pytest.mark.fault(59)
def test_names_that_an_earlier_version_stored_are_read_as_printable_lines(writer: HistoryWriter, place: str) -> None:
    stored = replace(job(name="gpt\x1b[2J"), tags=(("team", "a\u202eb\n"),))
    writer.write(stored)
    assert writer.flush(10)

    with open_history(place) as history:
        (found,) = history.job_summaries()

    assert (found.job_name, found.tags) == ("gpt\\x1b[2J", (("team", "a\\u202eb\\n"),))


def test_jobs_left_open_by_an_earlier_daemon_are_ended_by_the_next(writer: HistoryWriter, place: str) -> None:
    writer.write(job())
    writer.write(iteration(5))
    writer.close()

    following = HistoryWriter(place)
    following.start()
    following.close()

    with open_history(place) as history:
        (summary,) = history.job_summaries()
    assert summary.ended_at == START + timedelta(seconds=5)
    assert summary.end_reason == "the daemon stopped before the job"


def test_the_schema_matches_the_migrations(writer: HistoryWriter, place: str) -> None:
    from alembic.autogenerate import compare_metadata  # noqa: PLC0415  heavy, used by this test alone
    from alembic.migration import MigrationContext  # noqa: PLC0415  as above

    from gpuenergyd.store.database import reading_engine  # noqa: PLC0415  as above
    from gpuenergyd.store.schema import metadata  # noqa: PLC0415  as above

    writer.write(job())
    writer.close()
    with reading_engine(place).connect() as connection:
        context = MigrationContext.configure(connection)
        differences = compare_metadata(context, metadata)
        revision = context.get_current_revision()

    assert differences == []
    assert revision == SCHEMA_REVISION
