"""Advice on the permitted slowdown: what a plain training loop would save if it were permitted more.

At full speed nothing is known of other clocks, and nothing slower than permitted is run to find out: the saving is
predicted from published curves of data-centre GPUs, with the range of those curves. Once other clocks were measured, in
this run or in an earlier one of the same job, it is interpolated between them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.robust import robust_sigma
from gpuenergyd.core.pipeline.graph import LOOP_SCHEDULE
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, SavingAdvice
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.assumed_curves import (
    LIKELY,
    OPTIMISTIC,
    PESSIMISTIC,
    InsufficientMeasurementsError,
    assumed_profile,
)
from gpuenergyd_policies.uniform_probe import clock_measurements

ADVISED_SLOWDOWNS = (0.01, 0.02, 0.05)
_EVERY_ITERATIONS = 64
"""Later in the job, advice is given only so often: it takes milliseconds, and the daemon keeps the last one."""
_Point = tuple[float, float]
"""Time and energy of an iteration, relative to full speed."""
_LEAST_ERROR_RATIO = 0.005
"""Standard error of a measured energy that repetition does not show: temperature, other programs."""
_INTERVAL_AT_SIGMA = 1.96
_LEAST_DISTANCE = 0.002
"""Distance of two points in time below which noise decides which one is faster."""
_STEPS = 10
"""Times up to a slowdown at which energies are compared."""
_LEAST_POINTS = 3
"""Measured points, full speed included, from which on savings are interpolated."""


def with_advice(view: JobView, plan: ClockPlan) -> ClockPlan:
    """Return a plan with advice for a loop that permits less slowdown than `ADVISED_SLOWDOWNS`."""
    is_loop = view.is_plain_loop or view.schedule.name == LOOP_SCHEDULE
    if not is_loop or view.num_dp_ranks > 1 or not view.can_set_clocks or view.baseline.energy_j is None:
        return plan
    last_index = view.observations[-1].iteration_index if view.observations else 0
    if last_index >= _EVERY_ITERATIONS and last_index % _EVERY_ITERATIONS:
        return plan
    slowdowns = [ratio for ratio in ADVISED_SLOWDOWNS if ratio > view.target.max_slowdown_ratio]
    return replace(plan, advice=_measured(view, slowdowns) or _predicted(view, slowdowns))


def _predicted(view: JobView, slowdowns: Sequence[float]) -> tuple[SavingAdvice, ...]:
    try:
        profiles = [assumed_profile(view, assumption) for assumption in (LIKELY, PESSIMISTIC, OPTIMISTIC)]
    except InsufficientMeasurementsError:
        return ()
    curves = [_assumed_points(view, profile) for profile in profiles]
    found = []
    for ratio in slowdowns:
        likely, *others = (_saving_at(points, ratio) for points in curves)
        savings = [likely, *others]
        found.append(SavingAdvice(ratio, likely, min(savings), max(savings), is_measured=False))
    return tuple(found)


def _assumed_points(view: JobView, profile: PipelineProfile) -> list[_Point]:
    """Return an assumed curve; what an iteration does besides its instructions does not depend on the clock."""
    baseline_s, baseline_j = view.baseline.iteration_time_s, view.baseline.energy_j
    assert baseline_j is not None
    (order,) = view.schedule.orders
    instructions = [profile.classes[instruction.instruction_class] for instruction in order]
    points = []
    for options in zip(*(own.options for own in instructions), strict=True):
        added = [
            (o.time_s - i.at_max_clock.time_s, o.energy_j - i.at_max_clock.energy_j)
            for o, i in zip(options, instructions, strict=True)
        ]
        points.append((1 + sum(s for s, _ in added) / baseline_s, 1 + sum(j for _, j in added) / baseline_j))
    return points


def _measured(view: JobView, slowdowns: Sequence[float]) -> tuple[SavingAdvice, ...]:
    baseline_s, baseline_j = view.baseline.iteration_time_s, view.baseline.energy_j
    assert baseline_j is not None
    seen = clock_measurements(view).values()
    points = [(m.iteration_time_s / baseline_s, m.energy_j / baseline_j) for m in seen if m.energy_j is not None]
    points = points or _previous_points(view)
    points = _apart([(1.0, 1.0), *sorted(points)])
    if len(points) < _LEAST_POINTS:
        return ()
    error = _INTERVAL_AT_SIGMA * math.hypot(_LEAST_ERROR_RATIO, _scatter_ratio(view))
    found = []
    for ratio in slowdowns:
        if ratio <= points[-1][0] - 1:
            saving = max(1 - _energy_at(points, 1 + ratio * k / _STEPS) for k in range(_STEPS + 1))
            found.append(SavingAdvice(ratio, saving, saving - error, saving + error, is_measured=True))
    return tuple(found)


def _apart(points: Sequence[_Point]) -> list[_Point]:
    """Return the points that are slower than the one before: nearly equal times would make the curve wild."""
    kept = [points[0]]
    kept += [point for point in points[1:] if point[0] > 1 + _LEAST_DISTANCE]
    return [point for k, point in enumerate(kept) if k == 0 or point[0] > kept[k - 1][0] + _LEAST_DISTANCE]


def _previous_points(view: JobView) -> list[_Point]:
    """Return the clocks that an earlier run of the job measured."""
    run, top_mhz = view.previous_run, view.gpus[0].supported_sm_clocks_mhz[0]
    if run is None or not run.full_speed:
        return []
    full_speed_s = median(o.own_time_s for o in run.full_speed)
    energies_j = [o.energy_j for o in run.full_speed if o.energy_j is not None]
    by_clock: dict[int, list[IterationObservation]] = {}
    for seen in run.profile:
        clocks = {sample.main_share.sm_clock_mhz for sample in seen.instruction_samples}
        if len(clocks) == 1 and clocks != {top_mhz}:
            by_clock.setdefault(clocks.pop(), []).append(seen)
    return _relative(by_clock, full_speed_s, median(energies_j)) if energies_j else []


def _relative(
    by_clock: Mapping[int, Sequence[IterationObservation]], full_speed_s: float, full_speed_j: float
) -> list[_Point]:
    found = []
    for own in by_clock.values():
        energies_j = [o.energy_j for o in own if o.energy_j is not None]
        if energies_j:
            found.append((min(o.own_time_s for o in own) / full_speed_s, median(energies_j) / full_speed_j))
    return found


def _energy_at(points: Sequence[_Point], time: float) -> float:
    """Return the energy at a time on the parabola through the three points around it: few points are measured."""
    after = next(k for k, (point_time, _) in enumerate(points) if point_time >= time)
    first = min(max(after - 1, 0), len(points) - 3)
    near = points[first : first + 3]
    total = 0.0
    for k, (own, energy) in enumerate(near):
        others = [other for j, (other, _) in enumerate(near) if j != k]
        total += energy * math.prod((time - other) / (own - other) for other in others)
    return total


def _saving_at(points: Sequence[_Point], slowdown_ratio: float) -> float:
    """Return the saving of the cheapest point up to a slowdown, interpolated between points in order of time."""
    limit, least = 1 + slowdown_ratio, 1.0
    for (fast, fast_j), (slow, slow_j) in pairwise(points):
        if fast > limit:
            break
        share = 1.0 if slow <= limit else (limit - fast) / (slow - fast)
        least = min(least, fast_j + share * (slow_j - fast_j))
    return 1 - least


def _scatter_ratio(view: JobView) -> float:
    """Return the standard error of the median energy at full speed, relative to it."""
    tuned = {plan.plan_id for plan in view.issued_plans if plan.purpose is not PlanPurpose.BASELINE}
    seen = [o.energy_j for o in view.observations if o.is_regular and o.plan_id not in tuned]
    energies_j = [energy_j for energy_j in seen if energy_j is not None]
    if len(energies_j) < _LEAST_POINTS:
        return 0.0
    middle = median(energies_j)
    sigma = robust_sigma(abs(energy_j - middle) for energy_j in energies_j)
    return sigma / middle / math.sqrt(len(energies_j))
