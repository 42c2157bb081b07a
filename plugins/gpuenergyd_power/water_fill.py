"""Water-filling: each watt of a budget goes where it adds the most weighted speed; exact on convex frontiers.

The power of a job is a convex, piecewise linear function of its speed (`core/carbon/speed_curve.py`). The weighted sum
of speeds is largest if all jobs have the same marginal speed per watt, or are at an end of their curve. So the segments
of all curves are sorted by speed per watt and filled in this order until the budget is spent. The last one is filled in
part, and its speed per watt is the dual price of the budget. Segments below the minimum speed come first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from gpuenergyd.core.carbon.speed_curve import SpeedPoint, power_at, speed_points
from gpuenergyd.core.policy_api.power import (
    HIGHEST_PRIORITY,
    LOWEST_PRIORITY,
    USUAL_PRIORITY,
    PowerDecision,
    PowerJobView,
    PowerPoint,
    PowerShare,
    PowerView,
)
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import CarbonDataError

_SAME_RATIO = 1e-9
_LEAST_TRIED_RATIO = 0.8
"""Speed to try next, relative to the slowest known speed, if that draws too much power."""
_CURVE_POINTS = 16
_SAME_SPEED_RATIO = 1e-6
"""A speed this close to full speed is treated as full speed."""


class WaterFill:
    """Divides a power budget so that the weighted sum of relative speeds is largest; the default policy.

    A job's weight is its number of GPUs, doubled for each step of its priority above the default. It keeps no state.
    """

    def divide(self, view: PowerView) -> PowerDecision:
        """Return the share of every job."""
        return divide(view)


@dataclass(frozen=True, slots=True)
class _Training:
    """Jobs of one training, which run at the same speed, and their power by speed; speed 1 is full speed."""

    jobs: tuple[PowerJobView, ...]
    curves: tuple[tuple[SpeedPoint, ...], ...]
    """For each job, power by speed in iterations per second."""
    full_per_s: float
    points: tuple[SpeedPoint, ...]
    """Points of relative speed and total power of all jobs."""

    @property
    def weight(self) -> float:
        """Weight of the relative speed in the sum to maximize."""
        return sum(_weight(job) for job in self.jobs)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Part of a training's curve: more speed for more power."""

    training: int
    is_below_floor: bool
    speed: float
    power_w: float

    def value_per_w(self, weight: float) -> float:
        return weight * self.speed / self.power_w


def divide(view: PowerView) -> PowerDecision:
    """Return the share of every job: by water-filling if its frontier is known, else as a power limit."""
    trainings = _trainings(view.jobs)
    following = {job.job_id for training in trainings for job in training.jobs}
    others = [job for job in view.jobs if job.job_id not in following]
    num_gpus = sum(job.num_gpus for job in view.jobs)
    for_jobs_w = view.budget_w - view.other_power_w
    limited = [_limited(job, for_jobs_w / num_gpus) for job in others]
    left_w = for_jobs_w - sum(share.power_w for share in limited)
    least_w = sum(training.points[0][1] for training in trainings)
    spare_w = left_w - least_w
    speeds, price = _filled(trainings, view.floor_speed_ratio, spare_w)
    shares = [*limited]
    for training, speed in zip(trainings, speeds, strict=True):
        shares += _shares(training, speed, price, is_short=spare_w < 0, limit_ratio=max(0.0, left_w) / least_w)
    predicted_w = view.other_power_w + sum(share.power_w for share in shares)
    reason = _reason(view, trainings, others, speeds, spare_w)
    order = {job.job_id: place for place, job in enumerate(view.jobs)}
    shares.sort(key=lambda share: order[share.job_id])
    least_total_w = view.other_power_w + least_w + sum(share.power_w for share in limited)
    curve = _curve(trainings, view.floor_speed_ratio, least_total_w)
    return PowerDecision(tuple(shares), predicted_w, least_total_w, price if trainings else None, reason, curve)


def _trainings(jobs: Iterable[PowerJobView]) -> list[_Training]:
    """Return the trainings whose jobs all follow targets and have usable frontiers."""
    keyed = sorted(jobs, key=lambda job: (job.training_id or job.job_id, job.job_id))
    found = []
    for _, members in groupby(keyed, key=lambda job: job.training_id or job.job_id):
        training = _training(tuple(members))
        if training is not None:
            found.append(training)
    return found


def _training(jobs: tuple[PowerJobView, ...]) -> _Training | None:
    if not all(job.can_follow and job.frontier for job in jobs):
        return None
    try:
        curves = tuple(
            speed_points(
                [(p.iteration_time_s, p.energy_j) for p in job.frontier], until_least_energy=not job.slows_for_power
            )
            for job in jobs
        )
    except CarbonDataError:  # a frontier with impossible values
        return None
    fastest_per_s = min(curve[-1][0] for curve in curves)
    slowest_per_s = min(fastest_per_s, max(curve[0][0] for curve in curves))
    inner = {x for curve in curves for x, _ in curve if slowest_per_s < x < fastest_per_s}
    speeds = sorted({slowest_per_s, fastest_per_s, *inner})
    points = tuple((x / fastest_per_s, sum(power_at(curve, x) for curve in curves)) for x in speeds)
    return _Training(jobs, curves, fastest_per_s, points)


