"""Differences between the stages of a past job, as evidence for the stages of a new one.

A difference is how much more than the mean of all stages the time of a stage rises when the clock falls. It holds for a
job with the same number of stages whose curves agree with the past job's: very likely the same model, cut in the same
way. Whether its stages are the same too is checked against what the job itself has shown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuenergyd.core.pipeline.learned_curves import KindCurve
from gpuenergyd_policies.profiling.prior.curves import CurveModel, Evidence
from gpuenergyd_policies.profiling.prior.deviations import Points
from gpuenergyd_policies.profiling.prior.relatives import (
    NEAR,
    SAME_CLOCK_SIGMA,
    Relative,
    block_diagonal,
    joined_points,
)
from gpuenergyd_policies.profiling.prior.seen import ClassAtFullSpeed, points_of
from gpuenergyd_policies.profiling.prior.shape import FloatArray

_SAME_STAGE_SIGMA = 0.005
"""Of the difference in slope from the same stage before, as on other GPUs: a third of the spread among stages."""
_MAX_SURPRISE = 3.0
"""In standard deviations of chi squared, beyond which the stages are not those of the past job."""
_WIDER = 3.0
"""Factor on the assumed spread of stages in that check: those of an encoder and a decoder differ by percents, and
nothing but the job's own measurements contradicts a past job about them."""
_MAX_VALUES = 256
"""Of which the posterior is found in a fraction of a second; of more, those at the lowest clocks count."""


@dataclass(frozen=True, slots=True)
class _StagesOfKind:
    """What a past job's stages show of one kind of instruction, rows by clock and stage."""

    entries: tuple[tuple[int, int], ...]
    """Class and clock of each row."""
    weights: FloatArray
    values: FloatArray
    noise: FloatArray
    slopes: FloatArray
    """Of each stage, as weights of the rows: single clocks off the curve hardly move them."""


def with_stages_before(
    model: CurveModel, observed: Points, evidence: Evidence, relative: Relative, classes: Sequence[ClassAtFullSpeed]
) -> tuple[Points, Evidence]:
    """Return evidence on times joined with the stages of a past job; unchanged if they are others."""
    curves = relative.job.learned.curves
    parts = [own for curve in curves if (own := _stages_of(curve, classes, _MAX_VALUES // len(curves)))]
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


def _stages_of(curve: KindCurve, classes: Sequence[ClassAtFullSpeed], max_values: int) -> _StagesOfKind | None:
    """Return the stages of one kind; None if this job has another number of them."""
    own = [k for k, of_class in enumerate(classes) if of_class.key.kind is curve.kind]
    top = curve.points[0].sm_clock_mhz
    known = [at for at in curve.stages if len(at.deviations) == len(own) and at.sm_clock_mhz < top]
    if not known or not own:
        return None
    kept = known[-max(1, max_values // len(own)) :]
    from_mean = np.eye(len(own)) - 1 / len(own)
    along = np.array([math.log(top / at.sm_clock_mhz) for at in kept])
    near: FloatArray = np.exp(-0.5 * np.square((along[:, None] - along[None, :]) / NEAR))
    sigma = np.array([[error for _, error in at.deviations] for at in kept])
    errors = np.einsum("as,bs,ab,st->asbt", sigma, sigma, near, np.eye(len(own)))
    changes = np.einsum("a,b,st->asbt", along, along, _SAME_STAGE_SIGMA**2 * np.eye(len(own)))
    single = SAME_CLOCK_SIGMA**2 * np.eye(len(kept) * len(own))
    return _StagesOfKind(
        tuple((k, at.sm_clock_mhz) for at in kept for k in own),
        np.kron(np.eye(len(kept)), from_mean).astype(np.float64),
        np.array([deviation for at in kept for deviation, _ in at.deviations]),
        np.asarray((errors + changes).reshape(len(single), -1) + single, dtype=np.float64),
        np.kron((along / float(along @ along))[None, :], np.eye(len(own))).astype(np.float64),
    )


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
