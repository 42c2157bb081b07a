"""Merging iterations into blocks changes neither the emissions of a job nor its slowdown."""

from datetime import timedelta
from pathlib import Path

import pytest

from gpuenergyd.core.carbon.intensity import EmissionFactor, SampleStatus, SignalKind
from gpuenergyd.report.carbon import CarbonReport
from gpuenergyd.report.job import job_reports
from gpuenergyd.store import open_history
from gpuenergyd.store.records import IntensityRecord, RollupRecord
from tests.store.maintenance.test_compaction import NOW, compact, write_long_job
from tests.support.stored_history import write_records

NUM_ITERATIONS = 6000
BEGUN = NOW - timedelta(days=10)


def reported(path: Path) -> CarbonReport:
    with open_history(path) as history:
        (job,) = job_reports(history)
        assert job.carbon is not None
    return job.carbon


def test_compaction_keeps_the_emissions_of_a_long_job(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    write_long_job(str(path), NUM_ITERATIONS, ended_at=NOW - timedelta(days=3))
    for hour in range(2):
        begin = BEGUN + timedelta(hours=hour)
        write_records(
            path,
            RollupRecord(3600, "GPU-0", begin, "j", 90.0 * 3600, 90.0, 90.0, 1410.0, 36_000, measured_s=3600.0),
            IntensityRecord(
                "GB", "test", SignalKind.AVERAGE, EmissionFactor.DIRECT, SampleStatus.MEASURED,
                begin, begin + timedelta(hours=1), begin, 100.0 + 300.0 * hour, NOW,
            )
        )  # fmt: skip
    before = reported(path)

    num_single, _ = compact(str(path))

    after = reported(path)
    assert num_single < NUM_ITERATIONS / 10
    assert before.use.unpriced_j == 0
    assert after.use == before.use
    assert before.use.carbon_g == pytest.approx(90.0 * 3600 * (100.0 + 400.0) / 3.6e6)
    assert after.slowdown_ratio == pytest.approx(before.slowdown_ratio)