def _filled(trainings: Sequence[_Training], floor: float, spare_w: float) -> tuple[list[float], float]:
    """Return each training's relative speed for `spare_w` above the least power, and the dual price."""
    speeds = [training.points[0][0] for training in trainings]
    for segment in _in_order(trainings, floor):
        value = segment.value_per_w(trainings[segment.training].weight)
        if spare_w <= 0:
            return speeds, value
        part = min(1.0, spare_w / segment.power_w)
        speeds[segment.training] += part * segment.speed
        spare_w -= segment.power_w
        if part < 1.0:
            return speeds, value
    return speeds, 0.0


def _in_order(trainings: Sequence[_Training], floor: float) -> list[_Segment]:
    """Return the segments of all curves in the order in which a rising budget fills them."""
    segments = [s for k, training in enumerate(trainings) for s in _segments(k, training, floor)]
    segments.sort(key=lambda s: (not s.is_below_floor, -s.value_per_w(trainings[s.training].weight)))
    return segments


def _curve(trainings: Sequence[_Training], floor: float, least_w: float) -> tuple[PowerPoint, ...]:
    """Return the largest weighted speed by power of the host, starting at the minimum speeds, in a few points."""
    point = PowerPoint(least_w, sum(training.weight * training.points[0][0] for training in trainings))
    curve = [point]
    for segment in _in_order(trainings, floor):
        gained = trainings[segment.training].weight * segment.speed
        point = PowerPoint(point.power_w + segment.power_w, point.speed + gained)
        curve = [point] if segment.is_below_floor else [*curve, point]
    step_w = (curve[-1].power_w - curve[0].power_w) / _CURVE_POINTS
    kept = [curve[0]]
    for point in curve[1:-1]:
        # A concave curve stays concave without some of its points, and never promises too much speed.
        if point.power_w - kept[-1].power_w >= step_w:
            kept.append(point)
    return (*kept, curve[-1]) if len(curve) > 1 else tuple(kept)


def _segments(number: int, training: _Training, floor: float) -> Iterable[_Segment]:
    """Yield the segments of a curve, split at the minimum speed; segments without cost are filled first."""
    for (slow, slow_w), (fast, fast_w) in pairwise(training.points):
        cuts = [slow, *([floor] if slow < floor < fast else []), fast]
        slope_w = max(fast_w - slow_w, _SAME_RATIO * fast_w) / (fast - slow)
        for begin, end in pairwise(cuts):
            yield _Segment(number, end <= floor, end - begin, slope_w * (end - begin))


def _shares(
    training: _Training, speed: float, price: float, *, is_short: bool, limit_ratio: float
) -> Iterable[PowerShare]:
    """Yield the shares of a training's jobs at a relative speed, limiting power if the slowest plans draw too much."""
    per_s = speed * training.full_per_s
    is_full = speed >= 1.0 - _SAME_SPEED_RATIO
    for job, curve in zip(training.jobs, training.curves, strict=True):
        power_w = power_at(curve, per_s)
        share = PowerShare(
            job.job_id,
            power_w,
            iteration_time_s=None if is_full else 1.0 / per_s,
            speed_ratio=min(1.0, per_s * job.full_speed_time_s) if job.full_speed_time_s else speed,
            speed_per_w=None if is_full else price * training.full_per_s / training.weight,
        )
        if is_short:
            # A policy may know only what it has tried, and a slower target makes it try more.
            time_s = 1.0 / (per_s * max(limit_ratio, _LEAST_TRIED_RATIO))
            limit_w = _limit_w(job, limit_ratio * power_w / job.num_gpus)
            share = replace(share, limit_w=limit_w, iteration_time_s=time_s)
        yield share


def _limited(job: PowerJobView, share_w: float) -> PowerShare:
    """Return the share of a job without a known frontier: a power limit per GPU, unless it draws less at full speed."""
    if job.power_limit_range_w is None:
        return PowerShare(job.job_id, job.full_speed_power_w or share_w * job.num_gpus)
    limit_w = _limit_w(job, share_w)
    most_w = (job.power_limit_range_w[1] if limit_w is None else limit_w) * job.num_gpus
    known_w = job.full_speed_power_w
    return PowerShare(job.job_id, most_w if known_w is None else min(most_w, known_w), limit_w=limit_w)


def _limit_w(job: PowerJobView, wanted_w: float) -> float | None:
    """Return a limit that the job's GPUs accept; None if the default limit is low enough, or none can be set."""
    if job.power_limit_range_w is None:
        return None
    low_w, default_w = job.power_limit_range_w
    return None if wanted_w >= default_w else max(low_w, wanted_w)


def _weight(job: PowerJobView) -> float:
    priority = min(LOWEST_PRIORITY, max(HIGHEST_PRIORITY, job.priority))
    return float(job.num_gpus) * 2.0 ** (USUAL_PRIORITY - priority)


def _reason(
    view: PowerView,
    trainings: Sequence[_Training],
    others: Sequence[PowerJobView],
    speeds: Sequence[float],
    spare_w: float,
) -> str:
    parts = []
    if trainings and spare_w < 0:
        parts.append(f"{-spare_w:.0f} W short of the least that plans can reach: power limits hold the rest")
    elif any(speed < view.floor_speed_ratio - _SAME_RATIO for speed in speeds):
        parts.append(f"too little for {100 * view.floor_speed_ratio:g} % of full speed for every job")
    elif trainings and all(speed >= 1.0 - _SAME_SPEED_RATIO for speed in speeds):
        parts.append("enough for full speed")
    elif trainings:
        parts.append("equal speed per watt for all jobs")
    if others:
        parts.append(
            f"{len(others)} of {count_text(len(view.jobs), 'job')} by power limits, until their power is known"
        )
    return "; ".join(parts) or "no job"
