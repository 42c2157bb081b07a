"""The report's sentence about swings: predicted by the plan in force, measured by second, silent where unknown."""

from datetime import UTC, datetime, timedelta

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.power_swing import SwingFigure
from gpuenergyd.store import PlanRecord
from gpuenergyd.store.records import RollupRecord
from gpuenergyd_formats.page import swing_text

BEGAN_AT = datetime(2026, 1, 1, tzinfo=UTC)
FIGURES = ((SwingFigure.PEAK, 1553.2), (SwingFigure.TROUGH, 334.6), (SwingFigure.BAND_RMS, 278.1))


def _plan(*figures: tuple[str, float]) -> PlanRecord:
    return PlanRecord("job", 1, ClockPlan("tuned-1", PlanPurpose.TUNED, (), figures=figures), BEGAN_AT, 5)


def _second(number: int, gpu: int, power_w: float | None, bucket_s: int = 1) -> RollupRecord:
    at = BEGAN_AT + timedelta(seconds=number)
    return RollupRecord(
        gpu_uuid=f"GPU-{gpu}",
        job_id="job",
        bucket_s=bucket_s,
        started_at=at,
        energy_j=None,
        mean_power_w=power_w,
        max_power_w=power_w,
        mean_sm_clock_mhz=None,
        num_samples=10,
    )


def test_the_prediction_of_the_plan_in_force_is_reported() -> None:
    assert swing_text(_plan(*FIGURES), (), num_gpus=2) == (
        "Predicted for an iteration of the plan in force: 335 W to 1553 W, 278 W RMS from 0.1 to 20 Hz."
    )


def test_measured_seconds_under_the_plan_are_reported_and_incomplete_ones_left_out() -> None:
    seconds = [
        _second(k, gpu, power_w) for k, power_w in ((-2, 900.0), (0, 300.0), (1, 400.0), (2, 250.0)) for gpu in (0, 1)
    ]
    seconds += [_second(3, 0, 10.0), _second(10, 0, 500.0), _second(10, 1, 500.0), _second(4, 0, None)]
    seconds += [_second(0, gpu, 5000.0, 60) for gpu in (0, 1)]
    text = swing_text(_plan(), seconds, num_gpus=2)
    assert text == "Measured, means of seconds: 500 W to 1000 W, at most 300 W from one second to the next."


def test_what_is_unknown_is_left_out() -> None:
    assert swing_text(None, (), num_gpus=2) == ""
    assert swing_text(None, [_second(k, 0, 100.0) for k in range(3)], num_gpus=1) == ""
    assert swing_text(_plan((SwingFigure.PEAK, 5.0)), [_second(0, 0, 100.0)], num_gpus=1) == ""
