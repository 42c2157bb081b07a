"""The uniform policy: one clock for all GPUs of a job, the reference for policies with a clock per instruction.

Where clocks may not be set it limits the power of all GPUs instead, by the same steps.

Theory of operation. Online the policy keeps no state: it reads measured clocks with their times and energies from the
view and chooses the next clock to measure, from the highest down, until one is slower than the target. The baseline
stands for the highest clock. Then it refines between the last clock that met the target and the first that did not, by
turns where the line through their times meets the target and half way between them, because a power cap bends the times
so that the line alone comes no closer. Finally it runs the clock of least energy whose measured time meets the target.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile
from gpuenergyd.core.policy_api.policy import JobView, Lever, OfflinePlan, OfflineRequest
from gpuenergyd.errors import TargetError
from gpuenergyd_policies.advice import with_advice
from gpuenergyd_policies.advice_trials import plan_without_slowdown
from gpuenergyd_policies.flags import flags_of
from gpuenergyd_policies.full_speed import reason_for_full_speed
from gpuenergyd_policies.planning.plan_evaluation import PlanEvaluation, baseline, evaluate_options, unproven_plan
from gpuenergyd_policies.predicted_savings import cheapest_common_clock, predicted_plan
from gpuenergyd_policies.uniform_probe import (
    ClockMeasurement,
    Setting,
    common_clocks_mhz,
    common_power_limits_w,
    lever_measurements,
    setting_plan,
)

COARSE_CLOCKS = 6
"""Clocks measured on the way from the highest to the lowest useful one."""
LOWEST_CLOCK_RATIO = 0.5
"""Below this share of the highest clock, time grows faster than power falls on every GPU measured so far."""
MAX_REFINEMENTS = 3
"""Clocks measured between the last one that met the target and the first that did not. Each takes two iterations about
as long as the target; with more of them, jobs spent too much of a budget on profiling, and waited for their plan."""
_SPENT_RATIO = 0.001
"""Time left until the target, as a share of it, that is not worth another measurement, unless lower clocks may cost no
time either."""


class Uniform:
    """Runs all GPUs of a job at the common clock of least energy that meets the target.

    With `uniform:trials=false`, a plain loop that permits no slowdown never runs a slower iteration.
    """

    def __init__(self, **options: str) -> None:
        """Take the options that follow the policy's name.

        Raises:
            UsageError: an option is unknown or its value invalid.
        """
        self._may_try = flags_of("uniform", options, {"trials": True})["trials"]

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return a plan for the next clock to measure, or for the best of those measured."""
        view = replace(view, may_try=self._may_try)
        lever = Lever.CLOCKS if view.can_set_clocks else Lever.POWER_LIMITS
        levels = common_clocks_mhz(view) if view.can_set_clocks else common_power_limits_w(view)
        if not levels and view.can_set_clocks:
            return baseline_plan(reason="the GPUs of this job have no clock in common")
        if not levels:
            return predicted_plan(view, cheapest_common_clock)
        if (reason := reason_for_full_speed(view)) is not None:
            return plan_without_slowdown(view, reason)
        target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
        full_speed_j, under_plans = view.baseline.energy_j, lever_measurements(view, lever)
        at_full_speed = _full_speed_measurement(view, lever, levels)
        measured = {**at_full_speed, **under_plans} if full_speed_j is None else {**under_plans, **at_full_speed}
        to_try = _next_to_try(levels, measured, target_s, lever)
        if full_speed_j is None and at_full_speed:
            # A short baseline may have no energy, because the period of a counter has to be learned first.
            full_speed_j = measured[levels[0]].energy_j
            if to_try is None and levels[0] not in under_plans:
                to_try = levels[0]
        if to_try is not None:
            setting = Setting(lever, to_try)
            reason = f"measuring {setting} on all GPUs"
            return setting_plan(view, setting, PlanPurpose.PROFILE, policy="uniform", reason=reason)
        return with_advice(view, _best_plan(view, lever, measured, full_speed_j, target_s))


def _full_speed_measurement(view: JobView, lever: Lever, levels: Sequence[int]) -> dict[int, ClockMeasurement]:
    """Return the baseline as a measurement of the highest level, if that is full speed on every GPU."""
    is_clock = lever is Lever.CLOCKS
    if is_clock and any(max(gpu.supported_sm_clocks_mhz) != levels[0] for gpu in view.gpus):
        return {}
    return {levels[0]: ClockMeasurement(view.baseline.iteration_time_s, view.baseline.energy_j, (), {})}


def _next_to_try(
    clocks_mhz: Sequence[int], measured: Mapping[int, ClockMeasurement], target_s: float, lever: Lever
) -> int | None:
    """Return the next clock to measure, None when measuring is complete; `clocks_mhz` are descending.

    Power limits are chosen in the same way: time is convex in them too.
    """
    useful = [mhz for mhz in clocks_mhz if mhz >= LOWEST_CLOCK_RATIO * clocks_mhz[0]]
    steps = max(1, min(COARSE_CLOCKS, len(useful)) - 1)
    coarse = [useful[round(k * (len(useful) - 1) / steps)] for k in range(steps + 1)]
    for clock in coarse:
        if clock not in measured:
            return clock
        if measured[clock].iteration_time_s > target_s:
            break
    else:
        return None
    return _next_between(
        clocks_mhz, coarse, {mhz: own.iteration_time_s for mhz, own in measured.items()}, target_s, lever
    )


