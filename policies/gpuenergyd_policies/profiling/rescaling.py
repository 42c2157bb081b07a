"""Rescaling of a job's iterations from before a change to its present times, which avoids profiling again.

A larger batch or a stage disturbed by another program is slower by the same factor at every clock; the first few
iterations at full speed after the change give that factor for each class. If a GPU no longer reaches its maximum clock,
the times at the clock that it does reach are compared. The share of time that scales with the clock may change too,
which shows in the first tuned iterations: times below the maximum clock are then tilted, t(f) * (f_max / f)^k, with k
from least squares with a prior near zero. Until then, plans keep extra caution.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low

from gpuenergyd.core.measurement.observation import ClockShare, IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.core.pipeline.profile import InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.previous_run import PREVIOUS_FULL_SPEED, PREVIOUS_PROFILE
from gpuenergyd_policies.profiling.times import TimeCurve, fit_times

_TILT_SIGMA = 0.1
"""Prior standard deviation of the exponent k."""
_TIME_NOISE_RATIO = 0.003


@dataclass(frozen=True, slots=True)
class Change:
    """Change of each class's time: a factor at full speed, and an exponent that increases it at lower clocks."""

    ratios: Mapping[InstructionClass, float]
    tilts: Mapping[InstructionClass, float] = field(default_factory=dict)
    full_speed_mhz: Mapping[InstructionClass, int] = field(default_factory=dict)

    @property
    def largest_ratio(self) -> float:
        """Largest relative change of a class's time at full speed."""
        return max((abs(ratio - 1) for ratio in self.ratios.values()), default=0.0)

    def ratio(self, key: InstructionClass, sm_clock_mhz: int) -> float:
        """Return the factor on a class's time at a clock."""
        tilt = self.tilts.get(key, 0.0)
        below = self.full_speed_mhz[key] / sm_clock_mhz if tilt else 1.0
        return self.ratios.get(key, 1.0) * math.exp(tilt * math.log(max(1.0, below)))

    def _scaled(self, key: InstructionClass, share: ClockShare) -> ClockShare:
        return replace(share, time_s=share.time_s * self.ratio(key, share.sm_clock_mhz))

    def applied_to(self, observation: IterationObservation) -> IterationObservation:
        """Return an earlier iteration with rescaled instruction times; its energies and windows stay."""
        samples = []
        for sample in observation.instruction_samples:
            key = sample.instruction_class
            shares = tuple(self._scaled(key, share) for share in sample.shares)
            samples.append(replace(sample, shares=shares))
        with_call = tuple(
            replace(s, before=self._scaled(key, s.before), after=self._scaled(key, s.after))
            for s in observation.call_samples
            for key in [s.instruction_class]
        )
        return replace(observation, instruction_samples=tuple(samples), call_samples=with_call)


def change_of(view: JobView) -> Change | None:
    """Return the change of a job since its own earlier iterations; None without any of this run."""
    model = view.previous_run
    if model is None or not model.is_of_this_run:
        return None
    now = full_speed_now(view)
    then_s, now_s = times_by_class_s(model.full_speed), times_by_class_s(now)
    then_mhz, now_mhz = reached_clocks_mhz(model.full_speed), reached_clocks_mhz(now)
    moved = {key for key in now_mhz.keys() & then_mhz.keys() if now_mhz[key] != then_mhz[key]}
    planned = _tuned_iterations(view)
    curves = fit_times([*model.full_speed, *model.profile]) if moved or planned else {}
    then_s |= {key: float(curves[key].times_s([now_mhz[key]])[0]) for key in moved}
    ratios = {key: now_s[key] / then_s[key] for key in then_s.keys() & now_s.keys()}
    return Change(ratios, _tilts(planned, ratios, curves, now_mhz), now_mhz)


