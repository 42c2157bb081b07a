"""Fitted profiles: time and energy of every kind of instruction at every clock, and draws from their posterior.

Times come from `times`, power from `power`, and corrections of power from `residual`. If these do not explain the
measured energies, only measured clocks are offered. Clocks below the lowest measured one are never offered, because
extrapolated times miss deadlines.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd.core.pipeline.waiting import WaitingPower
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd_policies.profiling.calls import CallCost, fit_times_and_calls
from gpuenergyd_policies.profiling.power import NotEnoughDataError, PowerFit, PowerModel, WorkKey, fit_power, shares_of
from gpuenergyd_policies.profiling.residual import Residual, fit_residual
from gpuenergyd_policies.profiling.times import TimeCurve

__all__ = ("FittedProfile", "NotEnoughDataError", "fit_profile")

FloatArray = NDArray[np.float64]

_DOES_NOT_FIT_RATIO = 0.08
"""Root mean square of energy errors above which the power model does not describe a GPU."""
_BETTER_RATIO = 0.8
"""Factor on the energy error by which a power cap must improve the fit to be accepted."""

_MIN_FACTOR = 0.1
"""Least factor by which the residual corrects an energy: whatever the noise, an energy stays positive."""


@dataclass(frozen=True, slots=True)
class FittedProfile:
    """A fitted profile of a pipeline, and the posterior that other probable profiles are drawn from."""

    profile: PipelineProfile
    doubtful: frozenset[tuple[InstructionClass, int]]
    """Clocks of a class whose only measurement contradicts its neighbours; they need another one."""
    num_disturbed: int
    """GPU iterations excluded because of an outlying energy."""
    is_power_model_valid: bool
    """Whether the power model explains the measured energies; if not, only measured clocks are offered."""
    calls: CallCost
    """What setting clocks costs; the times of the profile are without it."""
    waiting_power: WaitingPower
    """Power of a waiting GPU at the clocks that plans may use, the mean of all ranks."""
    _power: PowerFit
    _curves: Mapping[InstructionClass, TimeCurve]
    _residual: Residual

    def drawn(self, random: np.random.Generator, *, is_shape_known: bool = False) -> PipelineProfile:
        """Return a profile drawn from the posterior distribution.

        With `is_shape_known`, times differ only by what their measurements leave open, not by what an interpolation
        between measured clocks may miss: that is alike in stages that do the same, and no noise. Drawn apart for each
        of many stages, the slowest of them would be late in every draw.
        """
        models = self._power.drawn_models(random)
        classes: dict[InstructionClass, InstructionProfile] = {}
        for key, own in self.profile.classes.items():
            clocks = [option.sm_clock_mhz for option in own.options]
            curve = self._curves[key]
            mean_ratio, sigma_ratio = _misfit(self._residual, key, curve, clocks)
            # One draw for low and one for high clocks: errors of neighbouring clocks are correlated.
            low, high = random.standard_normal(2)
            tilt = np.linspace(1.0, 0.0, len(clocks))
            error = (high * tilt + low * (1 - tilt)) / np.hypot(tilt, 1 - tilt)
            sigmas_ratio = curve.measured_sigmas_ratio(clocks) if is_shape_known else curve.sigmas_ratio(clocks)
            times_s = curve.times_s(clocks) * np.exp(error * sigmas_ratio)
            low, high = random.standard_normal(2)
            wobble = (high * tilt + low * (1 - tilt)) / np.hypot(tilt, 1 - tilt)
            factor = 1 + mean_ratio + wobble * sigma_ratio
            energies_j = _energies_j(models[key.pp_rank], key, curve, clocks, times_s)
            energies_j = energies_j * np.maximum(factor, _MIN_FACTOR)
            options = map(ClockOption, clocks, times_s.tolist(), energies_j.tolist())
            classes[key] = instruction_profile(list(options), where=f"draw of {key.kind} on rank {key.pp_rank}")
        return PipelineProfile(classes, _blocking_power_w(models))


def fit_profile(observations: Sequence[IterationObservation], gpus: Sequence[GpuView]) -> FittedProfile:
    """Return the profile fitted to observations; `gpus[r]` belongs to rank r.

    Raises:
        NotEnoughDataError: a rank has no timed instructions, or no measured energy.
    """
    curves, calls = fit_times_and_calls(observations)
    observations = [calls.corrected(observation) for observation in observations]
    missing = sorted(set(range(len(gpus))) - {c.pp_rank for c in curves})
    if missing:
        raise NotEnoughDataError(f"ranks {missing} have no timed instructions")
    curves, power = _with_caps_if_better(observations, curves, fit_power(shares_of(observations, curves), gpus), gpus)
    models = power.models()
    clocks_of = {
        key: [c for c in gpus[key.pp_rank].supported_sm_clocks_mhz if curve.is_offered(c)]
        for key, curve in curves.items()
    }
    residual = fit_residual(power, _by_part(clocks_of, curves))
    is_valid = power.energy_error_ratio <= _DOES_NOT_FIT_RATIO
    if not is_valid:
        clocks_of = {key: _measured_clocks(observations, key, clocks) for key, clocks in clocks_of.items()}
        residual = fit_residual(power, _by_part(clocks_of, curves))
    classes: dict[InstructionClass, InstructionProfile] = {}
    for key, curve in curves.items():
        clocks = clocks_of[key]
        times_s = curve.times_s(clocks)
        energies_j = _energies_j(models[key.pp_rank], key, curve, clocks, times_s)
        energies_j = energies_j * np.maximum(1 + _misfit(residual, key, curve, clocks)[0], _MIN_FACTOR)
        options = list(map(ClockOption, clocks, times_s.tolist(), energies_j.tolist()))
        classes[key] = instruction_profile(options, where=f"fit of {key.kind} on rank {key.pp_rank}")
    return FittedProfile(
        profile=PipelineProfile(classes, _blocking_power_w(models)),
        doubtful=frozenset((key, int(clock)) for key, curve in curves.items() for clock in curve.doubtful_mhz),
        num_disturbed=power.num_disturbed,
        is_power_model_valid=is_valid,
        calls=calls,
        waiting_power=_waiting_power(models, clocks_of.values()),
        _power=power,
        _curves=curves,
        _residual=residual,
    )


def _with_caps_if_better(
    observations: Sequence[IterationObservation],
    curves: Mapping[InstructionClass, TimeCurve],
    power: PowerFit,
    gpus: Sequence[GpuView],
) -> tuple[Mapping[InstructionClass, TimeCurve], PowerFit]:
    """Return curves with bends as power caps, and their fit, if that explains the energies clearly better."""
    if all(curve.bend_mhz is None for curve in curves.values()):
        return curves, power
    capped = {key: curve.as_capped() for key, curve in curves.items()}
    of_capped = fit_power(shares_of(observations, capped), gpus)
    if of_capped.energy_error_ratio > _BETTER_RATIO * power.energy_error_ratio:
        return curves, power
    return capped, of_capped


def _work_key(key: InstructionClass, part_index: int) -> WorkKey:
    return (key.pp_rank, key.kind, key.chunk_index, part_index)


def _by_part(
    clocks_of: Mapping[InstructionClass, Sequence[int]], curves: Mapping[InstructionClass, TimeCurve]
) -> dict[WorkKey, list[int]]:
    """Return the clocks of each part of each class's time curve, in order."""
    found: dict[WorkKey, list[int]] = {}
    for key, clocks in clocks_of.items():
        for clock in clocks:
            found.setdefault(_work_key(key, curves[key].part_index(clock)), []).append(clock)
    return found


