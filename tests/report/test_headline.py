"""The headline of a job is its saving in words, or an honest sentence on why there is none."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from gpuenergyd.core.job.result_text import saving_span_text, slowdown_span_text
from gpuenergyd.report.group_keys import GroupBy
from gpuenergyd.report.groups import EnergyQuery, grouped
from gpuenergyd.report.headline import evidence, headline
from gpuenergyd.report.job import TOKENS_TAG, JobReport, job_reports
from gpuenergyd.report.terminal.tables import groups_table, job_table, jobs_table
from gpuenergyd.report.totals import saved_total, totals_dict
from gpuenergyd.store import History, JobSummary, open_history
from gpuenergyd_formats.tiles import tiles
from tests.support.sample_history import write_sample_history

NO_PLAN: dict[str, Any] = {
    "num_tuned_iterations": 0, "saving_ratio": None, "saving_interval": None, "slowdown_ratio": None,
    "slowdown_interval": None, "iteration_time_s": None, "energy_per_iteration_j": None,
}  # fmt: skip
CHANCE: dict[str, Any] = {"saving_ratio": 0.412, "saving_interval": (-0.57, 0.48)}
"""The saving of a job whose GPUs were idle most of the time."""
SAVED: dict[str, Any] = {"saving_ratio": 0.18, "saving_interval": (0.17, 0.19)}
USED_MORE: dict[str, Any] = {"saving_ratio": -0.02, "saving_interval": (-0.03, -0.01)}
PER_RATIO_J = 100.0 * 12
"""Baseline energy of all tuned iterations."""
Reports = Callable[..., list[JobReport]]


@pytest.fixture(scope="module")
def report_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., JobReport]:
    path: Path = write_sample_history(tmp_path_factory.mktemp("history") / "history.sqlite3")
    with open_history(str(path)) as history:
        (report,) = job_reports(history)
    return lambda **changes: replace(report, summary=replace(report.summary, **changes))


def test_a_saving_is_stated_with_the_change_of_speed_and_both_intervals(report_with: Callable[..., JobReport]) -> None:
    report = report_with(
        saving_ratio=0.134, saving_interval=(0.131, 0.137), slowdown_ratio=-0.003, slowdown_interval=(-0.005, 0.001)
    )

    assert headline(report) == "13.4 % less energy per iteration, no slower."
    assert evidence(report).startswith("95 % confidence: 13.1 % to 13.7 % less energy, at most 0.1 % slower.")
    values = {tile.name: (tile.value, tile.note) for tile in tiles(report)}
    assert values["speed"] == ("no slower", "95 %: at most 0.1 % slower")


def test_energy_of_superchips_is_not_called_that_of_gpus_and_estimated_iterations_are_counted(
    report_with: Callable[..., JobReport],
) -> None:
    report = report_with(energy_scope="module", num_estimated_iterations=12, num_iterations=40)

    notes = {tile.name: tile.note for tile in tiles(report)}
    assert notes["energy used"].startswith("by its modules (GPU, processor, memory) in ")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(job_table(report))
    text = shown.get()
    assert "total energy of modules (GPU, processor, memory): " in text
    assert "energy of 12 of 40 iterations: estimated, since each was shorter than the time between readings" in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"slowdown_ratio": 0.0004, "saving_ratio": 0.1, "saving_interval": (0.09, 0.11)},
         "10.0 % less energy per iteration, at the same speed."),
        ({"slowdown_ratio": 0.01, "saving_ratio": 0.004, "saving_interval": (-0.002, 0.01)},
         "No significant saving; iterations ran 1.0 % slower."),
        ({"slowdown_ratio": 0.0, "saving_ratio": 0.412, "saving_interval": (-0.57, 0.48)},
         "No significant saving; iterations ran at the same speed."),
        ({"slowdown_ratio": None, "saving_ratio": None, "num_tuned_iterations": 2, "num_baseline_iterations": 9},
         ("No saving is known: 2 tuned iterations, 9 at full speed, but fewer than two blocks at full speed between"
          " tuned iterations at the job's own pace.")),
        ({"slowdown_ratio": 0.002, "saving_ratio": None},
         "Energy was not measured, so no saving is known; iterations ran 0.2 % slower."),
        (NO_PLAN | {"num_trial_iterations": 2, "num_profile_iterations": 4},
         "No plan was applied, so nothing was saved: 10 iterations at full speed, 2 in trials, 4 for profiling."),
        (NO_PLAN | {"num_trial_iterations": 0, "ended_at": None},
         "No plan was applied, so nothing was saved: 10 iterations at full speed so far."),
        (NO_PLAN | {"predicted_saving_ratio": 0.12, "predicted_saving_basis": "assumed curves"},
         "Clocks were only observed. Predicted if they are set: 12.0 % less energy (assumed curves)."),
        (NO_PLAN | {"predicted_saving_ratio": 0.12, "predicted_saving_low_ratio": 0.08,
                    "predicted_saving_high_ratio": 0.19, "predicted_saving_basis": "assumed curves"},
         ("Clocks were only observed. Predicted if they are set: 12.0 % less energy (range: 8.0 % to 19.0 % less"
          " energy) (assumed curves).")),
        (NO_PLAN | {"predicted_saving_ratio": 0.0, "predicted_saving_basis": "assumed curves"},
         ("Clocks were only observed. Predicted if they are set: nothing to save beyond the error of the prediction"
          " (assumed curves).")),
        (NO_PLAN | {"num_iterations": 0}, "No iteration was measured."),
    ],
)  # fmt: skip
def test_each_kind_of_job_has_one_honest_sentence(
    changes: dict[str, Any], expected: str, report_with: Callable[..., JobReport]
) -> None:
    assert headline(report_with(**changes)) == expected


def test_a_saving_that_may_be_chance_has_no_amount(report_with: Callable[..., JobReport]) -> None:
    values = {tile.name: tile for tile in tiles(report_with(saving_ratio=0.412, saving_interval=(-0.57, 0.48)))}

    assert values["energy per iteration"].value == "no significant saving"
    assert values["energy per iteration"].note == "95 %: 57.0 % more to 48.0 % less"
    assert not values["energy per iteration"].is_good
    assert "energy saved" not in values


def test_a_job_without_a_plan_says_what_it_needs(report_with: Callable[..., JobReport]) -> None:
    assert evidence(report_with(**NO_PLAN, ended_at=None)) == "A plan follows after the baseline."
    assert evidence(report_with(**NO_PLAN, schedule_name="loop")) == (
        "A loop without pipeline stages has no waiting time to use; it saves only with a permitted slowdown."
    )


def test_a_job_without_a_plan_has_values_of_full_speed_and_no_dashes(report_with: Callable[..., JobReport]) -> None:
    report = report_with(**NO_PLAN)

    assert evidence(report) == ""
    assert {(tile.name, tile.note) for tile in tiles(report)} >= {
        ("energy per iteration", "at full speed"), ("iteration time", "at full speed")
    }  # fmt: skip
    assert all(tile.value != "-" for tile in tiles(report))


@pytest.mark.parametrize(
    ("write", "interval", "expected"),
    [
        (saving_span_text, (0.11, 0.121), "11.0 % to 12.1 % less energy"),
        (saving_span_text, (-0.002, 0.01), "0.2 % more to 1.0 % less energy"),
        (saving_span_text, (-0.03, -0.01), "1.0 % to 3.0 % more energy"),
        (slowdown_span_text, (0.001, 0.004), "0.1 % to 0.4 % slower"),
        (slowdown_span_text, (-0.004, -0.002), "no slower"),
        (slowdown_span_text, (-0.002, 0.001), "at most 0.1 % slower"),
        (slowdown_span_text, (-0.004, 0.0001), "at most 0.0 % slower"),
    ],
)
def test_an_interval_is_written_without_signs(
    write: Callable[[tuple[float, float]], str], interval: tuple[float, float], expected: str
) -> None:
    assert write(interval) == expected


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
