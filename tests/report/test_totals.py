"""Totals over several jobs: only significant savings count, and the jobs left out are counted."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from gpuenergyd.report.group_keys import GroupBy
from gpuenergyd.report.groups import EnergyQuery, grouped
from gpuenergyd.report.job import TOKENS_TAG, JobReport, job_reports
from gpuenergyd.report.terminal.tables import groups_table, job_table, jobs_table
from gpuenergyd.report.totals import saved_total, totals_dict
from gpuenergyd.store import History, JobSummary, open_history
from tests.support.sample_history import write_sample_history

CHANCE: dict[str, Any] = {"saving_ratio": 0.412, "saving_interval": (-0.57, 0.48)}
"""The saving of a job whose GPUs were idle most of the time."""
SAVED: dict[str, Any] = {"saving_ratio": 0.18, "saving_interval": (0.17, 0.19)}
USED_MORE: dict[str, Any] = {"saving_ratio": -0.02, "saving_interval": (-0.03, -0.01)}
PER_RATIO_J = 100.0 * 12
"""Baseline energy of all tuned iterations."""

Reports = Callable[..., list[JobReport]]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    path: Path = write_sample_history(tmp_path_factory.mktemp("history") / "history.sqlite3", has_grid=True)
    with open_history(path) as history:
        yield history


@pytest.fixture
def reports_with(history: History) -> Reports:
    """Return a function that makes one report per saving, from the one job of the history."""
    (report,) = job_reports(history)

    def make(*changes: dict[str, Any]) -> list[JobReport]:
        common: dict[str, Any] = {"baseline_energy_j": 100.0, "num_tuned_iterations": 12}
        return [
            replace(report, summary=replace(report.summary, **common, **change, job_name=f"job {k}"))
            for k, change in enumerate(changes)
        ]

    return make


def printed(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_a_saving_that_may_be_chance_is_not_added(reports_with: Reports) -> None:
    total = saved_total(reports_with(SAVED, CHANCE, USED_MORE))

    assert total.saved_energy_j == pytest.approx((0.18 - 0.02) * PER_RATIO_J)
    assert (total.num_counted, total.num_not_significant) == (2, 1)
    half_j = (0.01**2 + 0.01**2) ** 0.5 * PER_RATIO_J
    assert total.interval_j == pytest.approx((0.16 * PER_RATIO_J - half_j, 0.16 * PER_RATIO_J + half_j))
    assert total.text() == (
        "192.0 J saved by 2 jobs together (95 %: 175.0 J to 209.0 J). 1 job is not counted: its saving is not"
        " significant."
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([CHANCE, CHANCE], "No significant saving. 2 jobs are not counted: their savings are not significant."),
        ([{"saving_ratio": None, "saving_interval": None}], ""),
        ([USED_MORE], "24.0 J more used by 1 job together (95 %: -36.0 J to -12.0 J)."),
    ],
)
def test_each_total_has_a_sentence(changes: list[dict[str, Any]], expected: str, reports_with: Reports) -> None:
    assert saved_total(reports_with(*changes)).text() == expected


def test_groups_add_significant_savings_and_count_the_others(history: History, reports_with: Reports) -> None:
    reports = reports_with(SAVED, CHANCE)
    query = EnergyQuery(history, only_jobs=True)

    (user,) = grouped(query, reports, [GroupBy.USER])
    (tag,) = grouped(query, reports, [GroupBy.TAG], tag="user")

    for group in (user, tag):
        assert group.saved_energy_j == pytest.approx(0.18 * PER_RATIO_J)
        assert group.to_dict()["num_not_significant"] == 1
    text = printed(groups_table([user.to_dict()], by=["user"]))
    assert "saved: 1 job is not counted: its saving is not significant." in text


def test_the_table_of_jobs_has_intervals_and_the_total(reports_with: Reports) -> None:
    text = printed(jobs_table(reports_with(SAVED, CHANCE)))

    assert "+18.0 %" in text
    assert "+17.0 to +19.0 %" in text
    assert "not significant" in text
    assert "-57.0 to +48.0 %" in text
    assert "+41.2 %" not in text
    assert "216.0 J saved by 1 job together (95 %: 204.0 J to 228.0 J). 1 job is not counted" in text


def test_amounts_of_a_saving_that_may_be_chance_are_missing_in_json(reports_with: Reports) -> None:
    saved, chance = (report.to_dict() for report in reports_with(SAVED, CHANCE))

    assert (saved["is_saving_significant"], chance["is_saving_significant"]) == (True, False)
    assert saved["saved_energy_j"] is not None
    assert saved["saved_by_plan_g"] is not None
    names = ("saved_energy_j", "saved_by_plan_g", "saved_by_frontier_g", "saved_by_timing_g")
    assert [chance[name] for name in names] == [None] * 4
    assert (chance["saving_ratio"], chance["saving_low_ratio"]) == (0.412, -0.57)
    assert chance["carbon_g"] == saved["carbon_g"]


def test_carbon_totals_add_significant_savings_only(reports_with: Reports) -> None:
    reports = reports_with(SAVED, CHANCE)
    totals, alone = totals_dict(reports), totals_dict(reports[:1])

    assert totals["saved_carbon_g"] == alone["saved_carbon_g"] is not None
    assert totals["carbon_g"] == pytest.approx(2 * alone["carbon_g"])
    assert (totals["num_jobs"], totals["num_jobs_counted"], totals["num_not_significant"]) == (2, 1, 1)
    assert "emissions saved in tuned iterations: no significant saving" in printed(job_table(reports[1]))
    assert "saved in tuned iterations" in printed(job_table(reports[0]))


def test_the_table_of_one_job_makes_no_claim_and_marks_what_comes_from_the_fit(reports_with: Reports) -> None:
    saved, chance = reports_with(SAVED, CHANCE)

    text = printed(job_table(chance))

    assert "No significant saving; iterations ran" in text
    assert "41.2" not in text
    assert "lower bound of the last plan (fit) 80.0 J" in text
    assert "predicted by the last plan (fit) 80.5 J" in text
    assert "fitted lower bound" not in printed(job_table(saved))


def test_a_measurement_below_the_lower_bound_is_explained(reports_with: Reports) -> None:
    (report,) = reports_with(SAVED | {"lower_bound_j": 90.0})
    plan = report.plan_in_force
    assert plan is not None
    assert plan.energy_j is not None

    below = 100 * (1 - plan.energy_j / 90.0)
    assert f"plan in force: measured energy is {below:.1f} % below the fitted lower bound" in printed(job_table(report))


def test_a_summary_without_a_saving_is_neither(reports_with: Reports) -> None:
    summary: JobSummary = reports_with({"saving_ratio": None, "saving_interval": None})[0].summary

    assert summary.is_saving_significant is None


@pytest.mark.parametrize(
    ("tokens", "expected_j"), [("50", 0.2), ("0", None), ("-5", None), ("many", None), ("", None), ("1e3", None)]
)
def test_joules_per_token_need_a_number_of_tokens(reports_with: Reports, tokens: str, expected_j: float | None) -> None:
    (report,) = reports_with({"tags": ((TOKENS_TAG, tokens),), "energy_per_iteration_j": 10.0})

    named = report.to_dict()

    assert named["energy_per_token_j"] == expected_j
    assert named["baseline_energy_per_token_j"] == (None if expected_j is None else 2.0)
