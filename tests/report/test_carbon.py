"""Merging iterations into blocks does not change the emissions of a job."""

from datetime import timedelta
from pathlib import Path

import pytest

from gpuenergyd.core.carbon.intensity import EmissionFactor, SampleStatus, SignalKind
from gpuenergyd.report.carbon import CarbonReport, carbon_report
from gpuenergyd.store import open_history
from gpuenergyd.store.records import IntensityRecord
from tests.store.maintenance.test_compaction import NOW, compact, write_long_job
from tests.support.stored_history import write_records

NUM_ITERATIONS = 6000
BEGUN = NOW - timedelta(days=10)


def reported(path: Path) -> CarbonReport:
    with open_history(path) as history:
        (job,) = history.job_summaries()
        report = carbon_report(history, job)
    assert report is not None
    return report


def test_compaction_keeps_the_emissions_of_a_long_job(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    write_long_job(str(path), NUM_ITERATIONS, ended_at=NOW - timedelta(days=3))
    for hour in range(2):
        begin = BEGUN + timedelta(hours=hour)
        write_records(
            path,
            IntensityRecord(
                "GB", "test", SignalKind.AVERAGE, EmissionFactor.DIRECT, SampleStatus.MEASURED,
                begin, begin + timedelta(hours=1), begin, 100.0 + 300.0 * hour, NOW,
            )
        )  # fmt: skip
    before = reported(path)

    num_single, _ = compact(str(path))

    after = reported(path)
    assert num_single < NUM_ITERATIONS / 10
    assert before.unpriced_j == 0
    assert after.priced_j + after.unpriced_j == pytest.approx(before.priced_j)
    assert after.carbon_g == pytest.approx(before.carbon_g, rel=0.06)  # a block is priced with the hour of its begin
    assert after.slowdown_ratio == pytest.approx(before.slowdown_ratio)
