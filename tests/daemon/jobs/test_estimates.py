"""The estimate of a job's saving: reports show what the status shows, also after the job has changed."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuenergyd.core.job.messages import AskPolicy
from gpuenergyd.daemon.jobs.iterations import IterationRecorder
from gpuenergyd.report.job import job_reports
from gpuenergyd.store import HistoryWriter, JobSummary, open_history
from gpuenergyd.store.records import JobEndRecord, JobRecord
from tests.support.job_run import JobRun, plan

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
BEFORE = {"full": (1.0, 100.0), "tuned": (1.0, 87.0)}
CHANGED = {"full": (1.2, 120.0), "tuned": (1.2, 108.0)}


def drive(run: JobRun, number: int, *, full: tuple[float, float], tuned: tuple[float, float]) -> None:
    """Run iterations with the time and energy of full speed or of a plan, and answer each question."""
    for _ in range(number):
        time_s, energy_j = full if run.is_at_full_speed else tuned
        jitter = 1 + 1e-4 * (run.index * 7 % 5 - 2)
        commands = run.pass_one(time_s * jitter, energy_j=energy_j * jitter)
        if any(isinstance(command, AskPolicy) for command in commands):
            run.decide(plan(f"tuned-{run.job.knowledge.generation}"))


def reported(run: JobRun, path: Path) -> JobSummary:
    """Record all iterations of an ended job, and return what a report shows of it."""
    writer = HistoryWriter(f"sqlite:///{path}")
    writer.start()
    writer.write(JobRecord("j", "gpt", "", 0, "p", "1f1b", "test", True, 2, 4, 0.0, 1000, START))
    replicas: Any = SimpleNamespace(compare_pace=lambda _: None)
    runner: Any = SimpleNamespace(job=run.job, job_id="j")
    recorder = IterationRecorder(runner, writer, replicas, lambda: None)
    for command in run.records:
        recorder.record(command)
    recorder.record_estimate()
    writer.write(JobEndRecord("j", START, "over"))
    assert writer.flush(30.0)
    writer.close()
    with open_history(f"sqlite:///{path}") as history:
        (report,) = job_reports(history)
        plan_in_force = report.plan_in_force
    assert plan_in_force is not None
    assert plan_in_force.saving is not None
    assert report.summary.saving_ratio is not None
    assert plan_in_force.saving.estimate == pytest.approx(report.summary.saving_ratio, abs=1e-3)
    return report.summary


@pytest.mark.parametrize("phases", [(BEFORE,), (BEFORE, CHANGED)])
def test_a_report_shows_the_estimate_of_the_status(tmp_path: Path, phases: tuple[dict[str, Any], ...]) -> None:
    run = JobRun()
    for phase in phases:
        drive(run, 120, **phase)
    shown = run.job.estimate()
    assert shown is not None
    saving, slowdown = shown.ratios
    assert saving is not None
    assert slowdown is not None

    summary = reported(run, tmp_path / "history.db")

    assert (summary.baseline_time_s, summary.baseline_energy_j) == (shown.baseline_time_s, shown.baseline_energy_j)
    assert (summary.iteration_time_s, summary.energy_per_iteration_j) == (shown.iteration_time_s, shown.energy_j)
    assert (summary.saving_ratio, summary.slowdown_ratio) == (saving.estimate, slowdown.estimate)
    assert summary.saving_interval == (saving.low, saving.high)
    assert summary.slowdown_interval == (slowdown.low, slowdown.high)
    full, tuned = phases[-1]["full"], phases[-1]["tuned"]
    assert saving.estimate == pytest.approx(1 - tuned[1] / full[1], abs=1e-3)
    assert summary.since_iteration == (0 if len(phases) == 1 else shown.since_iteration)
    assert (shown.since_iteration > 0) is (len(phases) > 1)


def test_the_estimate_before_a_change_holds_until_the_saving_is_measured_again() -> None:
    run = JobRun()
    drive(run, 60, **BEFORE)
    while run.job.knowledge.generation == 0:
        drive(run, 1, **CHANGED)

    shown = run.job.estimate()
    assert run.job.knowledge.saving() is None
    assert shown is not None
    assert shown.saving is not None
    assert shown.saving.saving_ratio is not None
    assert shown.saving.saving_ratio.low < 0.13 < shown.saving.saving_ratio.high
    assert shown.baseline_time_s == pytest.approx(1.0, rel=1e-3)
    assert shown.iteration_time_s == pytest.approx(1.0, rel=1e-3)

    drive(run, 60, **CHANGED)

    after = run.job.estimate()
    assert after is not None
    assert after.baseline_time_s == pytest.approx(1.2, rel=1e-3)
    assert after.iteration_time_s == pytest.approx(1.2, rel=1e-3)
