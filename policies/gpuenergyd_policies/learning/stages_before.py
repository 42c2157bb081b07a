"""Differences between the stages of a past job, as evidence for the stages of a new one.

A difference is how much more than the mean of all stages the time of a stage rises when the clock falls. It holds for a
job whose curves agree with the past job's and that has as many stages: very likely the same model, cut in the same way.
It holds too where another number of stages does the same work per microbatch in all: a stage of twice the layers is two
stages before, and its curve the mean of theirs. Whether the stages are the same is checked against what the job itself
has shown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuenergyd.core.pipeline.learned_curves import KindCurve, LearnedCurves
from gpuenergyd_policies.learning.curves import CurveModel, Evidence
from gpuenergyd_policies.learning.deviations import Points
from gpuenergyd_policies.learning.relatives import (
    NEAR,
    SAME_CLOCK_SIGMA,
    Relative,
    block_diagonal,
    is_as_fast,
    joined_points,
)
from gpuenergyd_policies.learning.seen import ClassAtFullSpeed, points_of
from gpuenergyd_policies.learning.shape import FloatArray

_SAME_STAGE_SIGMA = 0.005
"""Of the difference in slope from the same stage before, as on other GPUs: a third of the spread among stages."""
_MAX_SURPRISE = 3.0
"""In standard deviations of chi squared, beyond which the stages are not those of the past job."""
_WIDER = 3.0
"""Factor on the assumed spread of stages in that check: those of an encoder and a decoder differ by percents, and
nothing but the job's own measurements contradicts a past job about them."""
_MAX_WORK_RATIO = 1.1
"""Factor between the times of a microbatch in all stages within which another number of them does the same work."""
_MAX_VALUES = 256
"""Of which the posterior is found in a fraction of a second; of more, those at the lowest clocks count."""


@dataclass(frozen=True, slots=True)
class _StagesOfKind:
    """What a past job's stages show of one kind of instruction, rows by clock and stage of the job that has fewer."""

    entries: tuple[tuple[int, int], ...]
    """Class and clock of each column of the weights."""
    weights: FloatArray
    values: FloatArray
    noise: FloatArray
    slopes: FloatArray
    """Of each stage, as weights of the rows: single clocks off the curve hardly move them."""


def with_stages_before(
    model: CurveModel, observed: Points, evidence: Evidence, relative: Relative, classes: Sequence[ClassAtFullSpeed]
) -> tuple[Points, Evidence]:
    """Return evidence on times joined with the stages of a past job; unchanged if they are others."""
    learned = relative.learned
    parts = [own for curve in learned.curves if (own := _stages_of(curve, learned, classes))]
    if not parts:
        return observed, evidence
    points = points_of(classes, [entry for own in parts for entry in own.entries])
    weights, noise = parts[0].weights, parts[0].noise
    for own in parts[1:]:
        weights, noise = block_diagonal(weights, own.weights), block_diagonal(noise, own.noise)
    values = np.concatenate([own.values for own in parts])
    found = _with_wider_stages(model).posterior(points, observed, evidence, want_covariance=True)
    assert found.covariance is not None
    slopes = parts[0].slopes
    for own in parts[1:]:
        slopes = block_diagonal(slopes, own.slopes)
    surprise = slopes @ (values - weights @ found.mean)
    expected = slopes @ (weights @ found.covariance @ weights.T + noise) @ slopes.T
    num = len(surprise)
    if float(surprise @ np.linalg.solve(expected, surprise)) > num + _MAX_SURPRISE * math.sqrt(2 * num):
        return observed, evidence
    both = Evidence(
        block_diagonal(evidence.weights, weights),
        np.concatenate([evidence.values, values]),
        block_diagonal(evidence.noise, noise),
    )
    return joined_points(observed, points), both


def _stages_of(curve: KindCurve, learned: LearnedCurves, classes: Sequence[ClassAtFullSpeed]) -> _StagesOfKind | None:
    """Return the stages of one kind; None if this job's are not cut from the same work, or reach lower clocks."""
    own = [k for k, of_class in enumerate(classes) if of_class.key.kind is curve.kind]
    if not all(is_as_fast(classes[k], curve) for k in own):
        return None
    top = curve.points[0].sm_clock_mhz
    known = [at for at in curve.stages if at.sm_clock_mhz < top]
    before = len(known[0].deviations) if known else 0
    if not own or not before or (len(own) != before and not _is_recut(curve, learned, [classes[k] for k in own])):
        return None
    num = min(len(own), before)
    kept = known[-max(1, _MAX_VALUES // len(learned.curves) // num) :]
    of_before, of_own, from_mean = _shares(num, before), _shares(num, len(own)), np.eye(num) - 1 / num
    along = np.array([math.log(top / at.sm_clock_mhz) for at in kept])
    near: FloatArray = np.exp(-0.5 * np.square((along[:, None] - along[None, :]) / NEAR))
    sigma = np.array([[error for _, error in at.deviations] for at in kept])
    errors = np.einsum("as,bs,ab,rs,ts->arbt", sigma, sigma, near, of_before, of_before)
    changes = np.einsum("a,b,rt->arbt", along, along, _SAME_STAGE_SIGMA**2 * np.eye(num))
    single = SAME_CLOCK_SIGMA**2 * np.eye(len(kept) * num)
    deviations = np.array([[deviation for deviation, _ in at.deviations] for at in kept])
    return _StagesOfKind(
        tuple((k, at.sm_clock_mhz) for at in kept for k in own),
        np.kron(np.eye(len(kept)), from_mean @ of_own).astype(np.float64),
        (deviations @ (from_mean @ of_before).T).reshape(-1),
        np.asarray((errors + changes).reshape(len(single), -1) + single, dtype=np.float64),
        np.kron((along / float(along @ along))[None, :], np.eye(num)).astype(np.float64),
    )


def _is_recut(curve: KindCurve, learned: LearnedCurves, own: Sequence[ClassAtFullSpeed]) -> bool:
    """Return whether both jobs have one instruction of the kind per rank, and these take as long in all."""
    before = len(curve.stages[0].deviations)
    is_one_each = before == learned.num_stages and len({of_class.key.pp_rank for of_class in own}) == len(own)
    work_ratio = sum(of_class.time_s for of_class in own) / (before * curve.time_s)
    return is_one_each and abs(math.log(work_ratio)) <= math.log(_MAX_WORK_RATIO)


def _shares(num: int, num_stages: int) -> FloatArray:
    """Return the share of each stage in each of `num` equal parts of the layers, shape (num, stages)."""
    part, stage = np.arange(num)[:, None] / num, np.arange(num_stages)[None, :] / num_stages
    common = np.minimum(part + 1 / num, stage + 1 / num_stages) - np.maximum(part, stage)
    return np.asarray(num * np.maximum(0.0, common), dtype=np.float64)


def _with_wider_stages(model: CurveModel) -> CurveModel:
    own = model.deviations
    wider = replace(
        own,
        stage=_times(_WIDER, own.stage),
        instruction_class=_times(_WIDER, own.instruction_class),
        cap_class=_WIDER * own.cap_class,
    )
    return replace(model, deviations=wider)


def _times(factor: float, sigma: tuple[float, float, float]) -> tuple[float, float, float]:
    return factor * sigma[0], factor * sigma[1], factor * sigma[2]
