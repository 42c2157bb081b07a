"""The cost policy: the clock or power limit of least cost, which weighs energy against time.

Online it searches for the setting of least cost that is fast enough (`setting_plans`), of clocks and power limits
together where both may be set. Iterations never take longer than the permitted slowdown, except that a setting may turn
out slower while it is measured: the guard and the proof blocks are those of all policies.

Options follow the name: `cost:eta=0.7` and `cost:delay_exponent=1` (the energy-delay product).
"""

from dataclasses import replace

from gpuenergyd.core.pipeline.plan import ClockPlan, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.full_speed import plan_at_full_speed, reason_for_full_speed
from gpuenergyd_policies.objective import FloatArray, objective_of
from gpuenergyd_policies.predicted_savings import cheapest_common_clock, predicted_plan
from gpuenergyd_policies.setting_measurements import energy_at_full_speed
from gpuenergyd_policies.setting_plans import Goal, search_plan
from gpuenergyd_policies.uniform_settings import settings_of


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
