"""Relatives of a job: past jobs like it, whose curves are evidence on its own, the more similar the stronger.

Theory of operation. The curve that a past job's stages have in common is the mean curve of this job's stages plus a
deviation: the spread of jobs on one GPU model times a distance, 0.1 for a job that only has another name, more for
other power, clock, stages or mix of times. Deviations of several relatives have a part in common, so that many runs of
one job count little more than one. Each relative's distance is multiplied by a factor from predictive checks (see
`checks`), so one that contradicts the prior or the job's own measurements loses its weight.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.learned_curves import CurvePoint, KindCurve, LearnedCurves
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd_policies.learning.curves import Evidence
from gpuenergyd_policies.learning.deviations import Points
from gpuenergyd_policies.learning.seen import ClassAtFullSpeed, points_of
from gpuenergyd_policies.learning.shape import FloatArray, features

MAX_RELATIVES = 6
MAX_NEAR_DISTANCE = 0.3
"""Within which a past job is very likely the same work: the limit is three times the distance of a renamed job."""
LEAST_DISTANCE, MAX_DISTANCE = 0.1, 1.5
"""In spreads of jobs on one GPU model: of a job under another name, and beyond which a job says nothing."""
_POWER_SCALE, _CLOCK_SCALE, _MIX_SCALE, _STAGE_SCALE = 0.012, 0.01, 0.012, 2.0
"""Differences that double the squared distance: in log power, log clock and log share of times, and in log2 stages.
The first three are about the errors of their measurement: jobs that differ by more are not the same work, and what full
speed shows says little about how far their curves differ. Curves hardly depend on the number of stages."""
_MAX_STAGES = 4
"""Stages whose mean stands for that of all stages of a job."""
_SAME_CLOCK_RATIO = 0.98
"""Least ratio of full-speed clocks at which curves relative to full speed are alike."""
_COMMON_SHARE = 0.5
"""Share of the smaller squared distance that two relatives have in common: runs of one job say the same again."""
NEAR = 0.1
"""Length scale, in log clock, within which errors of a past job's curve are the same error."""
SAME_CLOCK_SIGMA, _OTHER_CLOCK_SIGMA = 0.0015, 0.005
"""Scatter of single clocks between a past job and this one: of the same kernels, and further at distance 1."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations among jobs on one GPU model, of the coefficients of a curve and what these leave over."""

    coefficients: tuple[float, float, float]
    smooth: float
    """Of the slope in log clock."""
    level: float
    """At every clock, the maximum included."""


TIME_SPREAD = Spread((0.08, 0.08, 0.03), 0.04, 0.0)
POWER_SPREAD = Spread((0.25, 0.4, 0.3), 0.15, 0.03)
"""Half of the generic spread, as in `shape.pooled`."""


@dataclass(frozen=True, slots=True)
class Relative:
    """Curves of a past job, or of this one before it changed, with their distance from this one's."""

    learned: LearnedCurves
    distance: float
    is_measured_here: bool = False
    """Whether the daemon measured them for this user on one of this job's GPUs."""

    @property
    def is_trusted(self) -> bool:
        """Whether its times can be wrong only if a program of this user reported wrong ones."""
        return self.is_measured_here and self.distance <= MAX_NEAR_DISTANCE


def relatives_of(
    past_jobs: Sequence[PastJob],
    classes: Sequence[ClassAtFullSpeed],
    gpu_model_name: str,
    power_w: float,
    gpu_uuids: Collection[str] = (),
    *,
    curves_before: LearnedCurves | None = None,
) -> tuple[Relative, ...]:
    """Return the past jobs nearest to a job, of which the classes and the power of a GPU at full speed are given.

    The curves of the job itself before it changed count as those of a past job on the same GPUs. Beside one that is
    trusted, those that were not measured on one of the job's GPUs are not used.
    """
    top = {own.clocks_mhz[0] for own in classes}
    candidates = [(job.learned, job.was_measured_on_one_of(gpu_uuids)) for job in past_jobs]
    if curves_before is not None:
        candidates.append((curves_before, True))
    found = []
    for learned, is_measured_here in candidates:
        if learned.gpu_model_name == gpu_model_name and top == {learned.max_sm_clock_mhz}:
            distance = _distance(learned, classes, power_w)
            if distance <= MAX_DISTANCE:
                found.append(Relative(learned, distance, is_measured_here))
    if any(own.is_trusted for own in found):
        found = [own for own in found if own.is_measured_here]
    return tuple(sorted(found, key=lambda own: own.distance)[:MAX_RELATIVES])


