"""Advice on the permitted slowdown: what a plain training loop would save if it were permitted more.

At full speed the advice is a range, that of all curves that are possible. Once the job has measured other clocks or
power limits, it is what the curves near the measurements agree on.
Policies measure some for a few iterations, also for a loop that permits no slowdown (`advice_trials`).
"""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.robust import robust_sigma
from gpuenergyd.core.pipeline.graph import LOOP_SCHEDULE
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, SavingAdvice
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd_policies.loop_curves import Cost, LoopAtFullSpeed, MeasuredPoint, Steps, possible_curves, weighed
from gpuenergyd_policies.uniform_probe import Setting, setting_measurements

ADVISED_SLOWDOWNS = (0.01, 0.02, 0.05)
ADVISED_EVERY_AT_FIRST, ADVISED_EVERY = 4, 64
"""Iterations between two pieces of advice, since each takes milliseconds; the daemon keeps the last one."""
_LEAST_TIME_ERROR, _LEAST_ENERGY_ERROR = 0.001, 0.003
"""Standard errors of a measured setting that repetition does not show: temperature, other programs."""
_LEAST_FOR_SCATTER = 3
MEASURED_UP_TO = 0.9
"""Advice is measured up to a slowdown of which a slower setting, or one nearly as slow, was measured."""
_STEPS_NEAR_TOP = 10
_MOST_WAITING = 0.9
_LIMIT_STEP_RATIO = 0.01
"""Time between two power limits that are tried, typically."""


def can_be_advised(view: JobView) -> bool:
    """Return whether a job is a loop whose saving by more slowdown the options would claim.

    Data-parallel ranks without phases are not planned together, so that no option would claim anything.
    """
    is_loop = view.is_plain_loop or view.schedule.name == LOOP_SCHEDULE
    return is_loop and not (view.is_plain_loop and view.num_dp_ranks > 1) and view.baseline.energy_j is not None


def can_advise(view: JobView) -> bool:
    """Return whether a job can be advised, and it is time to say so."""
    if not can_be_advised(view):
        return False
    last_index = view.observations[-1].iteration_index if view.observations else 0
    return last_index % (ADVISED_EVERY if last_index > ADVISED_EVERY else ADVISED_EVERY_AT_FIRST) == 0


def advised_slowdowns(view: JobView) -> list[float]:
    """Return the slowdowns that are more than permitted."""
    return [ratio for ratio in ADVISED_SLOWDOWNS if ratio > view.target.max_slowdown_ratio]


def with_advice(view: JobView, plan: ClockPlan, *, cost: Cost | None = None) -> ClockPlan:
    """Return a plan with advice for a loop that permits less slowdown than `ADVISED_SLOWDOWNS`.

    `cost` is what the policy minimizes instead of energy.
    """
    if not can_advise(view) or not (view.can_set_clocks or view.can_set_power_limits):
        return plan
    points = _measured_points(view)
    curves = weighed(possible_curves(_at_full_speed(view)), points)
    slowest = max((own.slowdown_ratio for own in points), default=0.0)
    # Once for this full speed, and once for the one that the later saving will be measured against.
    energy_error = math.sqrt(2) * math.hypot(_LEAST_ENERGY_ERROR, _scatter_ratio(view))
    steps = _steps(view)
    found = []
    for ratio in advised_slowdowns(view):
        own = curves.saving(ratio, steps=steps, energy_error=energy_error, cost=cost)
        is_measured = slowest >= MEASURED_UP_TO * ratio
        found.append(SavingAdvice(ratio, own.median, own.low, own.high, is_measured=is_measured))
    return replace(plan, advice=tuple(found))


def _at_full_speed(view: JobView) -> LoopAtFullSpeed:
    baseline, (gpu, *_) = view.baseline, view.gpus
    assert baseline.energy_j is not None
    power_w = baseline.energy_j / baseline.iteration_time_s / gpu.num_gpus
    limit_w = gpu.power_limit_range_w[1] if gpu.power_limit_range_w is not None else None
    waits = [_waiting_s(seen) / seen.own_time_s for seen in view.observations if seen.is_regular and seen.is_timed]
    return LoopAtFullSpeed(power_w, limit_w, 1 - min(median(waits), _MOST_WAITING) if waits else 1.0)


def _waiting_s(seen: IterationObservation) -> float:
    return sum(sample.time_s * sample.count for sample in seen.instruction_samples if sample.kind.is_wait)


def _steps(view: JobView) -> Steps:
    time_sigma = view.baseline.iteration_sigma_s / view.baseline.iteration_time_s
    if not view.can_set_clocks:
        return Steps(time_ratio=_LIMIT_STEP_RATIO, time_sigma=time_sigma)
    clocks_mhz = view.gpus[0].supported_sm_clocks_mhz[: _STEPS_NEAR_TOP + 1]
    ratios = [1 - slow / fast for fast, slow in pairwise(clocks_mhz)]
    return Steps(clock_ratio=fmean(ratios) if ratios else 0.0, time_sigma=time_sigma)


def _measured_points(view: JobView) -> list[MeasuredPoint]:
    """Return the settings that were measured."""
    baseline_s, baseline_j = view.baseline.iteration_time_s, view.baseline.energy_j
    assert baseline_j is not None
    energy_sigma = _scatter_ratio(view) * math.sqrt(max(1, view.baseline.num_iterations))
    time_sigma = view.baseline.iteration_sigma_s / baseline_s
    points = []
    top_mhz = view.gpus[0].supported_sm_clocks_mhz[0]
    for setting, seen in setting_measurements(view).items():
        if seen.energy_j is not None and setting != Setting(Lever.CLOCKS, top_mhz):
            errors = _errors(time_sigma, energy_sigma, seen.num_iterations)
            slowdown = seen.median_time_s / baseline_s - 1
            points.append(MeasuredPoint(slowdown, seen.energy_j / baseline_j, *errors))
    return points


def _errors(time_sigma: float, energy_sigma: float, num_iterations: int) -> tuple[float, float]:
    """Return the standard errors of the medians over iterations."""
    root = math.sqrt(num_iterations)
    return math.hypot(_LEAST_TIME_ERROR, time_sigma / root), math.hypot(_LEAST_ENERGY_ERROR, energy_sigma / root)


def _scatter_ratio(view: JobView) -> float:
    """Return the standard error of the median energy at full speed, relative to it."""
    tuned = {plan.plan_id for plan in view.issued_plans if plan.purpose is not PlanPurpose.BASELINE}
    seen = [o.energy_j for o in view.observations if o.is_regular and o.plan_id not in tuned]
    energies_j = [energy_j for energy_j in seen if energy_j is not None]
    if len(energies_j) < _LEAST_FOR_SCATTER:
        return 0.0
    middle = median(energies_j)
    sigma = robust_sigma(abs(energy_j - middle) for energy_j in energies_j)
    return sigma / middle / math.sqrt(len(energies_j))