def _next_between(
    clocks_mhz: Sequence[int], coarse: Sequence[int], times_s: Mapping[int, float], target_s: float, lever: Lever
) -> int | None:
    """Return the next clock between the last that met the target and the first that did not; None if none is worth it.

    `times_s` are those of all measured clocks.
    """
    kept = [mhz for mhz, time_s in times_s.items() if time_s <= target_s]
    slower = [mhz for mhz in times_s if kept and mhz < min(kept)]
    num_refined = len(times_s.keys() - set(coarse))
    if not slower or num_refined >= MAX_REFINEMENTS:
        return None
    fast_mhz, slow_mhz = min(kept), max(slower)
    fast_s, slow_s = times_s[fast_mhz], times_s[slow_mhz]
    above_s = min((times_s[mhz] for mhz in kept if mhz > fast_mhz), default=fast_s)
    between = [mhz for mhz in clocks_mhz if slow_mhz < mhz < fast_mhz]
    if not between or target_s - fast_s <= _SPENT_RATIO * target_s < fast_s - above_s:
        return None
    if num_refined % 2:
        return between[len(between) // 2]
    on_line = _level_between(fast_mhz, slow_mhz, (target_s - fast_s) / (slow_s - fast_s), lever)
    # Time is convex, so levels above the line meet the target; none may, at a clock that throttles.
    allowed = [mhz for mhz in between if mhz >= on_line]
    wanted = on_line if allowed else (fast_mhz + slow_mhz) / 2
    return min(allowed or between, key=lambda mhz: abs(mhz - wanted))


def _level_between(fast: int, slow: int, share: float, lever: Lever) -> float:
    """Return the level at a share of the way in time: linear in the period of a clock, linear in a power limit."""
    if lever is Lever.CLOCKS:
        return 1 / (1 / fast + share * (1 / slow - 1 / fast))
    return fast - share * (fast - slow)


def _best_plan(
    view: JobView,
    lever: Lever,
    measured: Mapping[int, ClockMeasurement],
    full_speed_j: float | None,
    target_s: float,
) -> ClockPlan:
    what = "clock" if lever is Lever.CLOCKS else "power limit"
    if full_speed_j is None:
        return baseline_plan(reason=f"no {what} can be chosen: there is no energy measurement at full speed")
    cheapest_j, cheapest = full_speed_j, None
    for level, seen in sorted(measured.items(), reverse=True):
        if seen.iteration_time_s <= target_s and seen.energy_j is not None and seen.energy_j < cheapest_j:
            cheapest_j, cheapest = seen.energy_j, level
    if cheapest is None:
        return baseline_plan(
            reason=f"no uniform {what} meets the target of {target_s:.6g} s with less energy than the baseline"
        )
    setting = Setting(lever, cheapest)
    return setting_plan(
        view,
        setting,
        PlanPurpose.TUNED,
        policy="uniform",
        reason=f"least energy that meets the target: {setting} on all GPUs,"
        f" measured {measured[cheapest].iteration_time_s:.6g} s, target {target_s:.6g} s",
    )


def plan_offline(request: OfflineRequest) -> OfflinePlan:
    """Return the plan of least energy with one clock limit for all: each class runs at its highest clock up to it.

    Raises:
        TargetError: no uniform clock is fast enough.
    """
    started_cpu_s = time.process_time()
    graph, profile = request.graph, request.profile
    target_s = request.target.iteration_time_s(baseline(graph, profile).iteration_time_s)
    used = [profile[key] for key in {i.instruction_class for i in graph.instructions}]
    clocks_mhz = sorted({option.sm_clock_mhz for options in used for option in options.options}, reverse=True)
    fitting: list[tuple[float, PlanEvaluation]] = []
    fastest_s = float("inf")
    for clock in clocks_mhz:
        evaluated = evaluate_options(
            graph, profile, (_option_up_to(profile[i.instruction_class], clock) for i in graph.instructions)
        )
        fastest_s = min(fastest_s, evaluated.iteration_time_s)
        if evaluated.iteration_time_s <= target_s:
            waited_s = target_s - evaluated.iteration_time_s if request.target.is_forced else 0.0
            fitting.append((evaluated.energy_j + profile.blocking_power_w * graph.num_ranks * waited_s, evaluated))
    if not fitting:
        raise TargetError(
            f"target {target_s:.6g} s is too short for policy uniform: it needs at least {fastest_s:.6g} s"
        )
    best = min(fitting, key=lambda costed: costed[0])[1]
    return unproven_plan(request, best, solve_cpu_s=time.process_time() - started_cpu_s)


def _option_up_to(options: InstructionProfile, sm_clock_mhz: int) -> ClockOption:
    return next((o for o in options.options if o.sm_clock_mhz <= sm_clock_mhz), options.options[-1])
