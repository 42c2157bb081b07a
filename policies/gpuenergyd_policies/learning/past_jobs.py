"""A past job as evidence: the curves that an earlier run of the same model showed on this GPU model.

Theory of operation. A past job is used only if it seems to be of the same model, within 3 % at full speed: either all
its stages together took as long in every kind of instruction (the same work), or all kinds took longer or shorter by
the same factor, with equal clocks where power limits them (other layers); at the same power in both cases. Other work
on the same GPU model tells no more than published curves do. The past job's curve is that of this job plus a deviation:
what any job is assumed to deviate from its prior by (see `deviations`), times a grade.

Stages of the same work are this job's stages, cut differently or not. Of other layers, a stage that took as long in
every kind as one of this job is taken for it, in order. All others are further stages of the same pipeline: they show
what job and kinds have in common, and by how much stages differ, but not which ones.

The grade is 0.05 if the daemon measured the past job for this user on one of this job's GPUs, so that only a program of
this user can have reported wrong times; they may be shorter than without the past job by 2 standard deviations.
Otherwise a file that somebody imported may be made up: the grade is 1, so that the remaining uncertainty makes plans
cautious, and times may be shorter by half a standard deviation. Other layers may be another model after all, so that
half a standard deviation is their limit, too, unless all of this job's stages are among them.

A past job that contradicts the prior or this job's own measurements is not used: one of its curves is steeper or
flatter over the clock than these permit, by 2.5 standard deviations.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean, median

import numpy as np
from scipy.linalg import block_diag

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.learned_curves import KindCurve, LearnedCurves
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.prior_policy import PriorCurve, PriorPoint, PriorView
from gpuenergyd_policies.learning.curves import CurveModel, Evidence, Posterior
from gpuenergyd_policies.learning.deviations import POWER, TIME, Points, closeness, smooth_parts
from gpuenergyd_policies.learning.published import prior_for
from gpuenergyd_policies.learning.seen import ClassAtFullSpeed, points_of
from gpuenergyd_policies.learning.shape import FloatArray

_MAX_LOG_RATIO = 0.03
"""Difference in log time, power and clock at full speed of the same model: three times the error of measurement."""
_MAX_SIGMAS = 2.5
_SINGLE_CLOCK_SIGMA = 0.005
"""Scatter of single clocks between jobs of grade 1."""
_MAX_STAGES = 4
"""Stages whose mean stands for that of all: more take long to compute, and differ little."""


@dataclass(frozen=True, slots=True)
class PastCurves:
    """Curves of a past job, or of this one before it changed."""

    learned: LearnedCurves
    is_measured_here: bool
    """Whether the daemon measured them for this user on one of this job's GPUs."""
    ranks: tuple[int, ...] = ()
    """Of other layers, the rank of this job that each stage is taken for, or one beyond its last; else empty."""
    are_stages_known: bool = True
    """Whether all of this job's stages are among them, or all together are the same work."""

    @property
    def grade(self) -> float:
        """Size of its deviation from this job, in that of a job from its prior."""
        return 0.05 if self.is_measured_here else 1.0

    @property
    def max_faster_sigmas(self) -> float:
        """By how much times may be shorter than without it, in standard deviations of these."""
        return 2.0 if self.is_measured_here and self.are_stages_known else 0.5


def of_same_model(
    past_jobs: Sequence[PastJob],
    classes: Sequence[ClassAtFullSpeed],
    gpu_model_name: str,
    power_w: float,
    gpu_uuids: Collection[str],
    *,
    curves_before: LearnedCurves | None = None,
) -> list[PastCurves]:
    """Return the past jobs of the same model: those measured here first, then the same work, then known stages.

    Of the same work the newest comes first, of other layers the most alike.

    `classes` and `power_w`, of a GPU at full speed, describe the job; `curves_before` are its own before it changed.
    """
    before = [] if curves_before is None else [PastCurves(curves_before, is_measured_here=True)]
    candidates = [*before, *(PastCurves(job.learned, job.was_measured_on_one_of(gpu_uuids)) for job in past_jobs)]
    top = {own.clocks_mhz[0] for own in classes}
    found = [
        (own if is_same else _with_ranks(own, classes), difference)
        for own in candidates
        if own.learned.gpu_model_name == gpu_model_name and top == {own.learned.max_sm_clock_mhz}
        for is_same, difference in [_likeness(own.learned, classes, power_w)]
        if difference <= _MAX_LOG_RATIO
    ]
    found.sort(
        key=lambda pair: (not pair[0].is_measured_here, pair[0].ranks != (), not pair[0].are_stages_known, pair[1])
    )
    return [own for own, _ in found]


