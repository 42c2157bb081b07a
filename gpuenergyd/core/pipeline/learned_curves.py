"""Learned curves: time and power of a job against the clock, as measured for each kind of instruction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.count_text import count_text

MAX_CURVES, MAX_POINTS = 8, 32
MAX_STAGE_CLOCKS, MAX_STAGE_DEVIATIONS = 16, 128
"""Maximum number of clocks, and of stage deviations at all of them together."""
MAX_STAGE_DEVIATION = 0.5
MAX_NAME_CHARS = 256
_MAX_STAGES = 65_536
_MAX_POWER_W = 1e6
_MAX_SIGMA = 2.0
_LEAST_CLOCK_RATIO = 0.2
_TIME_TOLERANCE = 1.1
"""Factor by which measured times may exceed the inverse clock ratio, or fall below the time at full speed."""
_MAX_POWER_RATIO = 3.0


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Time and power at one requested clock relative to the maximum clock, with relative standard errors."""

    sm_clock_mhz: int
    time_ratio: float
    time_sigma_ratio: float
    power_ratio: float
    power_sigma_ratio: float


@dataclass(frozen=True, slots=True)
class StagesAtClock:
    """How stages differ in time at one clock."""

    sm_clock_mhz: int
    deviations: tuple[tuple[float, float], ...]
    """For each stage, its log time relative to full speed minus the mean over all stages, and the standard error.

    At the maximum clock its log time relative to the mean time.
    """


@dataclass(frozen=True, slots=True)
class KindCurve:
    """Curve of one kind of instruction, common to all stages, at the maximum clock and the clocks that plans tried."""

    kind: InstructionKind
    time_s: float
    """Mean time at full speed."""
    full_speed_mhz: float
    """SM clock at which the GPU actually ran while the maximum was requested."""
    points: tuple[CurvePoint, ...]
    """In descending order of clock, the maximum first."""
    stages: tuple[StagesAtClock, ...] = ()
    """Differences of stages at a few of these clocks, in descending order; empty if there are too many stages."""


@dataclass(frozen=True, slots=True)
class LearnedCurves:
    """The curves measured in one job."""

    gpu_model_name: str
    max_sm_clock_mhz: int
    num_stages: int
    power_w: float
    """Mean power of a GPU while it runs instructions at full speed."""
    curves: tuple[KindCurve, ...]


def problem_of_curves(learned: LearnedCurves) -> str | None:
    """Return why learned curves are impossible, as a phrase with the bad value; None if they are possible."""
    if not 0 < learned.max_sm_clock_mhz <= 100_000:
        return f"max_sm_clock_mhz {learned.max_sm_clock_mhz}: 1 to 100000 are valid"
    if not 0 < learned.num_stages <= _MAX_STAGES:
        return f"num_stages {learned.num_stages}: 1 to {_MAX_STAGES} are valid"
    if not 0 < learned.power_w <= _MAX_POWER_W:
        return f"power_w {learned.power_w:g}: above 0 up to {_MAX_POWER_W:g} are valid"
    kinds = [curve.kind for curve in learned.curves]
    if not 0 < len(kinds) <= MAX_CURVES or len(set(kinds)) < len(kinds):
        return (
            f"{count_text(len(kinds), 'curve')} of {count_text(len(set(kinds)), 'kind')}: 1 to {MAX_CURVES} are valid,"
            " one per kind"
        )
    if not 0 < len(learned.gpu_model_name) <= MAX_NAME_CHARS or not learned.gpu_model_name.isprintable():
        return f"GPU model {learned.gpu_model_name[:40]!r}: 1 to {MAX_NAME_CHARS} printable characters are valid"
    problems = (_problem_of_curve(curve, learned.max_sm_clock_mhz) for curve in learned.curves)
    return next((problem for problem in problems if problem is not None), None)


def _problem_of_curve(curve: KindCurve, max_mhz: int) -> str | None:
    where = f"curve of {curve.kind}"
    if not 0 < curve.time_s < math.inf:
        return f"{where}: time_s {curve.time_s:g} is not a positive time"
    if not _LEAST_CLOCK_RATIO * max_mhz <= curve.full_speed_mhz <= max_mhz:
        return f"{where}: full_speed_mhz {curve.full_speed_mhz:g} is not a clock of a GPU with {max_mhz} MHz"
    clocks = [point.sm_clock_mhz for point in curve.points]
    if not 0 < len(clocks) <= MAX_POINTS or clocks[0] != max_mhz or not _is_descending(clocks):
        return f"{where}: 1 to {MAX_POINTS} points in descending order from {max_mhz} MHz are valid"
    problems = [_problem_of_point(point, max_mhz) for point in curve.points]
    problems.append(_problem_of_stages(curve, max_mhz))
    return next((f"{where}: {problem}" for problem in problems if problem is not None), None)


def _problem_of_stages(curve: KindCurve, max_mhz: int) -> str | None:
    clocks = [stage.sm_clock_mhz for stage in curve.stages]
    if len(clocks) > MAX_STAGE_CLOCKS or not _is_descending(clocks):
        return f"stages at {len(clocks)} clocks: at most {MAX_STAGE_CLOCKS}, in descending order, are valid"
    numbers = {len(stage.deviations) for stage in curve.stages}
    if len(numbers) > 1 or 0 in numbers:
        return "stages: at least one deviation, and as many at each clock, are valid"
    if (total := sum(len(stage.deviations) for stage in curve.stages)) > MAX_STAGE_DEVIATIONS:
        return f"{count_text(total, 'deviation')} of stages: at most {MAX_STAGE_DEVIATIONS} are valid"
    for stage in curve.stages:
        if not _LEAST_CLOCK_RATIO * max_mhz <= stage.sm_clock_mhz <= max_mhz:
            return f"stages at {stage.sm_clock_mhz} MHz: not a clock of a GPU with {max_mhz} MHz"
        for deviation, sigma in stage.deviations:
            if not (abs(deviation) <= MAX_STAGE_DEVIATION and 0 <= sigma <= _MAX_SIGMA):
                return f"stage deviation {deviation:g} with error {sigma:g} is out of range"
    return None


def _problem_of_point(point: CurvePoint, max_mhz: int) -> str | None:
    clock = point.sm_clock_mhz
    if clock < _LEAST_CLOCK_RATIO * max_mhz:
        return f"{clock} MHz is below {_LEAST_CLOCK_RATIO:g} of the maximum"
    if not 1 / _TIME_TOLERANCE <= point.time_ratio <= _TIME_TOLERANCE * max_mhz / clock:
        return f"time_ratio {point.time_ratio:g} at {clock} MHz; times rise as the clock falls, at most as 1 / clock"
    if not 0 < point.power_ratio <= _MAX_POWER_RATIO:
        return f"power_ratio {point.power_ratio:g} at {clock} MHz; above 0 up to {_MAX_POWER_RATIO:g} are valid"
    for name, sigma in (("time", point.time_sigma_ratio), ("power", point.power_sigma_ratio)):
        if not 0 <= sigma <= _MAX_SIGMA:
            return f"{name}_sigma_ratio {sigma:g} at {clock} MHz; 0 to {_MAX_SIGMA:g} are valid"
    return None


def _is_descending(clocks: Sequence[int]) -> bool:
    return all(a > b for a, b in pairwise(clocks))