def _distance(learned: LearnedCurves, classes: Sequence[ClassAtFullSpeed], power_w: float) -> float:
    times_s = {kind: fmean(own.time_s for own in classes if own.key.kind is kind) for kind in _kinds(classes)}
    curves = {curve.kind: curve for curve in learned.curves}
    common = times_s.keys() & curves.keys()
    if not common:
        return math.inf
    num_stages = 1 + max(own.key.pp_rank for own in classes)
    squares = [
        (math.log(power_w / learned.power_w) / _POWER_SCALE) ** 2,
        (math.log2(num_stages / learned.num_stages) / _STAGE_SCALE) ** 2,
        float(len(times_s.keys() ^ curves.keys())),
    ]
    scale = fmean(math.log(times_s[kind] / curves[kind].time_s) for kind in common)
    squares += [((math.log(times_s[k] / curves[k].time_s) - scale) / _MIX_SCALE) ** 2 for k in common]
    for kind in common:
        # A maximum means that the clock under a power cap was not reported, or that there is no cap.
        now_mhz = median(own.full_speed_mhz for own in classes if own.key.kind is kind)
        if now_mhz < learned.max_sm_clock_mhz and curves[kind].full_speed_mhz < learned.max_sm_clock_mhz:
            squares.append((math.log(now_mhz / curves[kind].full_speed_mhz) / _CLOCK_SCALE) ** 2)
    return LEAST_DISTANCE * math.sqrt(1.0 + sum(squares))


def _kinds(classes: Sequence[ClassAtFullSpeed]) -> set[InstructionKind]:
    return {own.key.kind for own in classes if not own.key.kind.is_wait}


@dataclass(frozen=True, slots=True)
class RelativeEvidence:
    """Curves of relatives as evidence on the mean curve of a job's stages, time or power; one row per point."""

    observed: Points
    weights: FloatArray
    """Of the observed points in each row: a mean over stages."""
    values: FloatArray
    own_noise: FloatArray
    """Covariance of the errors of the relatives' own measurements."""
    between: FloatArray
    """Covariance of the difference of one relative from the job, at distance 1."""
    relative: NDArray[np.int64]
    """The position of each row's relative."""
    kind: NDArray[np.str_]
    """The kind of instruction of each row."""
    along: FloatArray
    """How far each row's clock is below full speed, in log clock."""
    distances: FloatArray
    """Of the relatives."""

    def noise(self, factors: Sequence[float]) -> FloatArray:
        """Return the covariance of the difference from the job's curve, each relative's distance times a factor."""
        square = np.square(self.distances * np.array(factors, dtype=np.float64))[self.relative]
        same = self.relative[:, None] == self.relative[None, :]
        share = np.where(same, 1.0, _COMMON_SHARE)
        single = np.diag(SAME_CLOCK_SIGMA**2 + _OTHER_CLOCK_SIGMA**2 * np.minimum(square, 1.0))
        between = share * np.minimum.outer(square, square) * self.between
        return np.asarray(self.own_noise + single + between, dtype=np.float64)


def time_of_relatives(relatives: Sequence[Relative], classes: Sequence[ClassAtFullSpeed]) -> RelativeEvidence:
    """Return what relatives say about log times relative to full speed."""
    rows = [
        _Row(number, curve, point, math.log(point.time_ratio), point.time_sigma_ratio)
        for number, relative in enumerate(relatives)
        for curve in relative.learned.curves
        for point in curve.points[1:]  # at the maximum clock it is 1 by definition
    ]
    return _evidence(rows, classes, TIME_SPREAD, relatives)


def power_of_relatives(relatives: Sequence[Relative], classes: Sequence[ClassAtFullSpeed]) -> RelativeEvidence:
    """Return what relatives say about log powers relative to the mean power at full speed."""
    rows = [
        _Row(number, curve, point, math.log(point.power_ratio), point.power_sigma_ratio)
        for number, relative in enumerate(relatives)
        for curve in relative.learned.curves
        for point in curve.points
    ]
    return _evidence(rows, classes, POWER_SPREAD, relatives)


@dataclass(frozen=True, slots=True)
class _Row:
    number: int
    curve: KindCurve
    point: CurvePoint
    value: float
    sigma: float