def _likeness(learned: LearnedCurves, classes: Sequence[ClassAtFullSpeed], power_w: float) -> tuple[bool, float]:
    """Return whether a past job did the same work, and otherwise how far it differs but for a factor on all times."""
    members = {curve.kind: [own for own in classes if own.key.kind is curve.kind] for curve in learned.curves}
    if members.keys() != {own.key.kind for own in classes}:
        return False, math.inf
    more_power = math.log(power_w / learned.power_w)
    longer = [math.log(fmean(own.time_s for own in members[c.kind]) / c.time_s) for c in learned.curves]
    fewer_stages = math.log(learned.num_stages / (1 + max(own.key.pp_rank for own in classes)))
    if max(abs(more_power), *(abs(log - fewer_stages) for log in longer)) <= _MAX_LOG_RATIO:
        return True, 0.0
    clocks_mhz = [(median(own.full_speed_mhz for own in members[c.kind]), c.full_speed_mhz) for c in learned.curves]
    faster = [math.log(now / before) for now, before in clocks_mhz if max(now, before) < learned.max_sm_clock_mhz]
    unlike = max(longer) - min(longer) if len(longer) > 1 else longer[0]
    return False, max(abs(difference) for difference in (more_power, unlike, *faster))


def _with_ranks(past: PastCurves, classes: Sequence[ClassAtFullSpeed]) -> PastCurves:
    """Return other layers, each stage taken for the first of this job's left that takes as long in every kind.

    All others become further stages, and so do all in a job of several chunks per rank.
    """
    top, curves = past.learned.max_sm_clock_mhz, past.learned.curves
    at_top = [own.stages[0].deviations if own.stages and own.stages[0].sm_clock_mhz == top else () for own in curves]
    own_s = {(own.key.pp_rank, own.key.kind): own.time_s for own in classes}
    num_ranks, has_chunks = 1 + max(own.key.pp_rank for own in classes), any(own.key.chunk_index for own in classes)
    num_stages = max(len(own.stages[0].deviations) if own.stages else _MAX_STAGES for own in curves)

    def is_alike(rank: int, k: int) -> bool:
        return all(
            k < len(deviations)
            and abs(math.log(own_s.get((rank, own.kind), math.inf) / own.time_s) - deviations[k][0]) <= _MAX_LOG_RATIO
            for own, deviations in zip(curves, at_top, strict=True)
        )

    left: list[int] = [] if has_chunks else list(range(num_ranks))
    ranks: list[int] = []
    for k in range(max(num_stages, *(1 + own.key.chunk_index for own in classes))):
        ranks.append(next((rank for rank in left if is_alike(rank, k)), num_ranks + k))
        left = [rank for rank in left if rank != ranks[-1]]
    return replace(past, ranks=tuple(ranks), are_stages_known=not (has_chunks or left))


@dataclass(frozen=True, slots=True)
class OwnEvidence:
    """What a job's own measurements show of one curve, time or power, and the model that it is evidence in."""

    model: CurveModel
    observed: Points
    evidence: Evidence

    def posterior(self, wanted: Points, past: tuple[Points, Evidence] | None = None) -> Posterior:
        """Return the belief about the curve at points, from this and a past job."""
        observed, evidence = self.observed, self.evidence
        if past is not None:
            pairs = [(getattr(observed, own.name), getattr(past[0], own.name)) for own in fields(Points)]
            observed = Points(*map(np.concatenate, pairs))
            evidence = Evidence(
                np.asarray(block_diag(evidence.weights, past[1].weights)),
                np.concatenate([evidence.values, past[1].values]),
                np.asarray(block_diag(evidence.noise, past[1].noise)),
            )
        return self.model.posterior(wanted, observed, evidence)


def posteriors(
    wanted: Points,
    past: Sequence[PastCurves],
    classes: Sequence[ClassAtFullSpeed],
    time: OwnEvidence,
    power: OwnEvidence,
) -> tuple[PastCurves | None, Posterior, Posterior]:
    """Return the first past job that contradicts neither time nor power, and the belief about both with it."""
    curves = (time, True), (power, False)
    for own in past:
        if not any(_contradicts(own, classes, curve, is_time=is_time) for curve, is_time in curves):
            of_time, of_power = (
                curve.posterior(wanted, _past_evidence(own, classes, curve.model, is_time=is_time))
                for curve, is_time in curves
            )
            return own, of_time, of_power
    return None, time.posterior(wanted), power.posterior(wanted)


