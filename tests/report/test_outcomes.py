"""Every report says why a job saved nothing: the table, one job's details, JSON and the HTML page."""

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.report.job import JobReport, job_reports
from gpuenergyd.report.terminal import live, status_lines
from gpuenergyd.report.terminal.tables import job_table, jobs_table
from gpuenergyd.store import History, IterationRow, open_history
from gpuenergyd.store.records import (
    ORDER_ADVICE,
    SLOWDOWN_ADVICE,
    ControlEventRecord,
    JobEndRecord,
    JobRecord,
    JobResumedRecord,
)
from gpuenergyd_formats.page import report_page
from tests.support.sample_history import write_sample_history
from tests.support.sample_status import sample_status
from tests.support.stored_history import write_records

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
REASON = "policy uniform failed: ValueError: no clock"
AT = datetime(2026, 3, 1, tzinfo=UTC)


def job(job_id: str) -> JobRecord:
    return JobRecord(job_id, "gpt", "run", 0, "uniform", "1f1b", "torch", True, 1, 8, 0.0, 1000, NOON)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    path = tmp_path / "history.sqlite3"
    end = JobEndRecord("j1", NOON + timedelta(hours=1), "rank 0 was released", "at_full_speed", REASON)
    write_records(path, job("j1"), end)
    with open_history(path) as opened:
        yield opened


def text_of(rendered: object) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(rendered)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(("predicted_j", "is_shown"), [(80.5, True), (100.0, False), (103.4, False)])
def test_a_fit_above_full_speed_is_not_shown_as_a_plan(predicted_j: float, *, is_shown: bool, tmp_path: Path) -> None:
    with open_history(write_sample_history(tmp_path / "history.sqlite3")) as history:
        (sample,) = job_reports(history)
        values: dict[str, Any] = {"predicted_energy_j": predicted_j, "lower_bound_j": 79.0, "baseline_energy_j": 100.0}
        report = replace(sample, summary=replace(sample.summary, **values, saving_ratio=None))
        page = report_page(history, [report], made_at=NOON)
    status = sample_status()
    status["jobs"][0] |= {**values, "num_iterations_of_plan": 0, "predicted_iteration_time_s": 1.0}

    for text in (text_of(job_table(report)), page, text_of(live.status_view(status))):
        assert bool(re.search(r"predicted( by the last plan)? \(fit\)|prediction of the plan", text)) is is_shown
        assert ("lower bound" in text.lower()) is is_shown


def only_report(history: History) -> JobReport:
    (found,) = job_reports(history)
    return found


def test_the_terminal_names_the_reason_for_no_saving(history: History) -> None:
    found = only_report(history)

    assert f"gpt: {REASON}" in text_of(jobs_table([found, found]))
    assert f"no saving: {REASON}" in text_of(job_table(found))


def test_json_has_the_outcome_and_its_reason(history: History) -> None:
    values = only_report(history).to_dict()

    assert (values["outcome"], values["outcome_reason"]) == ("at_full_speed", REASON)


def test_the_page_names_the_reason_for_no_saving(history: History) -> None:
    page = report_page(history, job_reports(history), made_at=NOON)

    assert f"No saving: {REASON}." in page


def test_the_newest_advice_about_the_order_is_in_the_terminal_and_on_the_page(history: History, tmp_path: Path) -> None:
    assert "order of instructions" not in text_of(job_table(only_report(history)))
    advice = [f"split backward in place: {percent} % instead of 14 %" for percent in (22, 24)]
    events = [ControlEventRecord(NOON, ORDER_ADVICE, "daemon", "j1", None, reason) for reason in advice]
    other = ControlEventRecord(NOON, "notice", "daemon", "j1", None, "something else")
    write_records(tmp_path / "history.sqlite3", *events, other)

    assert f"order of instructions: {advice[1]}" in text_of(job_table(only_report(history)))
    assert f"Order of instructions: {advice[1]}." in report_page(history, job_reports(history), made_at=NOON)


def test_advice_on_the_slowdown_is_in_the_table_the_terminal_and_on_the_page_of_any_outcome(
    history: History, tmp_path: Path
) -> None:
    assert "slowdown" not in text_of(job_table(only_report(history)))
    advice = "at 2 % slower this job would use 6.1 % less energy (5.0-7.2 %, measured): --max-slowdown 0.02"
    saved = JobEndRecord("j1", NOON + timedelta(hours=1), "rank 0 was released", "saved", "34 iterations under a plan")
    event = ControlEventRecord(NOON, SLOWDOWN_ADVICE, "daemon", "j1", None, advice)
    write_records(tmp_path / "history.sqlite3", saved, event)

    found = only_report(history)
    assert f"with more slowdown: {advice}" in text_of(job_table(found))
    assert f"gpt, with more slowdown: {advice}" in text_of(jobs_table([found, found]))
    assert f"With more slowdown: {advice}." in report_page(history, job_reports(history), made_at=NOON)


def test_a_resumed_job_has_no_outcome_and_an_abandoned_one_an_unknown_one(history: History, tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    write_records(path, JobResumedRecord("j1"))
    running = only_report(history).to_dict()
    write_records(path)
    abandoned = only_report(history).to_dict()

    assert (running["outcome"], running["outcome_reason"], running["ended_at"]) == (None, None, None)
    assert (abandoned["outcome"], abandoned["outcome_reason"]) == ("unknown", "the daemon stopped before the job")


def test_the_advice_of_a_pipeline_across_hosts_is_shown_with_its_leading_rank() -> None:
    advice = "split backward in place: 24 % instead of 14 %"
    member = {"order_advice": None, "order": None, "pipeline": None}
    whole = {"order_advice": advice, "order": "split backward in place"}

    assert status_lines._order_advice(member) == []
    (line,) = status_lines._order_advice({**member, "pipeline": whole})
    assert line.plain == f"order of instructions (in use: split backward in place): {advice}"


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
