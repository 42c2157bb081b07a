"""Finds past jobs that contradict the prior, this job's own measurements, or one another, so that they count less.

One number per curve is compared: by how much it is steeper over the clock than believed without past jobs. Its error
is known, single clocks that are off any curve hardly move it, and a lie hides neither among them nor in numbers: six
past jobs that agree are judged one by one. A curve that is 2.5 standard deviations off is not believed, nor is the rest
of that past job. Before the job has run below full speed, past jobs that are equally like it must agree with two thirds
of each other.
"""

import math
from collections.abc import Sequence

import numpy as np

from gpuenergyd_policies.learning.curves import CurveModel, Evidence
from gpuenergyd_policies.learning.deviations import Points
from gpuenergyd_policies.learning.relatives import RelativeEvidence
from gpuenergyd_policies.learning.shape import FloatArray

FACTORS = (1.0, 3.0, 100.0)
"""On a relative's distance: the first under which all its curves are as believed, or the last, which leaves it hardly
any weight. With one in between, six past jobs that were known to be wrong still outweighed what a job measured."""
AGREEING_FACTOR = 3.0
"""The largest factor of a relative that counts as agreeing."""
_MAX_SIGMAS = 2.5
_AGREEING_SHARE = 2 / 3
_NEAR_FACTOR = 3.0
"""Relatives up to so many times as far as the nearest one may contradict it."""


def factors_of(
    model: CurveModel, observed: Points, evidence: Evidence, reported: RelativeEvidence
) -> tuple[float, ...]:
    """Return the factor on each relative's distance by one curve, time or power; `evidence` is the job's own."""
    num = len(reported.distances)
    if not len(reported.values):
        return (1.0,) * num
    belief = model.posterior(reported.observed, observed, evidence, want_covariance=True)
    assert belief.covariance is not None
    misfit = reported.values - reported.weights @ belief.mean
    spread = reported.weights @ belief.covariance @ reported.weights.T
    slopes = _slopes(reported)
    found = []
    for k in range(num):
        own = [slope for number, slope in slopes if number == k]
        found.append(
            next((f for f in FACTORS if _surprise(own, misfit, spread, reported, f) <= _MAX_SIGMAS), FACTORS[-1])
        )
    return tuple(found)


def without_contradictions(reported: RelativeEvidence, factors: Sequence[float]) -> tuple[float, ...]:
    """Return the factors, the last one for the nearest relatives that contradict too many of the other nearest ones."""
    distances = reported.distances
    near = [
        k
        for k in range(len(distances))
        if distances[k] <= _NEAR_FACTOR * distances.min() and factors[k] <= AGREEING_FACTOR
    ]
    least = min(len(near), max(2.0, _AGREEING_SHARE * len(near)))
    agreeing = {k: sum(_agree(reported, k, other) for other in near) for k in near}
    return tuple(FACTORS[-1] if k in agreeing and agreeing[k] < least else factor for k, factor in enumerate(factors))


def _slopes(reported: RelativeEvidence) -> list[tuple[int, FloatArray]]:
    """Return the weights of the rows in the slope of each curve, by relative."""
    found = []
    for k in range(len(reported.distances)):
        for kind in sorted(set(reported.kind[reported.relative == k].tolist())):
            rows = (reported.relative == k) & (reported.kind == kind)
            along = np.where(rows, reported.along, 0.0)
            if along.any():
                found.append((k, along / float(along @ along)))
    return found


def _surprise(
    slopes: Sequence[FloatArray], misfit: FloatArray, spread: FloatArray, reported: RelativeEvidence, factor: float
) -> float:
    """Return the largest misfit of slopes in standard deviations."""
    covariance = spread + reported.noise((factor,) * len(reported.distances))
    return max((abs(float(own @ misfit)) / math.sqrt(float(own @ covariance @ own)) for own in slopes), default=0.0)


def _agree(reported: RelativeEvidence, k: int, other: int) -> bool:
    """Return whether the slopes of two relatives differ by no more than their errors, in every kind of instruction."""
    if k == other:
        return True
    noise = reported.noise((1.0,) * len(reported.distances))
    slopes = {number: [own for n, own in _slopes(reported) if n == number] for number in (k, other)}
    for a, b in zip(slopes[k], slopes[other], strict=False):
        difference = a - b
        sigma = math.sqrt(float(difference @ noise @ difference))
        if abs(float(difference @ reported.values)) > _MAX_SIGMAS * sigma:
            return False
    return True
