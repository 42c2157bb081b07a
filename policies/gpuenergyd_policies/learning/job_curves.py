"""Curves of a running job: belief about the time and power of each class at each clock, and profiles drawn from it.

Evidence is what any plan shows: the times of instructions at the clocks that they ran at, and the energy of each GPU in
an iteration. No iteration is run for its own sake.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd.core.pipeline.waiting import WaitingPower
from gpuenergyd_policies.learning.curves import CurveModel, Posterior
from gpuenergyd_policies.learning.deviations import POWER, TIME
from gpuenergyd_policies.learning.past_jobs import OwnEvidence, PastCurves, posteriors
from gpuenergyd_policies.learning.seen import (
    ClassAtFullSpeed,
    EnergySeen,
    TimeSeen,
    Waiting,
    points_of,
    power_evidence,
    reference_powers_w,
    time_evidence,
    time_rows,
)
from gpuenergyd_policies.learning.shape import CurvePrior, FloatArray
from gpuenergyd_policies.learning.waits import WaitingPhase

_CLEARLY_OFF_SIGMAS = 2.0
"""Standard deviations by which a single clock must be off the curve for its measurement to overrule physics."""


@dataclass(frozen=True, slots=True)
class FittedCurves:
    """Belief about all classes; entries of the arrays are classes in order, each with its clocks, maximum first."""

    classes: tuple[ClassAtFullSpeed, ...]
    time: Posterior
    """Log time relative to the maximum clock."""
    power: Posterior
    """Log power relative to `reference_w` of the rank."""
    reference_w: Mapping[int, float]
    waiting_w: float
    """While waiting at the maximum clock."""
    waiting_exponent: float
    """Of the clock, which the power while waiting is proportional to a power of."""
    waits: tuple[WaitingPhase, ...] = ()
    """Phases of a training loop that wait, and are not among the classes."""
    past: PastCurves | None = None
    """The past job that was evidence too."""

    def profile(self, *, caution_sigmas: float = 0.0) -> PipelineProfile:
        """Return the mean profile, times below the maximum clock longer by some standard deviations."""
        at_max = self._is_max()
        log_time = self.time.mean + np.where(at_max, 0.0, caution_sigmas * self.time.sigma)
        return self._profile(log_time, self.power.mean, where="mean curve")

    def within_reach_of(self, alone: "FittedCurves") -> "FittedCurves":
        """Return these curves, no faster than a past job may make them, and of hardly more power than without it.

        A plan that lowers no clock, since that is said to save nothing, would never measure that it does.
        """
        if self.past is None:
            return self
        most = alone.power.mean + alone.power.sigma
        least = alone.time.mean - self.past.max_faster_sigmas * alone.time.sigma
        return replace(
            self,
            time=replace(self.time, mean=np.maximum(self.time.mean, least)),
            power=replace(self.power, mean=np.minimum(self.power.mean, most)),
        )

    def drawn(self, num_draws: int, random: np.random.Generator) -> tuple[PipelineProfile, ...]:
        times, powers = (
            own.mean + random.standard_normal((num_draws, len(own.mean))) @ _root(own).T
            for own in (self.time, self.power)
        )
        return tuple(self._profile(*drawn, where="drawn curve") for drawn in zip(times, powers, strict=True))

    def drawn_times_s(self, num_draws: int, random: np.random.Generator) -> FloatArray:
        """Return times of all entries in draws, shape (draws, entries)."""
        root = _root(self.time)
        draws = self.time.mean + random.standard_normal((num_draws, len(root))) @ root.T
        times_s = np.repeat([own.time_s for own in self.classes], self._lengths())
        waits_s = np.repeat([own.time_s for own in self.waits], [len(own.clocks_mhz) for own in self.waits])
        return np.stack(
            [np.concatenate([np.exp(self._physical(draw, is_time=True)) * times_s, waits_s]) for draw in draws]
        )

    def index_of(self) -> dict[tuple[InstructionClass, int], int]:
        """Return the entry of each class at each clock, in draws; those of waits come last."""
        of_classes = [(own.key, clock) for own in self.classes for clock in own.clocks_mhz]
        of_waits = [(own.key, clock) for own in self.waits for clock in own.clocks_mhz]
        return {entry: k for k, entry in enumerate([*of_classes, *of_waits])}

    @property
    def waiting_power(self) -> WaitingPower:
        """The power of a waiting GPU at all clocks that plans may use."""
        clocks_of = [*(own.clocks_mhz for own in self.classes), *(own.clocks_mhz for own in self.waits)]
        clocks = sorted({clock for clocks in clocks_of for clock in clocks})
        return WaitingPower(tuple(clocks), tuple(self._waiting_w(clock, clocks[-1]) for clock in clocks))

    def _waiting_w(self, sm_clock_mhz: int, max_mhz: int) -> float:
        return self.waiting_w * math.exp(self.waiting_exponent * math.log(sm_clock_mhz / max_mhz))

    def _lengths(self) -> list[int]:
        return [len(own.clocks_mhz) for own in self.classes]

    def _is_max(self) -> FloatArray:
        return np.concatenate([np.arange(length) == 0 for length in self._lengths()])

    def _physical(self, values: FloatArray, *, is_time: bool) -> FloatArray:
        """Return the values of every class made monotone below the bend: times rise, power falls as the clock falls.

        Time rises no faster than 1 / clock: an instruction needs at most as many clock cycles as at a higher clock.
        Above the bend neither holds: a GPU at its power cap may be faster at a clock that it need not vary. Nor does
        either hold of single clocks that are clearly off the curve: they are as they were measured.
        """
        belief = self.time if is_time else self.power
        single = np.where(np.abs(belief.single) > _CLEARLY_OFF_SIGMAS * belief.sigma, belief.single, 0.0)
        found, begin = values - single, 0
        for own in self.classes:
            part = slice(begin, begin + len(own.clocks_mhz))
            if is_time:
                found[part] -= found[begin]
            clocks = np.array(own.clocks_mhz, dtype=np.float64)
            found[part] = _monotone(found[part], clocks, own.full_speed_mhz, is_time=is_time)
            begin += len(clocks)
        return found + single

    def _profile(self, log_time: FloatArray, log_power: FloatArray, *, where: str) -> PipelineProfile:
        time_ratio = np.exp(self._physical(log_time, is_time=True))
        power_ratio = np.exp(self._physical(log_power, is_time=False))
        classes, begin = {}, 0
        for own in self.classes:
            part = slice(begin, begin + len(own.clocks_mhz))
            times_s = own.time_s * time_ratio[part]
            energies_j = self.reference_w[own.key.pp_rank] * power_ratio[part] * times_s
            options = map(ClockOption, own.clocks_mhz, times_s.tolist(), energies_j.tolist())
            name = f"{where} of {own.key.kind} on rank {own.key.pp_rank}"
            classes[own.key] = instruction_profile(list(options), where=name)
            begin += len(own.clocks_mhz)
        for wait in self.waits:
            powers_w = [self._waiting_w(clock, wait.clocks_mhz[0]) for clock in wait.clocks_mhz]
            of_wait = [
                ClockOption(clock, wait.time_s, power_w * wait.time_s)
                for clock, power_w in zip(wait.clocks_mhz, powers_w, strict=True)
            ]
            classes[wait.key] = instruction_profile(of_wait, where=f"{where} of {wait.key.kind}")
        return PipelineProfile(classes, self.waiting_w)


def fit_curves(
    classes: Sequence[ClassAtFullSpeed],
    prior: CurvePrior,
    times: Sequence[TimeSeen],
    energies: Sequence[EnergySeen],
    waiting: Waiting,
    *,
    past: Sequence[PastCurves] = (),
    calls_sigma_s: tuple[float, float] = (0.0, 0.0),
) -> FittedCurves:
    """Return the belief about the curves of a job from its iterations so far, at least those at full speed.

    Past jobs that agree with these are evidence too; for `calls_sigma_s` see `time_evidence`.

    Raises:
        NotEnoughDataError: a rank has no measured energy at full speed.
    """
    wanted = points_of(classes, [(k, clock) for k, own in enumerate(classes) for clock in own.clocks_mhz])
    of_time, of_power = CurveModel(prior.time, TIME), CurveModel(prior.power, POWER)
    rows = time_rows(classes, times, has_calls=any(calls_sigma_s))
    of_times = time_evidence(classes, rows, of_time, calls_sigma_s=calls_sigma_s)
    reference_w = reference_powers_w(classes, energies, waiting)
    seen = power_evidence(classes, energies, waiting, reference_w, of_power)
    times_alone = OwnEvidence(of_time, of_times.observed, of_times.evidence)
    powers_alone = OwnEvidence(of_power, seen.observed, seen.evidence)
    used, time, power = posteriors(wanted, past, classes, times_alone, powers_alone)
    off = waiting.sigma_ratio**2 * float(seen.waiting[:, 0] @ power.explained[: len(seen.waiting)])
    waiting_w = waiting.power_w * math.exp(off)
    steeper = waiting.exponent_sigma**2 * float(seen.waiting[:, 1] @ power.explained[: len(seen.waiting)])
    exponent = max(waiting.exponent + steeper, 0.0)
    return FittedCurves(tuple(classes), time, power, reference_w, waiting_w, exponent, waiting.phases, past=used)


def _monotone(values: FloatArray, clocks_mhz: FloatArray, full_speed_mhz: float, *, is_time: bool) -> FloatArray:
    """Return the values of one class, maximum clock first, as physics permits below its clock at full speed."""
    bend = min(len(clocks_mhz) - 1, int(np.sum(clocks_mhz > full_speed_mhz)))
    above, below = values[:bend], values[bend:]
    if not is_time:
        return np.concatenate([above, np.minimum.accumulate(below)])
    cycles = np.log(clocks_mhz / clocks_mhz[0])
    rising = np.concatenate([above, np.maximum.accumulate(below)])
    return np.asarray(np.minimum.accumulate(rising + cycles) - cycles, dtype=np.float64)


def _root(belief: Posterior) -> FloatArray:
    jitter = 1e-9 + 1e-9 * float(np.trace(belief.covariance)) / max(1, len(belief.covariance))
    return np.asarray(np.linalg.cholesky(belief.covariance + jitter * np.eye(len(belief.covariance))), dtype=np.float64)
