"""Curves that a job leaves for later jobs: means over its stages, per kind of instruction, at measured clocks."""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.learned_curves import (
    MAX_POINTS,
    MAX_STAGE_CLOCKS,
    MAX_STAGE_DEVIATION,
    MAX_STAGE_DEVIATIONS,
    CurvePoint,
    KindCurve,
    LearnedCurves,
    StagesAtClock,
)
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd_policies.learning.curves import Posterior
from gpuenergyd_policies.learning.job_curves import FittedCurves
from gpuenergyd_policies.learning.seen import TimeSeen

_LEAST_TIME_SIGMA, _LEAST_POWER_SIGMA = 0.002, 0.005
"""Errors that iterations have in common, which no number of them removes."""
_DIGITS = 5
"""Of deviations of stages, of which there are hundreds: a fraction of their errors."""


def summary_of(fitted: FittedCurves, times: Sequence[TimeSeen], gpus: Sequence[GpuView]) -> LearnedCurves | None:
    """Return what a job has shown; None if no plan has lowered a clock, or its GPUs are of several models.

    The belief must have been found without past jobs.
    """
    tops = {own.clocks_mhz[0] for own in fitted.classes}
    tried = _tried_clocks(fitted, times)
    if len(tops) != 1 or len({gpu.model_name for gpu in gpus}) != 1 or not any(tried.values()):
        return None
    (top,) = tops
    return LearnedCurves(
        gpu_model_name=gpus[0].model_name,
        max_sm_clock_mhz=top,
        num_stages=len(gpus),
        power_w=fmean(fitted.reference_w[rank] / gpu.num_gpus for rank, gpu in enumerate(gpus)),
        curves=tuple(_curve(fitted, kind, [top, *clocks]) for kind, clocks in sorted(tried.items())),
    )


def _tried_clocks(fitted: FittedCurves, times: Sequence[TimeSeen]) -> dict[InstructionKind, list[int]]:
    """Return the clocks below the maximum at which instructions of a kind mostly ran, in descending order."""
    index = fitted.index_of()
    found: dict[InstructionKind, set[int]] = defaultdict(set)
    for own in fitted.classes:
        if not own.key.kind.is_wait:
            found[own.key.kind] |= set()
    for seen in (own for own in times if own.key.kind in found):
        clock, _ = max(seen.shares, key=lambda share: share[1])
        if index.get((seen.key, clock), 0):
            found[seen.key.kind].add(clock)
    tops = {own.clocks_mhz[0] for own in fitted.classes}
    return {kind: _thinned(sorted(clocks - tops, reverse=True)) for kind, clocks in found.items()}


def _thinned(clocks: list[int]) -> list[int]:
    step = max(1, math.ceil(len(clocks) / (MAX_POINTS - 1)))
    return clocks[::step]


def _curve(fitted: FittedCurves, kind: InstructionKind, clocks: Sequence[int]) -> KindCurve:
    classes = [own for own in fitted.classes if own.key.kind is kind]
    index = fitted.index_of()
    points = []
    for clock in clocks:
        entries = [index[own.key, clock] for own in classes if clock in own.clocks_mhz]
        log_time, time_sigma = _mean_of(fitted.time, entries)
        log_power, power_sigma = _mean_of(fitted.power, entries)
        is_max = clock == clocks[0]
        points.append(
            CurvePoint(
                clock,
                1.0 if is_max else math.exp(log_time),
                0.0 if is_max else max(time_sigma, _LEAST_TIME_SIGMA),
                math.exp(log_power),
                max(power_sigma, _LEAST_POWER_SIGMA),
            )
        )
    return KindCurve(
        kind,
        time_s=fmean(own.time_s for own in classes),
        full_speed_mhz=median(own.full_speed_mhz for own in classes),
        points=tuple(points),
        stages=_stages(fitted, kind, clocks[1:]),
    )


def _stages(fitted: FittedCurves, kind: InstructionKind, clocks: Sequence[int]) -> tuple[StagesAtClock, ...]:
    """Return how much slower or faster each stage is at a few tried clocks, including the highest and the lowest.

    The first entry is that of full speed, by which stages are recognized, unless they are too many or differ too much.
    """
    classes = [own for own in fitted.classes if own.key.kind is kind]
    if not 1 < len(classes) <= MAX_STAGE_DEVIATIONS:
        return ()
    common = [clock for clock in clocks if all(clock in own.clocks_mhz for own in classes)]
    logs = [math.log(own.time_s / fmean(each.time_s for each in classes)) for own in classes]
    at_top = StagesAtClock(classes[0].clocks_mhz[0], tuple((round(log, _DIGITS), _LEAST_TIME_SIGMA) for log in logs))
    has_room = 2 * len(classes) <= MAX_STAGE_DEVIATIONS
    first = (at_top,) if has_room and max(map(abs, logs)) <= MAX_STAGE_DEVIATION else ()
    num = min(len(common), MAX_STAGE_CLOCKS - len(first), MAX_STAGE_DEVIATIONS // len(classes) - len(first))
    positions = np.linspace(0, len(common) - 1, num).round().astype(int)
    index = fitted.index_of()
    return first + tuple(
        StagesAtClock(clock, _stage_deviations(fitted.time, [index[own.key, clock] for own in classes]))
        for clock in (common[k] for k in positions)
    )


def _stage_deviations(belief: Posterior, entries: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """Return the difference of each entry from the mean of all, with its standard error."""
    from_mean = np.eye(len(entries)) - 1 / len(entries)
    deviations = from_mean @ belief.mean[list(entries)]
    covariance = from_mean @ belief.covariance[np.ix_(entries, entries)] @ from_mean.T
    sigma = np.maximum(np.sqrt(np.maximum(np.diag(covariance), 0.0)), _LEAST_TIME_SIGMA)
    rounded = (np.round(values, _DIGITS).tolist() for values in (deviations, sigma))
    return tuple(zip(*rounded, strict=True))


def _mean_of(belief: Posterior, entries: Sequence[int]) -> tuple[float, float]:
    """Return mean and standard deviation of the mean of entries."""
    own = belief.covariance[np.ix_(entries, entries)]
    return float(np.mean(belief.mean[list(entries)])), math.sqrt(max(0.0, float(np.mean(own))))