def full_speed_now(view: JobView) -> list[IterationObservation]:
    """Return this run's undisturbed iterations at full speed, without the first of each block (clocks still rising)."""
    others = {plan.plan_id for plan in view.issued_plans if plan.purpose is not PlanPurpose.BASELINE}
    others |= {PREVIOUS_FULL_SPEED, PREVIOUS_PROFILE}
    found, plan_id_before = [], None
    for observation in view.observations:
        is_first_of_block = observation.plan_id not in {BASELINE_PLAN_ID, plan_id_before}
        plan_id_before = observation.plan_id
        if observation.is_regular and not is_first_of_block and observation.plan_id not in others:
            found.append(observation)
    return found


def under_ceilings(profile: PipelineProfile, view: JobView) -> PipelineProfile:
    """Return the profile of GPUs that no longer reach their maximum clock: clocks above the ceiling run at the ceiling.

    Plans still request the maximum clock there, so that a GPU that has cooled down returns to full speed at once.
    """
    if view.previous_run is None or not view.previous_run.is_of_this_run:
        return profile
    then_mhz, now_mhz = reached_clocks_mhz(view.previous_run.full_speed), reached_clocks_mhz(full_speed_now(view))
    classes = dict(profile.classes)
    for key, own in profile.classes.items():
        ceiling_mhz = now_mhz.get(key, 0)
        if 0 < ceiling_mhz < then_mhz.get(key, 0):
            reached = own.interpolated(ceiling_mhz)
            below = (option for option in own.options if option.sm_clock_mhz < ceiling_mhz)
            classes[key] = InstructionProfile((replace(reached, sm_clock_mhz=own.at_max_clock.sm_clock_mhz), *below))
    return PipelineProfile(classes, profile.blocking_power_w)


def reached_clocks_mhz(observations: Iterable[IterationObservation]) -> dict[InstructionClass, int]:
    """Return the median clock of each class of instruction."""
    clocks_mhz: dict[InstructionClass, list[int]] = defaultdict(list)
    for observation in observations:
        for sample in observation.instruction_samples:
            clocks_mhz[sample.instruction_class].append(sample.main_share.sm_clock_mhz)
    return {key: median_low(clocks) for key, clocks in clocks_mhz.items()}


def times_by_class_s(observations: Iterable[IterationObservation]) -> dict[InstructionClass, float]:
    """Return the median time of each class."""
    times_s: dict[InstructionClass, list[float]] = defaultdict(list)
    for observation in observations:
        for sample in observation.instruction_samples:
            times_s[sample.instruction_class].append(sample.time_s)
    return {key: median(values) for key, values in times_s.items() if median(values) > 0}


def _tuned_iterations(view: JobView) -> list[IterationObservation]:
    tuned = {plan.plan_id for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED}
    return [o for o in view.observations if o.is_regular and o.plan_id in tuned]


def _tilts(
    planned: Sequence[IterationObservation],
    ratios: Mapping[InstructionClass, float],
    curves: Mapping[InstructionClass, TimeCurve],
    full_speed_mhz: Mapping[InstructionClass, int],
) -> dict[InstructionClass, float]:
    """Return by class the exponents that explain the times of tuned iterations beyond the factor at full speed."""
    moments: dict[InstructionClass, tuple[float, float]] = defaultdict(lambda: (0.0, 1 / _TILT_SIGMA**2))
    for sample in (sample for observation in planned for sample in observation.instruction_samples):
        key = sample.instruction_class
        if key not in ratios or key not in curves:
            continue
        times_s = curves[key].times_s([share.sm_clock_mhz for share in sample.shares]) * ratios[key]
        progress = [share.time_s / time_s for share, time_s in zip(sample.shares, times_s.tolist(), strict=True)]
        below = sum(
            done * math.log(max(1.0, full_speed_mhz[key] / share.sm_clock_mhz))
            for done, share in zip(progress, sample.shares, strict=True)
        )
        weight = sample.count / _TIME_NOISE_RATIO**2
        product, square = moments[key]
        moments[key] = (product + weight * below * math.log(sum(progress)), square + weight * below**2)
    return {key: product / square for key, (product, square) in moments.items()}