def _contradicts(past: PastCurves, classes: Sequence[ClassAtFullSpeed], own: OwnEvidence, *, is_time: bool) -> bool:
    """Return whether a curve of a past job is steeper or flatter than the belief without it permits.

    Single clocks that are off any curve hardly move a slope.
    """
    observed, reported = _past_evidence(replace(past, is_measured_here=True), classes, own.model, is_time=is_time)
    if not len(reported.values):
        return False
    belief = own.posterior(observed)
    misfit = reported.values - reported.weights @ belief.mean
    covariance = reported.weights @ belief.covariance @ reported.weights.T + reported.noise
    at, along = np.argmax(reported.weights, axis=1), reported.weights @ observed.along
    _, curve = np.unique(np.stack([observed.kind[at], observed.stage[at]]), axis=1, return_inverse=True)
    slopes = (np.where(curve.reshape(-1) == k, along, 0.0) for k in range(curve.max() + 1))
    return any(abs(slope @ misfit) > _MAX_SIGMAS * math.sqrt(slope @ covariance @ slope) for slope in slopes)


def _past_evidence(
    past: PastCurves, classes: Sequence[ClassAtFullSpeed], model: CurveModel, *, is_time: bool
) -> tuple[Points, Evidence]:
    """Return what a past job says about log times, or powers, relative to full speed."""
    classes = _in_place_of(past, classes) if past.ranks else classes
    rows = [row for curve in past.learned.curves for row in _rows_of(curve, classes, is_time=is_time)]
    entries = sorted({(k, row.clock_mhz) for row in rows for k in row.shares})
    weights = np.zeros((len(rows), len(entries)))
    for number, row in enumerate(rows):
        for k, share in row.shares.items():
            weights[number, entries.index((k, row.clock_mhz))] = share
    observed = points_of(classes, entries)
    smooth = np.sum(smooth_parts(model.deviations, model.prior.sigma, observed, observed), axis=0)
    kind, stage, along = weights @ observed.kind, weights @ observed.stage, weights @ observed.along
    sigma, stage_sigma = np.array([(row.sigma, row.stage_sigma) for row in rows]).reshape(-1, 2).T
    of_stage_errors = np.outer(stage_sigma, stage_sigma) * (stage[:, None] == stage[None, :])
    errors = np.outer(sigma, sigma) + of_stage_errors
    errors = errors * closeness(along, along) * (kind[:, None] == kind[None, :])
    between = past.grade**2 * (weights @ smooth @ weights.T)
    noise = errors + between + _SINGLE_CLOCK_SIGMA**2 * past.grade * np.eye(len(rows))
    return observed, Evidence(weights, np.array([row.value for row in rows]), noise)


def _in_place_of(past: PastCurves, classes: Sequence[ClassAtFullSpeed]) -> list[ClassAtFullSpeed]:
    """Return the stages of other layers as classes of the ranks that they are taken for."""
    found = []
    for curve in past.learned.curves:
        own = [of_class for of_class in classes if of_class.key.kind is curve.kind]
        for k, rank in enumerate(past.ranks):
            like = next((each for each in own if each.key.pp_rank == rank), own[k % len(own)])
            found.append(replace(like, key=replace(like.key, pp_rank=rank), time_s=curve.time_s))
    return found


@dataclass(frozen=True, slots=True)
class _Row:
    clock_mhz: int
    shares: dict[int, float]
    """Of classes, by index, whose mean the value is."""
    value: float
    sigma: float
    """Error that all rows of a curve have in common at near clocks."""
    stage_sigma: float