def _misfit(
    residual: Residual, key: InstructionClass, curve: TimeCurve, clocks: Sequence[int]
) -> tuple[FloatArray, FloatArray]:
    """Return the error of the power model for a class at clocks that the residual covers, and its sigma.

    The power of a wait falls with the clock, whatever the errors of iterations seem to show.
    """
    parts = curve.part_indices(clocks)
    mean_ratio, sigma_ratio = np.zeros(len(clocks)), np.zeros(len(clocks))
    if curve.is_flat:
        return mean_ratio, sigma_ratio
    for part in set(parts.tolist()):
        mean_ratio[parts == part] = residual.mean_ratio[_work_key(key, part)]
        sigma_ratio[parts == part] = residual.sigma_ratio[_work_key(key, part)]
    return mean_ratio, sigma_ratio


def _blocking_power_w(models: Sequence[PowerModel]) -> float:
    return float(np.mean([model.waiting_power_w(model.max_sm_clock_mhz) for model in models]))


def _waiting_power(models: Sequence[PowerModel], clocks_of_all: Iterable[Sequence[int]]) -> WaitingPower:
    """Return the mean power of a waiting GPU at all clocks that any instruction is offered."""
    clocks = sorted({model.max_sm_clock_mhz for model in models}.union(*clocks_of_all))
    powers_w = tuple(float(np.mean([model.waiting_power_w(clock) for model in models])) for clock in clocks)
    return WaitingPower(tuple(clocks), powers_w)


def _energies_j(
    model: PowerModel, key: InstructionClass, curve: TimeCurve, clocks: Sequence[int], times_s: FloatArray
) -> FloatArray:
    works = [(key.kind, key.chunk_index, part) for part in curve.part_indices(clocks).tolist()]
    effective_mhz = np.array([curve.effective_mhz(clock) for clock in clocks], dtype=np.float64)
    return model.energies_j(works, effective_mhz, times_s)


def _measured_clocks(
    observations: Sequence[IterationObservation], key: InstructionClass, clocks: Sequence[int]
) -> list[int]:
    measured = {
        sample.main_share.sm_clock_mhz
        for observation in observations
        for sample in observation.instruction_samples
        if sample.instruction_class == key
    }
    return [clock for clock in clocks if clock in measured]
