"""Past jobs as a history holds them: honest ones of a given physics, and lies of several kinds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.learned_curves import CurvePoint, KindCurve, LearnedCurves
from gpuenergyd.core.policy_api.past_jobs import PastJob

TOP_MHZ = 1410
TRIED_MHZ = (1320, 1230, 1110, 1005, 900)
LEARNED_AT = datetime(2026, 11, 1, tzinfo=UTC)
F, B = InstructionKind.F, InstructionKind.B


def past_job(
    name: str = "gpt",
    *,
    share: float = 0.8,
    exponent: float = 1.5,
    gpu_model_name: str = "A100",
    num_stages: int = 3,
    power_w: float = 300.0,
    times_s: tuple[float, float] = (0.05, 0.1),
    clocks_mhz: Sequence[int] = TRIED_MHZ,
) -> PastJob:
    """Return a job whose time scales with the clock by a share, and power with a power of the clock."""
    points = [CurvePoint(TOP_MHZ, 1.0, 0.0, 1.0, 0.005)]
    for clock in clocks_mhz:
        time_ratio = 1 - share + share * TOP_MHZ / clock
        points.append(CurvePoint(clock, time_ratio, 0.003, (clock / TOP_MHZ) ** exponent, 0.01))
    curves = tuple(
        KindCurve(kind, own_s, float(TOP_MHZ), tuple(points)) for kind, own_s in zip((F, B), times_s, strict=True)
    )
    return PastJob(f"{name}-1", name, LEARNED_AT, LearnedCurves(gpu_model_name, TOP_MHZ, num_stages, power_w, curves))


Lie = Callable[[CurvePoint, float], CurvePoint]
"""Changes a point, given its clock as a share of the maximum."""


def changed(job: PastJob, change: Lie, *, name: str | None = None) -> PastJob:
    """Return a job with other points below the maximum clock."""
    curves = tuple(
        replace(
            curve,
            points=(
                curve.points[0],
                *(change(own, own.sm_clock_mhz / curve.points[0].sm_clock_mhz) for own in curve.points[1:]),
            ),
        )
        for curve in job.learned.curves
    )
    return replace(job, job_name=name or job.job_name, learned=replace(job.learned, curves=curves))


def sure(point: CurvePoint, _ratio: float = 1.0) -> CurvePoint:
    """Return a point that claims hardly any error."""
    return replace(point, time_sigma_ratio=0.0005, power_sigma_ratio=0.0005)


def no_slower(point: CurvePoint, ratio: float) -> CurvePoint:
    """Claim that no clock costs time and all save much: a plan that believes it lowers every clock."""
    return sure(replace(point, time_ratio=1.0, power_ratio=ratio**3))


def without_power(point: CurvePoint, _ratio: float) -> CurvePoint:
    """Claim the constant power of a sensor that hangs."""
    return sure(replace(point, power_ratio=1.0))


def of_another_gpu(point: CurvePoint, ratio: float) -> CurvePoint:
    """Claim the curve of a GPU whose memory limits it: half the slope in time, another one in power."""
    return sure(replace(point, time_ratio=1 + 0.5 * (point.time_ratio - 1), power_ratio=ratio**2.5))


def half_the_slope(point: CurvePoint, _ratio: float) -> CurvePoint:
    """Claim that clocks cost half the time, and the true power: hardly a prior rules that out."""
    return sure(replace(point, time_ratio=1 + 0.5 * (point.time_ratio - 1)))


LIES: dict[str, Lie] = {
    "no clock costs time": no_slower,
    "a sensor that hangs": without_power,
    "another GPU model": of_another_gpu,
}
