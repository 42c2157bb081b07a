"""Predictions for jobs that are only observed are read back as they were made; old ones never below 0."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpuenergyd.core.pipeline.plan import SAVING_HIGH, SAVING_LOW, ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.store import open_history
from gpuenergyd.store.records import PlanRecord
from tests.store.test_history import START, iteration, job
from tests.support.stored_history import write_records

PREDICTED = PlanPrediction(1.0, 75.0, baseline_time_s=1.0, baseline_energy_j=100.0)


def read_back(path: Path) -> tuple[float | None, ...]:
    with open_history(path) as history:
        (summary,) = history.job_summaries()
    assert summary.predicted_saving_basis == "assumed"
    return summary.predicted_saving_ratio, summary.predicted_saving_low_ratio, summary.predicted_saving_high_ratio


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (((SAVING_LOW, 0.1), (SAVING_HIGH, 0.3)), (0.25, 0.1, 0.3)),
        (((SAVING_LOW, 0.0), (SAVING_HIGH, 0.3)), (0.0, 0.0, 0.3)),
        ((), (0.25, None, None)),
    ],
)
def test_a_prediction_stays_as_it_was_made_although_the_job_uses_less_at_full_speed_now(
    figures: tuple[tuple[str, float], ...], expected: tuple[float | None, ...], tmp_path: Path
) -> None:
    plan = ClockPlan("predicted", PlanPurpose.PREDICTED, predicted=PREDICTED, reason="assumed", figures=figures)
    record = PlanRecord("j1", -1, plan, START, 5)

    path = write_records(tmp_path / "h.sqlite3", job(), record, *(iteration(k, energy_j=70.0) for k in range(5)))

    assert read_back(path) == expected


def test_a_prediction_of_an_old_version_is_compared_with_the_job_and_never_below_zero(tmp_path: Path) -> None:
    plan = ClockPlan("predicted", PlanPurpose.PREDICTED, predicted=PREDICTED, reason="assumed")
    shown = []
    for energy_j in (70.0, 100.0):
        iterations = (iteration(k, energy_j=energy_j) for k in range(5))
        path = write_records(tmp_path / f"{energy_j}.sqlite3", job(), PlanRecord("j1", -1, plan, START, 5), *iterations)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE plans SET predicted_saving_ratio = NULL")
        shown.append(read_back(path))

    assert shown == [(0.0, None, None), (0.25, None, None)]
