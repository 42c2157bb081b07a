"""The uniform policy: one clock for all GPUs of a job, the reference for policies with a clock per instruction.

Where clocks may not be set it limits the power of all GPUs instead. Online it searches for the setting of least energy
whose usual iteration meets the target (`setting_goals`).
"""

import time
from dataclasses import replace

from gpuenergyd.core.pipeline.plan import ClockPlan, baseline_plan
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile
from gpuenergyd.core.policy_api.policy import JobView, OfflinePlan, OfflineRequest
from gpuenergyd.errors import TargetError
from gpuenergyd_other_policies.setting_goals import Goal, cheapest_common_clock, search_plan
from gpuenergyd_policies.flags import flags_of
from gpuenergyd_policies.full_speed import reason_for_full_speed
from gpuenergyd_policies.planning.offline_requests import unproven_plan
from gpuenergyd_policies.planning.plan_evaluation import PlanEvaluation, baseline, evaluate_options
from gpuenergyd_policies.predicted_savings import predicted_plan
from gpuenergyd_policies.setting_plans import plan_without_slowdown
from gpuenergyd_policies.uniform_settings import settings_of, sustained_ratio


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
        settings = settings_of(view)
        if not settings and view.can_set_clocks:
            return baseline_plan(reason="the GPUs of this job have no clock in common that saves")
        if not settings:
            return predicted_plan(view, cheapest_common_clock)
        if (reason := reason_for_full_speed(view)) is not None:
            return plan_without_slowdown(view, reason)
        target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
        lever = "clock" if view.can_set_clocks else "power limit"
        goal = Goal(
            policy="uniform",
            least="energy that meets the target",
            otherwise=f"no uniform {lever} meets the target of {target_s:.6g} s with less energy than the baseline",
            as_measured=sustained_ratio(view) == 1.0,  # at its power limit, a GPU is faster and slower by chance
        )
        return search_plan(view, settings, goal)


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
