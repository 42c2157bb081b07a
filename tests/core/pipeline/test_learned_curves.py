"""Learned curves: what no GPU has is refused in one phrase that names the bad value."""

import math
from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.learned_curves import (
    MAX_POINTS,
    MAX_STAGE_CLOCKS,
    CurvePoint,
    KindCurve,
    LearnedCurves,
    StagesAtClock,
    problem_of_curves,
)
from gpuenergyd.core.policy_api.past_jobs import problem_of
from tests.support.past_jobs import TOP_MHZ, changed, past_job

LEARNED = past_job().learned
POINT = LEARNED.curves[0].points[1]


def with_curve(**changes: object) -> LearnedCurves:
    curve: KindCurve = replace(LEARNED.curves[0], **changes)  # type: ignore[arg-type]
    return replace(LEARNED, curves=(curve, *LEARNED.curves[1:]))


def with_point(**changes: object) -> LearnedCurves:
    point: CurvePoint = replace(POINT, **changes)  # type: ignore[arg-type]
    return with_curve(points=(LEARNED.curves[0].points[0], point))


def with_stages(*clocks: tuple[int, float, float]) -> LearnedCurves:
    """Return curves with a single stage at these clocks, its deviation and the error of that."""
    return with_curve(stages=tuple(StagesAtClock(mhz, ((deviation, sigma),)) for mhz, deviation, sigma in clocks))


def test_curves_of_a_job_are_possible() -> None:
    assert problem_of_curves(LEARNED) is None
    assert problem_of(past_job()) is None


@pytest.mark.parametrize(
    ("learned", "value"),
    [
        (replace(LEARNED, gpu_model_name=""), "''"),
        (replace(LEARNED, gpu_model_name="A100\x1b[2J"), "x1b"),
        (replace(LEARNED, max_sm_clock_mhz=0), "max_sm_clock_mhz 0"),
        (replace(LEARNED, num_stages=0), "num_stages 0"),
        (replace(LEARNED, power_w=math.nan), "power_w nan"),
        (replace(LEARNED, curves=()), "0 curves"),
        (replace(LEARNED, curves=LEARNED.curves[:1] * 2), "2 curves of 1 kind"),
        (with_curve(time_s=math.inf), "time_s inf"),
        (with_curve(full_speed_mhz=2000.0), "full_speed_mhz 2000"),
        (with_curve(points=()), f"from {TOP_MHZ} MHz"),
        (with_curve(points=LEARNED.curves[0].points[1:]), "descending"),
        (with_curve(points=LEARNED.curves[0].points * MAX_POINTS), "descending"),
        (with_stages(*[(900 - k, 0.0, 0.01) for k in range(MAX_STAGE_CLOCKS + 1)]), f"{MAX_STAGE_CLOCKS + 1} clocks"),
        (with_stages((900, 0.0, 0.01), (1000, 0.0, 0.01)), "descending"),
        (with_stages((0, 0.0, 0.01)), "stages at 0 MHz"),
        (with_stages((900, math.nan, 0.01)), "deviation nan"),
        (with_stages((900, 0.0, -1.0)), "error -1"),
        (with_curve(stages=(StagesAtClock(900, ()),)), "at least one deviation"),
        (with_curve(stages=(StagesAtClock(900, ((0.0, 0.01),) * 129),)), "129 deviations"),
        (with_point(sm_clock_mhz=100), "100 MHz"),
        (with_point(time_ratio=0.5), "time_ratio 0.5"),
        (with_point(time_ratio=3.0), "time_ratio 3"),
        (with_point(time_ratio=math.nan), "time_ratio nan"),
        (with_point(power_ratio=-1.0), "power_ratio -1"),
        (with_point(power_ratio=99.0), "power_ratio 99"),
        (with_point(time_sigma_ratio=-0.1), "time_sigma_ratio -0.1"),
        (with_point(power_sigma_ratio=math.inf), "power_sigma_ratio inf"),
    ],
)
def test_impossible_curves_are_refused_by_their_value(learned: LearnedCurves, value: str) -> None:
    problem = problem_of_curves(learned)

    assert problem is not None
    assert value in problem
    assert "\n" not in problem
    assert problem_of(replace(past_job(), learned=learned)) == problem


def test_a_past_job_has_names_that_can_be_printed_and_an_instant_with_a_time_zone() -> None:
    assert problem_of(past_job("a\nb")) is not None
    assert problem_of(replace(past_job(), job_id="x" * 300)) is not None
    assert "time zone" in (problem_of(replace(past_job(), learned_at=past_job().learned_at.replace(tzinfo=None))) or "")


def test_a_lie_that_a_gpu_could_show_is_possible() -> None:
    assert problem_of(changed(past_job(), lambda point, _: replace(point, time_ratio=1.0))) is None
