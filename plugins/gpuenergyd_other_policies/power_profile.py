"""The power-profile policy: tries one given workload power profile on all GPUs of a job; kept if it saves energy.

Theory of operation. The profile of `power-profile:number=1` is the only plan. Full-speed blocks between its iterations
measure what it saves, as for any plan, and the guard checks its time. It stays while the interval of its saving is
above zero and its time within the permitted one. Otherwise it is taken back: at once if the measurements say so, and if
they still say nothing after `_UNDECIDED_ITERATIONS`, because then there is hardly anything to save. It is not tried
again until the job or the policy changes. While other programs have requested profiles, ours is not requested.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from gpuenergyd.core.job.measurements.savings import Interval, MeasuredSaving, measured_saving
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd_policies.flags import number_of
from gpuenergyd_policies.full_speed import plan_at_full_speed, reason_for_full_speed
from gpuenergyd_policies.uniform_settings import Setting, setting_of, setting_plan

_MAX_NUMBER = 254
_UNDECIDED_ITERATIONS = 64
"""Iterations under the profile, with full-speed blocks between them, that must show a saving."""
_SLOWER_AFTER, _CLEARLY_SLOWER_AT_SIGMA = 3, 3.0
"""Iterations that may show that the profile is slower than permitted, and how clearly they must."""
_TAKEN_BACK = "taken_back_in_generation"


class WorkloadPowerProfile:
    """Requests one workload power profile on each GPU of a job, and leaves clocks at full speed."""

    def __init__(self, **options: str) -> None:
        """Take the number of the profile that follows the policy's name.

        Raises:
            UsageError: there is none, it is no number of a profile, or there is another option.
        """
        number = number_of("power-profile", options, "number", 0, _MAX_NUMBER, example=1)
        self._setting = Setting(Lever.POWER_PROFILES, number)

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return a plan with the profile on all GPUs; full speed where it cannot be set, or does not save."""
        if (missing := self._missing(view)) is not None:
            return baseline_plan(reason=missing)
        if (reason := self._foreign(view) or reason_for_full_speed(view)) is not None:
            return plan_at_full_speed(view, reason)
        last = view.issued_plans[-1] if view.issued_plans else None
        if last is not None and last.figure(_TAKEN_BACK) == view.generation:
            return last
        saving, tried, is_compared = self._measured(view)
        if (reason := self._reason_to_take_back(view, saving, tried, is_compared=is_compared)) is not None:
            taken_back = plan_at_full_speed(view, f"{self._setting} taken back: {reason}")
            return replace(taken_back, figures=((_TAKEN_BACK, float(view.generation)),))
        reason = f"{self._setting}, as given: {_result(saving) if is_compared else 'compared with full speed soon'}"
        return setting_plan(view, self._setting, PlanPurpose.TUNED, policy="power-profile", reason=reason)

    def _missing(self, view: JobView) -> str | None:
        """Return the requirement of the profile that this job does not meet."""
        if not view.can_set_power_profiles:
            return (
                f"{self._setting} may not be set: that needs mode control, power-profiles among the levers of the"
                " settings, and a job on one host"
            )
        for gpu in view.gpus:
            if self._setting.value not in gpu.power_profiles:
                offered = ", ".join(map(str, gpu.power_profiles)) or "none; GPUs offer them from Blackwell on"
                return f"{gpu.model_name} does not offer {self._setting}; offered: {offered}"
        return None

    def _foreign(self, view: JobView) -> str | None:
        """Return which profiles other programs have requested, beside which ours would be tried."""
        foreign = sorted({number for gpu in view.gpus for number in gpu.foreign_power_profiles})
        if not foreign:
            return None
        return f"{self._setting} is not tried: another program has requested {', '.join(map(str, foreign))}"

    def _measured(self, view: JobView) -> tuple[MeasuredSaving | None, list[IterationObservation], bool]:
        """Return the saving, the iterations under the profile, and whether full speed was measured since."""
        ours = {plan.plan_id for plan in view.issued_plans if setting_of(plan) == self._setting}
        others = {plan.plan_id for plan in view.issued_plans if plan.ranks} - ours
        own = [o for o in view.observations if o.is_own and not o.waited_s]
        tried = [o for o in own if o.plan_id in ours]
        full_speed = [o for o in own if o.plan_id is not None and o.plan_id not in ours | others]
        is_compared = bool(tried) and any(o.iteration_index > tried[0].iteration_index for o in full_speed)
        return measured_saving(full_speed, tried), tried, is_compared

    def _reason_to_take_back(
        self, view: JobView, saving: MeasuredSaving | None, tried: Sequence[IterationObservation], *, is_compared: bool
    ) -> str | None:
        permitted_ratio = (
            view.target.iteration_time_s(view.baseline.iteration_time_s) / view.baseline.iteration_time_s - 1
        )
        if not is_compared:
            return None
        if (slowdown_ratio := _least_slowdown(view, tried)) > permitted_ratio:
            return f"at least {100 * slowdown_ratio:.1f} % slower; {100 * permitted_ratio:.3g} % is permitted"
        if saving is None:
            return None
        saved = saving.saving_ratio
        if saved is not None and (saved.low > 0.0 or saved.high <= 0.0):
            return None if saved.low > 0.0 else _result(saving)
        if len(tried) < _UNDECIDED_ITERATIONS:
            return None
        return (
            "the energy of its iterations is not measured" if saved is None else f"no saving shows: {_result(saving)}"
        )


def _least_slowdown(view: JobView, tried: Sequence[IterationObservation]) -> float:
    """Return by how much iterations are longer than at full speed, as a ratio, at least; 0 if they are too few."""
    if len(tried) < _SLOWER_AFTER:
        return 0.0
    baseline_s = view.baseline.iteration_time_s
    chance_s = _CLEARLY_SLOWER_AT_SIGMA * view.baseline.iteration_sigma_s / math.sqrt(len(tried))
    return (median(o.own_time_s for o in tried) - chance_s) / baseline_s - 1.0


def _result(saving: MeasuredSaving | None) -> str:
    """Return saving and slowdown in words, with their intervals."""
    if saving is None:
        return "not measured yet"
    energy = "its energy is not measured" if saving.saving_ratio is None else f"saves {_percent(saving.saving_ratio)}"
    return f"{energy}, {_percent(saving.slowdown_ratio)} slower"


def _percent(ratio: Interval) -> str:
    return f"{100 * ratio.estimate:.1f} % ({100 * ratio.low:.1f} to {100 * ratio.high:.1f} %)"
