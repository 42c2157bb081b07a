"""The plan in force is measured separately from earlier, corrected plans."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.report.job import JobReport, job_reports
from gpuenergyd.store import IterationRow, open_history
from tests.support.sample_history import write_sample_history

AT = datetime(2026, 3, 1, tzinfo=UTC)


def report(path: Path, rows: list[tuple[float, float | None, str, PlanPurpose]]) -> JobReport:
    with open_history(write_sample_history(path / "history.sqlite3")) as history:
        (sample,) = job_reports(history)
    summary = replace(sample.summary, baseline_time_s=1.0, baseline_energy_j=100.0)
    iterations = tuple(
        IterationRow(k, AT, time_s, energy_j, plan_id, purpose, is_regular=True)
        for k, (time_s, energy_j, plan_id, purpose) in enumerate(rows)
    )
    return JobReport(summary, lambda: iterations)


def test_the_plan_in_force_is_measured_after_its_first_iteration(tmp_path: Path) -> None:
    tuned = PlanPurpose.TUNED
    rows: list[tuple[float, float | None, str, PlanPurpose]] = [(1.0, 100.0, "baseline", PlanPurpose.BASELINE)] * 5
    rows += [(1.2, 95.0, "tuned-1", tuned)] * 9
    rows += [(1.5, 99.0, "tuned-2", tuned)] + [(1.01, 85.0, "tuned-2", tuned)] * 4
    for _ in range(2):
        rows += [(1.0, 100.0, "proof", PlanPurpose.BASELINE)] * 3 + [(1.01, 85.0, "tuned-2", tuned)] * 8

    plan = report(tmp_path, rows).plan_in_force

    assert plan is not None
    assert (plan.plan_id, plan.num_iterations) == ("tuned-2", 20)
    assert plan.saving is not None
    assert plan.slowdown is not None
    assert plan.saving.estimate == pytest.approx(0.15)
    assert plan.slowdown.estimate == pytest.approx(0.01)


def test_the_saving_of_a_plan_without_measured_energy_is_unknown(tmp_path: Path) -> None:
    plan = report(tmp_path, [(1.0, None, "tuned-1", PlanPurpose.TUNED)] * 3).plan_in_force

    assert plan is not None
    assert plan.energy_j is None
    assert plan.saving is None


def test_a_job_without_tuned_iterations_has_no_plan_in_force(tmp_path: Path) -> None:
    assert report(tmp_path, [(1.0, 100.0, "baseline", PlanPurpose.BASELINE)]).plan_in_force is None