def _rows_of(curve: KindCurve, classes: Sequence[ClassAtFullSpeed], *, is_time: bool) -> list[_Row]:
    """Return the rows of one curve: the mean of all stages by clock, or one of each stage where that is known.

    Stages are compared where all of them do as much work as before: a stage of twice the layers is two stages before,
    and its curve the mean of theirs.
    """
    own = [k for k, of_class in enumerate(classes) if of_class.key.kind is curve.kind]
    if any(classes[k].full_speed_mhz < (1 - _MAX_LOG_RATIO) * curve.full_speed_mhz for k in own):
        return []  # a power cap that it had not bends the curve
    some, work_s = own[:: math.ceil(len(own) / _MAX_STAGES)], sum(classes[k].time_s for k in own)
    found, deviations_at = [], {at.sm_clock_mhz: at.deviations for at in curve.stages}
    for point in curve.points[1:] if is_time else curve.points:  # at the maximum clock a time ratio is 1 by definition
        value = math.log(point.time_ratio if is_time else point.power_ratio)
        sigma = point.time_sigma_ratio if is_time else point.power_sigma_ratio
        before = np.array(deviations_at.get(point.sm_clock_mhz, ())).reshape(-1, 2) if is_time else np.zeros((0, 2))
        if not len(before) or abs(math.log(work_s / (len(before) * curve.time_s))) > _MAX_LOG_RATIO:
            found.append(_Row(point.sm_clock_mhz, dict.fromkeys(some, 1 / len(some)), value, sigma, 0.0))
            continue
        num, (common, errors) = min(len(before), len(own)), _errors(sigma, before[:, 1])
        for part_before, part in zip(_parts(num, len(before)), _parts(num, len(own)), strict=True):
            shares = {k: share for k, share in zip(own, part.tolist(), strict=True) if share}
            deviation, error = part_before @ before[:, 0], np.linalg.norm(part_before * errors)
            found.append(_Row(point.sm_clock_mhz, shares, value + float(deviation), common, float(error)))
    return found


def _errors(of_mean: float, of_deviations: FloatArray) -> tuple[float, FloatArray]:
    """Return the error that all stages have in common and that of each, from those of their mean and deviations.

    These are in error together: a stage that alone ran at a clock is known well there, although the mean is not.
    """
    squares, num = np.square(of_deviations), len(of_deviations)
    if num <= 2:  # two deviations are one with two signs
        return of_mean, of_deviations
    shared = float(squares.sum()) / (num * (num - 1))
    own = np.sqrt(np.maximum((squares - shared) / (1 - 2 / num), 0.0))
    return math.sqrt(max(of_mean**2 - shared, 0.0)), own


def _parts(num: int, num_stages: int) -> FloatArray:
    """Return the share of each stage in each of `num` equal parts of the layers, shape (num, stages)."""
    part, stage = np.arange(num)[:, None] / num, np.arange(num_stages)[None, :] / num_stages
    common = np.minimum(part + 1 / num, stage + 1 / num_stages) - np.maximum(part, stage)
    return np.asarray(num * np.maximum(0.0, common), dtype=np.float64)


CLOCK_RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6)


def prior_view(gpu_model_name: str, past_jobs: Sequence[PastJob]) -> PriorView:
    """Return the prior of a job on a GPU model that is like the newest of the past jobs on it."""
    own = [job for job in past_jobs if job.learned.gpu_model_name == gpu_model_name]
    classes = _assumed_classes(own[0] if own else None)
    gpu_uuids = own[0].gpu_uuids if own else ()
    past = of_same_model(own, classes, gpu_model_name, own[0].learned.power_w, gpu_uuids) if own else ()
    prior = prior_for(gpu_model_name)
    wanted = points_of(classes, [(k, clock) for k, of_class in enumerate(classes) for clock in of_class.clocks_mhz])
    nothing = points_of(classes, []), Evidence(np.zeros((0, 0)), np.zeros(0), np.zeros((0, 0)))
    alone = (OwnEvidence(CurveModel(*of_kind), *nothing) for of_kind in ((prior.time, TIME), (prior.power, POWER)))
    used, time, power = posteriors(wanted, past, classes, *alone)
    num, ratios = len(CLOCK_RATIOS), CLOCK_RATIOS * len(classes)
    beliefs = zip(ratios, np.exp(time.mean), time.sigma, np.exp(power.mean), power.sigma, strict=True)
    points = [PriorPoint(*map(float, belief)) for belief in beliefs]
    curves = [PriorCurve(own.key.kind, tuple(points[k * num : (k + 1) * num])) for k, own in enumerate(classes)]
    return PriorView(gpu_model_name, prior.basis, 0 if used is None else 1, tuple(curves))


def _assumed_classes(like: PastJob | None) -> list[ClassAtFullSpeed]:
    # Any maximum clock will do where no past job names it: the prior only knows clocks relative to it.
    top = 1000 if like is None else like.learned.max_sm_clock_mhz
    of_kind = {InstructionKind.B: (1.0, float(top)), InstructionKind.F: (1.0, float(top))}
    if like is not None:
        of_kind = {curve.kind: (curve.time_s, curve.full_speed_mhz) for curve in like.learned.curves}
    clocks = tuple(round(ratio * top) for ratio in CLOCK_RATIOS)
    return [ClassAtFullSpeed(InstructionClass(0, kind), clocks, *own) for kind, own in sorted(of_kind.items())]