def _evidence(
    reported: Sequence[_Row], classes: Sequence[ClassAtFullSpeed], spread: Spread, relatives: Sequence[Relative]
) -> RelativeEvidence:
    stages = _some_stages(classes)
    known = [(row, own) for row in reported if (own := _classes_of(row.curve, classes, stages))]
    rows = [row for row, _ in known]
    entries = sorted({(k, row.point.sm_clock_mhz) for row, own in known for k in own})
    column = {entry: number for number, entry in enumerate(entries)}
    weights = np.zeros((len(rows), len(entries)))
    for number, (row, own) in enumerate(known):
        weights[number, [column[k, row.point.sm_clock_mhz] for k in own]] = 1 / len(own)
    sigma = np.array([row.sigma for row in rows], dtype=np.float64)
    relative = np.array([row.number for row in rows], dtype=np.int64)
    same_relative = relative[:, None] == relative[None, :]
    kind = np.array([row.curve.kind for row in rows], dtype=str)
    same_kind = kind[:, None] == kind[None, :]
    shape = features(
        np.array([row.point.sm_clock_mhz for row in rows], dtype=np.float64),
        np.array([row.curve.full_speed_mhz for row in rows], dtype=np.float64),
        np.array([row.curve.points[0].sm_clock_mhz for row in rows], dtype=np.float64),
    )
    along = shape[:, 0] + shape[:, 2]
    near = np.exp(-0.5 * np.square((along[:, None] - along[None, :]) / NEAR))
    between = (shape * np.square(spread.coefficients)) @ shape.T + spread.smooth**2 * near * np.outer(along, along)
    # Half of what a job has of its own all its kinds have.
    between = between * np.where(same_kind, 1.0, 0.5) + spread.level**2 * same_kind
    return RelativeEvidence(
        observed=points_of(classes, entries),
        weights=weights,
        values=np.array([row.value for row in rows], dtype=np.float64),
        own_noise=np.asarray(np.outer(sigma, sigma) * near * (same_relative & same_kind), dtype=np.float64),
        between=np.asarray(between, dtype=np.float64),
        relative=relative,
        kind=kind,
        along=np.asarray(along, dtype=np.float64),
        distances=np.array([own.distance for own in relatives], dtype=np.float64),
    )


def _some_stages(classes: Sequence[ClassAtFullSpeed]) -> set[int]:
    stages = sorted({own.key.pp_rank for own in classes})
    step = max(1, math.ceil(len(stages) / _MAX_STAGES))
    return set(stages[step // 2 :: step])


def _classes_of(curve: KindCurve, classes: Sequence[ClassAtFullSpeed], stages: set[int]) -> list[int]:
    """Return the classes of a kind, whose mean is that of all stages; their curves hold at the relative's clocks."""
    of_kind = [(k, own) for k, own in enumerate(classes) if own.key.kind is curve.kind]
    return [k for k, own in of_kind if own.key.pp_rank in stages and is_as_fast(own, curve)]


def is_as_fast(own: ClassAtFullSpeed, curve: KindCurve) -> bool:
    """Return whether a GPU still reaches about the clock that a curve is relative to: otherwise it has another one."""
    return own.full_speed_mhz >= _SAME_CLOCK_RATIO * curve.full_speed_mhz


def with_relatives(
    observed: Points, evidence: Evidence, reported: RelativeEvidence, factors: Sequence[float]
) -> tuple[Points, Evidence]:
    """Return a job's evidence joined with that of its relatives, each at its distance times a factor."""
    if not len(reported.values):
        return observed, evidence
    joined = Evidence(
        block_diagonal(evidence.weights, reported.weights),
        np.concatenate([evidence.values, reported.values]),
        block_diagonal(evidence.noise, reported.noise(factors)),
    )
    return joined_points(observed, reported.observed), joined


def joined_points(a: Points, b: Points) -> Points:
    """Return the points of both, in this order."""
    return Points(*(np.concatenate([getattr(a, own.name), getattr(b, own.name)]) for own in fields(Points)))


def block_diagonal(a: FloatArray, b: FloatArray) -> FloatArray:
    """Return the matrix with these two on its diagonal."""
    rows, columns = a.shape
    found = np.zeros((rows + b.shape[0], columns + b.shape[1]))
    found[:rows, :columns], found[rows:, columns:] = a, b
    return found
