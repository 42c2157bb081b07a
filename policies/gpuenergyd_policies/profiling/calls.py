"""Estimates what setting a clock costs a training: how long it stops the GPU, how late the clock takes effect.

Theory of operation. An instruction at one clock takes T. One in which the clock changes spends `before` at the clock
before and `after` at the clock after, as reported. If the call stops the GPU for S, at first at the clock before, and
clocks take effect D later than they are reported (negative: earlier), then in units of the work of the instruction

    before / T_before + after / T_after = 1 + S / T_before + D * (1 / T_after - 1 / T_before)

which is linear in S and D: raises and reductions show D with opposite signs, and S alike. The times T come from
instructions without a call, so that neither is part of them. A robust regression over all classes of a job gives both;
each counts only if it is clearly different from zero.

Instructions that end before the clock takes effect show S alone. Classes that were never observed without a call at the
clock after the change are left out.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from gpuenergyd.core.measurement.observation import (
    CallSample,
    ClockShare,
    InstructionSample,
    IterationObservation,
)
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd_policies.profiling.times import TimeCurve, fit_times

_TIME_NOISE_RATIO = 0.003
_MAX_CALLS = 0.02
"""Mean number of calls per instruction up to which a sample shows the time without calls."""
_MIN_ROWS = 6
_ROUNDS = 2
_SIGNIFICANT_SIGMAS = 3.0
_MIN_STALL_RATIO = 0.0005
"""Least stall worth a correction, as a share of the median instruction's time."""


_ClassAtClock = tuple[InstructionClass, int]


@dataclass(frozen=True, slots=True)
class CallCost:
    """Time for which a call stops the GPU's work, and time from the report of a clock until its effect."""

    stall_s: float = 0.0
    delay_s: float = 0.0

    @property
    def is_none(self) -> bool:
        """Whether calls cost nothing and reports are exact."""
        return self.stall_s == 0.0 and self.delay_s == 0.0

    def corrected(self, observation: IterationObservation) -> IterationObservation:
        """Return an observation without the stalls, and with clocks in effect when they really were."""
        if self.is_none:
            return observation
        calls_of: dict[_ClassAtClock, list[CallSample]] = defaultdict(list)
        for call in observation.call_samples:
            longer = max(call.before, call.after, key=lambda share: share.time_s)
            calls_of[call.instruction_class, longer.sm_clock_mhz].append(call)
        samples = tuple(
            self._corrected(sample, calls_of[sample.instruction_class, sample.main_share.sm_clock_mhz])
            if sample.num_calls and sample.shares
            else sample
            for sample in observation.instruction_samples
        )
        return replace(observation, instruction_samples=samples)

    def _corrected(self, sample: InstructionSample, calls: Sequence[CallSample]) -> InstructionSample:
        """Move the delay from clocks that were set to those before, and take away the stalls, first from the latter.

        A clock that was reported to be in effect for less than the delay never was, within these instructions.
        """
        time_s = {share.sm_clock_mhz: share.time_s for share in sample.shares}
        left = sample.num_calls
        for call in calls:
            before_mhz, after_mhz = call.before.sm_clock_mhz, call.after.sm_clock_mhz
            share = min(1.0, call.count / sample.count)
            if before_mhz not in time_s:
                continue
            left -= share
            if before_mhz != after_mhz and after_mhz in time_s:
                moved_s = min(self.delay_s, call.after.time_s) * share
                moved_s = min(max(moved_s, -time_s[before_mhz]), time_s[after_mhz])
                time_s[before_mhz] += moved_s
                time_s[after_mhz] -= moved_s
            time_s[before_mhz] -= min(self.stall_s * share, time_s[before_mhz])
        longest_mhz = max(time_s, key=time_s.__getitem__)
        time_s[longest_mhz] -= self.stall_s * max(0.0, left)
        shares = tuple(ClockShare(mhz, own_s) for mhz, own_s in sorted(time_s.items(), reverse=True) if own_s > 0)
        return replace(sample, shares=shares) if shares else sample


