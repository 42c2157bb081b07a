"""The cost policy: the clock or power limit of least cost, which weighs energy against time.

Theory of operation. Online the policy keeps no state: from the baseline and the settings measured so far it chooses the
next one (`cost_search`), at most eight. Where both clocks and power limits may be set, clocks come first and limits are
tried near the power of the best clock. Iterations never take longer than the permitted slowdown, except that a setting
may turn out slower while it is measured: the guard and the proof blocks are those of all policies.

Options follow the name: `cost:eta=0.7` and `cost:delay_exponent=1` (the energy-delay product).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd_policies.advice import with_advice
from gpuenergyd_policies.cost_search import MAX_PROBES, CostSearch, Probe
from gpuenergyd_policies.full_speed import plan_at_full_speed, reason_for_full_speed
from gpuenergyd_policies.objective import FloatArray, Objective, objective_of
from gpuenergyd_policies.predicted_savings import cheapest_common_clock, predicted_plan
from gpuenergyd_policies.uniform_probe import (
    ClockMeasurement,
    Setting,
    common_clocks_mhz,
    common_power_limits_w,
    setting_measurements,
    setting_of,
    setting_plan,
)

_LOWEST_CLOCK_RATIO = 0.4
"""Share of the highest clock below which every cost that counts time or energy grows."""


_ITERATIONS_PER_PROBE = 4
_MOST_MEASUREMENTS = 8.0
"""Measurements beyond which repetition does not help: temperature and other programs change slowly."""


class Cost:
    """Runs all GPUs of a job at the clock or power limit of least cost within the permitted slowdown."""

    def __init__(self, **options: str) -> None:
        """Take the options that follow the policy's name.

        Raises:
            UsageError: an option is unknown or its value invalid.
        """
        self._objective = objective_of(options)

    def next_plan(self, view: JobView) -> ClockPlan:  # noqa: PLR0911  one per reason
        """Return a plan for the next setting to measure, or for the best of those measured."""
        levels = _levels(view)
        if not levels and not view.can_set_clocks:
            return predicted_plan(view, cheapest_common_clock)
        if not levels:
            return baseline_plan(reason="the GPUs of this job have no two clocks in common")
        probes = {
            setting: Probe(seen.median_time_s, seen.energy_j, _num_measurements(seen))
            for setting, seen in setting_measurements(view).items()
            if seen.energy_j is not None
        }
        full_speed = _full_speed(view, levels, probes)
        if (reason := reason_for_full_speed(view)) is not None:
            return self._advised(view, plan_at_full_speed(view, reason), full_speed)
        if full_speed is None:
            top = next(Setting(lever, own[0]) for lever, own in levels.items())
            if top in setting_measurements(view):
                return baseline_plan(reason="no cost is known: there is no energy measurement at full speed")
            return _profile(view, top)
        search = CostSearch(
            self._objective_of(view, full_speed),
            levels,
            full_speed,
            longest_s=view.target.iteration_time_s(view.baseline.iteration_time_s),
            num_gpus=sum(gpu.num_gpus for gpu in view.gpus),
        )
        if not _is_tuned(view) and (setting := _next_setting(view, search, probes)) is not None:
            return _profile(view, setting)
        return self._advised(view, _plan(view, search, probes), full_speed)

    def _objective_of(self, view: JobView, full_speed: Probe) -> Objective:
        return replace(self._objective, max_power_w=_max_power_w(view, full_speed))

    def _advised(self, view: JobView, plan: ClockPlan, full_speed: Probe | None) -> ClockPlan:
        """Return a plan with advice: more slowdown is used only as far as its cost falls."""
        if full_speed is None:
            return plan
        return with_advice(view, plan, cost=partial(_relative_costs, self._objective_of(view, full_speed), full_speed))


def _num_measurements(seen: ClockMeasurement) -> float:
    """Return how many measurements of a probe's accuracy the iterations of a setting are worth."""
    return min(max(1.0, seen.num_iterations / _ITERATIONS_PER_PROBE), _MOST_MEASUREMENTS)


def _relative_costs(objective: Objective, full_speed: Probe, times: FloatArray, energies: FloatArray) -> FloatArray:
    """Return the costs of iterations whose times and energies are relative to full speed."""
    return objective.costs(times * full_speed.time_s, energies * full_speed.energy_j)


def _next_setting(view: JobView, search: CostSearch, probes: Mapping[Setting, Probe]) -> Setting | None:
    """Return the setting to measure: the one being measured until it is, then the search's next; at most eight."""
    profiling = [plan for plan in view.issued_plans if plan.purpose is PlanPurpose.PROFILE]
    issued = list(dict.fromkeys(setting_of(plan) for plan in profiling if _is_of_generation(view, plan)))
    if issued and issued[-1] is not None and issued[-1] not in setting_measurements(view):
        return issued[-1]
    return search.next_setting(probes) if len(issued) < MAX_PROBES else None


def _is_of_generation(view: JobView, plan: ClockPlan) -> bool:
    return view.plan_id(plan.plan_id.partition("@")[0]) == plan.plan_id


def _plan(view: JobView, search: CostSearch, probes: Mapping[Setting, Probe]) -> ClockPlan:
    """Return the plan of least cost, or full speed."""
    tuned = [plan for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED and _is_of_generation(view, plan)]
    best, less_ratio = search.best(probes, current=setting_of(tuned[-1]) if tuned else None)
    if best is None:
        return plan_at_full_speed(view, f"full speed has the least cost: {search.objective}")
    reason = f"least cost, {100 * less_ratio:.1f} % below full speed: {best} on all GPUs; cost: {search.objective}"
    return setting_plan(view, best, PlanPurpose.TUNED, policy="cost", reason=reason)


def _levels(view: JobView) -> dict[Lever, list[int]]:
    """Return the levers that may be set, with their levels in descending order."""
    clocks = common_clocks_mhz(view) if view.can_set_clocks else []
    clocks = [mhz for mhz in clocks if mhz >= _LOWEST_CLOCK_RATIO * clocks[0]]
    found = {Lever.CLOCKS: clocks, Lever.POWER_LIMITS: common_power_limits_w(view)}
    return {lever: levels for lever, levels in found.items() if len(levels) > 1}


def _full_speed(view: JobView, levels: Mapping[Lever, list[int]], probes: Mapping[Setting, Probe]) -> Probe | None:
    """Return time and energy of the baseline; a short one may have no energy, which is then measured."""
    if view.baseline.energy_j is not None:
        return Probe(view.baseline.iteration_time_s, view.baseline.energy_j)
    tops = (Setting(lever, own[0]) for lever, own in levels.items())
    return next((probes[top] for top in tops if top in probes), None)


def _max_power_w(view: JobView, full_speed: Probe) -> float:
    """Return the highest power of the job's GPUs, or their mean at full speed where it is unknown."""
    limits_w = [gpu.power_limit_range_w[1] * gpu.num_gpus for gpu in view.gpus if gpu.power_limit_range_w is not None]
    return sum(limits_w) if len(limits_w) == len(view.gpus) else full_speed.energy_j / full_speed.time_s


def _is_tuned(view: JobView) -> bool:
    """Return whether a plan was chosen since profiling began; later measurements only change which one is best."""
    return any(plan.purpose is PlanPurpose.TUNED and _is_of_generation(view, plan) for plan in view.issued_plans)


def _profile(view: JobView, setting: Setting) -> ClockPlan:
    reason = f"measuring {setting} on all GPUs"
    return setting_plan(view, setting, PlanPurpose.PROFILE, policy="cost", reason=reason)
