"""The cost policy: the clock or power limit of least cost, which weighs energy against time.

Online it searches for the setting of least cost that is fast enough (`setting_goals`), of clocks and power limits
together where both may be set. Iterations never take longer than the permitted slowdown, except that a setting may turn
out slower while it is measured: the guard and the proof blocks are those of all policies.

Options follow the name: `cost:eta=0.7` and `cost:delay_exponent=1`. The cost of Zeus (You et al., NSDI 2023) is
`eta * energy + (1 - eta) * max_power * time`: `eta` = 1 counts energy only, 0 time only. The energy-delay product is
`energy * time ** delay_exponent`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.pipeline.plan import ClockPlan, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.errors import UsageError
from gpuenergyd_other_policies.setting_goals import Goal, cheapest_common_clock, search_plan
from gpuenergyd_policies.full_speed import plan_at_full_speed, reason_for_full_speed
from gpuenergyd_policies.predicted_savings import predicted_plan
from gpuenergyd_policies.setting_measurements import energy_at_full_speed
from gpuenergyd_policies.uniform_settings import settings_of

FloatArray = NDArray[np.float64]

DEFAULT_ETA = 0.5
MAX_DELAY_EXPONENT = 8.0


@dataclass(frozen=True, slots=True)
class Objective:
    """A cost to be minimized; with `delay_exponent` an energy-delay product, else Zeus's cost."""

    eta: float = DEFAULT_ETA
    delay_exponent: float | None = None
    max_power_w: float = 0.0
    """Power that one unit of time is charged at in Zeus's cost: the GPUs' maximum."""

    def cost(self, time_s: float, energy_j: float) -> float:
        """Return the cost of an iteration: J, or J s^exponent."""
        return float(self.costs(np.array(time_s), np.array(energy_j)))

    def costs(self, times_s: FloatArray, energies_j: FloatArray) -> FloatArray:
        """Return the costs of iterations, for arrays of one shape."""
        if self.delay_exponent is not None:
            return np.asarray(energies_j * times_s**self.delay_exponent, dtype=np.float64)
        return np.asarray(self.eta * energies_j + (1 - self.eta) * self.max_power_w * times_s, dtype=np.float64)

    def __str__(self) -> str:
        """Return the cost as a formula."""
        if self.delay_exponent is not None:
            return f"energy * time^{self.delay_exponent:g}"
        return f"{self.eta:g} * energy + {1 - self.eta:g} * {self.max_power_w:.0f} W * time"


def objective_of(options: Mapping[str, str]) -> Objective:
    """Return the cost that a policy's options name.

    Raises:
        UsageError: an option is unknown or its value invalid; the message lists the valid ones.
    """
    unknown = sorted(options.keys() - {"eta", "delay_exponent"})
    if unknown:
        raise UsageError(f"policy cost has no option {unknown[0]!r}; valid are eta and delay_exponent")
    if len(options) > 1:
        raise UsageError("policy cost: give eta or delay_exponent, not both")
    if "delay_exponent" in options:
        return Objective(delay_exponent=_number(options, "delay_exponent", 0.0, MAX_DELAY_EXPONENT))
    return Objective(eta=_number(options, "eta", 0.0, 1.0) if "eta" in options else DEFAULT_ETA)


def _number(options: Mapping[str, str], name: str, low: float, high: float) -> float:
    try:
        value = float(options[name])
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise UsageError(f"policy cost: {name} = {options[name]}: must be a number from {low:g} to {high:g}")
    return value


class Cost:
    """Runs all GPUs of a job at the clock or power limit of least cost within the permitted slowdown."""

    def __init__(self, **options: str) -> None:
        """Take the options that follow the policy's name.

        Raises:
            UsageError: an option is unknown or its value invalid.
        """
        self._objective = objective_of(options)

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return a plan for the next setting to measure, or for the best of those measured."""
        settings = settings_of(view, with_limits=True)
        if not settings and not view.can_set_clocks:
            return predicted_plan(view, cheapest_common_clock)
        if not settings:
            return baseline_plan(reason="the GPUs of this job have no two clocks in common")
        time_s, energy_j = view.baseline.iteration_time_s, energy_at_full_speed(view, settings) or 0.0
        objective = replace(self._objective, max_power_w=_max_power_w(view, energy_j))

        def cost(times: FloatArray, energies: FloatArray) -> FloatArray:
            return objective.costs(times * time_s, energies * energy_j)

        if (reason := reason_for_full_speed(view)) is not None:
            return plan_at_full_speed(view, reason, cost=cost)
        goal = Goal(
            policy="cost",
            least=f"cost ({objective})",
            otherwise=f"full speed has the least cost: {objective}",
            cost=cost,
        )
        return search_plan(view, settings, goal)


def _max_power_w(view: JobView, energy_j: float) -> float:
    """Return the highest power of the job's GPUs, or their mean at full speed where it is unknown."""
    limits_w = [gpu.power_limit_range_w[1] * gpu.num_gpus for gpu in view.gpus if gpu.power_limit_range_w is not None]
    return sum(limits_w) if len(limits_w) == len(view.gpus) else energy_j / view.baseline.iteration_time_s
