"""Stages of a past job as evidence: how much each one's time rises more than the mean of all when the clock falls.

They hold for a job with the same number of stages whose curves agree with the past job's: very likely the same model,
cut in the same way. Whether its stages are the same too is checked against what the job itself has shown.
"""

import math
from collections.abc import Sequence

import numpy as np

from gpuenergyd.core.pipeline.learned_curves import MAX_STAGE_DEVIATIONS, KindCurve
from gpuenergyd_policies.profiling.prior.curves import CurveModel, Evidence
from gpuenergyd_policies.profiling.prior.deviations import Points
from gpuenergyd_policies.profiling.prior.relatives import Relative, block_diagonal, joined_points
from gpuenergyd_policies.profiling.prior.seen import ClassAtFullSpeed, points_of
from gpuenergyd_policies.profiling.prior.shape import FloatArray

_SAME_STAGE_SIGMA = 0.005
"""Of the difference in slope from the same stage before, as on other GPUs: a third of the spread among stages."""
_MAX_SURPRISE = 3.0
"""In standard deviations of chi squared, beyond which the stages are not those of the past job."""


def with_stages_before(
    model: CurveModel, observed: Points, evidence: Evidence, relative: Relative, classes: Sequence[ClassAtFullSpeed]
) -> tuple[Points, Evidence]:
    """Return evidence on times joined with the stages of a past job; unchanged if they are others."""
    entries: list[tuple[int, int]] = []
    values: list[float] = []
    variances: list[float] = []
    weights: list[FloatArray] = []
    for curve in relative.job.learned.curves:
        own = [k for k, of_class in enumerate(classes) if of_class.key.kind is curve.kind]
        if len(own) != len(curve.stage_deviations) or not own:
            continue
        entries += [(k, curve.stage_clock_mhz) for k in own]
        weights.append(np.eye(len(own)) - 1 / len(own))
        values += [deviation for deviation, _ in curve.stage_deviations]
        variances += [sigma**2 + _difference(curve) ** 2 for _, sigma in curve.stage_deviations]
    if not entries or len(entries) > MAX_STAGE_DEVIATIONS:
        return observed, evidence
    points, combined = points_of(classes, entries), weights[0]
    for part in weights[1:]:
        combined = block_diagonal(combined, part)
    noise = np.diag(variances)
    found = model.posterior(points, observed, evidence, want_covariance=True)
    assert found.covariance is not None
    surprise = np.array(values) - combined @ found.mean
    expected = combined @ found.covariance @ combined.T + noise
    num = len(values)
    if float(surprise @ np.linalg.solve(expected, surprise)) > num + _MAX_SURPRISE * math.sqrt(2 * num):
        return observed, evidence
    both = Evidence(
        block_diagonal(evidence.weights, combined),
        np.concatenate([evidence.values, values]),
        block_diagonal(evidence.noise, noise),
    )
    return joined_points(observed, points), both


def _difference(curve: KindCurve) -> float:
    """Return the standard deviation of the difference from the same stage before, at the clock of the deviations."""
    return _SAME_STAGE_SIGMA * math.log(curve.points[0].sm_clock_mhz / curve.stage_clock_mhz)
