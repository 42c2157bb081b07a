"""The headline of a job is its saving in words, or an honest sentence on why there is none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpuenergyd.core.job.result_text import saving_span_text, slowdown_span_text
from gpuenergyd.report.headline import evidence, headline, tiles
from gpuenergyd.report.job import JobReport, job_reports
from gpuenergyd.report.terminal.tables import job_table
from gpuenergyd.store import open_history
from tests.support.sample_history import write_sample_history

NO_PLAN: dict[str, Any] = {
    "num_tuned_iterations": 0, "saving_ratio": None, "saving_interval": None, "slowdown_ratio": None,
    "slowdown_interval": None, "iteration_time_s": None, "energy_per_iteration_j": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def report_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., JobReport]:
    path: Path = write_sample_history(tmp_path_factory.mktemp("history") / "history.sqlite3")
    with open_history(str(path)) as history:
        (report,) = job_reports(history)
    return lambda **changes: replace(report, summary=replace(report.summary, **changes))


def test_a_saving_is_stated_with_the_change_of_speed_and_both_intervals(
    report_with: Callable[..., JobReport],
) -> None:
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