def fit_times_and_calls(
    observations: Sequence[IterationObservation],
) -> tuple[Mapping[InstructionClass, TimeCurve], CallCost]:
    """Return the time curve of every timed class, without calls, and the cost of calls.

    Curves of times that contain calls distort their cost a little, so it is fitted again to curves without them.
    """
    curves, cost = fit_times(observations), CallCost()
    for _ in range(_ROUNDS):
        cost = fit_call_cost(observations, curves)
        if cost.is_none:
            break
        curves = fit_times([cost.corrected(observation) for observation in observations])
    return curves, cost


def fit_call_cost(
    observations: Sequence[IterationObservation], curves: Mapping[InstructionClass, TimeCurve]
) -> CallCost:
    """Return the cost of calls; none where too few instructions show it."""
    alone_s = _times_without_calls_s(observations)
    rows = [
        row
        for observation in observations
        if observation.is_regular
        for sample in observation.call_samples
        for row in [_row(sample, alone_s, curves)]
        if row is not None
    ]
    if len(rows) < _MIN_ROWS:
        return CallCost()
    excess_s, per_delay, weights = (np.array(column) for column in zip(*rows, strict=True))
    columns = np.column_stack([1 - per_delay, per_delay])
    has_delay = bool(np.ptp(per_delay) > 0)
    design = columns if has_delay else columns[:, :1]
    slopes = design * weights[:, None]
    derivative: Any = lambda _: slopes  # noqa: E731  the stubs of SciPy know the names of methods only
    fit = least_squares(
        lambda cost: (design @ cost - excess_s) * weights,
        np.zeros(design.shape[1]),
        jac=derivative,
        loss="soft_l1",
    )
    misfit = max(1.0, float(np.median(np.abs(fit.fun))) / 0.6745)
    sigmas_s = misfit * np.sqrt(np.diag(np.linalg.pinv(fit.jac.T @ fit.jac)))
    stall_s, delay_s = (*map(float, fit.x), 0.0)[:2]
    if stall_s < max(_SIGNIFICANT_SIGMAS * sigmas_s[0], _MIN_STALL_RATIO * median(alone_s.values())):
        stall_s = 0.0
    if not has_delay or abs(delay_s) < _SIGNIFICANT_SIGMAS * sigmas_s[1]:
        delay_s = 0.0
    return CallCost(stall_s, delay_s)


def _times_without_calls_s(observations: Sequence[IterationObservation]) -> dict[_ClassAtClock, float]:
    times_s: dict[_ClassAtClock, list[float]] = defaultdict(list)
    for observation in observations:
        for sample in observation.instruction_samples if observation.is_regular else ():
            if len(sample.shares) == 1 and sample.num_calls <= _MAX_CALLS:
                times_s[sample.instruction_class, sample.shares[0].sm_clock_mhz].append(sample.time_s)
    return {key: median(own) for key, own in times_s.items()}


def _row(
    sample: CallSample, alone_s: Mapping[_ClassAtClock, float], curves: Mapping[InstructionClass, TimeCurve]
) -> tuple[float, float, float] | None:
    """Return (excess in s, change of the excess per s of delay, weight); None if the time without calls is unknown."""
    key, before, after = sample.instruction_class, sample.before, sample.after
    time_s = alone_s.get((key, after.sm_clock_mhz))
    if time_s is None or key not in curves:
        return None
    before_s = alone_s.get((key, before.sm_clock_mhz)) or float(curves[key].times_s([before.sm_clock_mhz])[0])
    excess_s = time_s * (before.time_s / before_s + after.time_s / time_s - 1)
    per_delay = 1 - time_s / before_s if after.time_s else 0.0
    return excess_s, per_delay, float(np.sqrt(sample.count)) / (_TIME_NOISE_RATIO * time_s)
