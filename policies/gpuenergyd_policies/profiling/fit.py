"""From a few iterations to time and energy of every kind of instruction at every clock.

Times come from `times`. Energy. A GPU's energy over an iteration is the sum over what it did of time times power, with
    v(f) = 1 + (v_max - 1) * max(0, f - f_knee) / (f_max - f_knee)
    power(kind, f) = P_static + a_kind * v(f)^2 / t_kind(f)
    power(waiting, f) = P_static + c * f * v(f)^2
that is, an instruction switches the same transistors at every clock, at the voltage of that clock; where a power cap
holds the clock down, at the voltage of the clock it is held to. The knee, v_max and
P_static are shared by GPUs of one model, each GPU has its own a and c; all are found at once by least squares
on relative residuals with priors on the shared three.
Extrapolation below the lowest measured clock is refused: it overshoots deadlines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from gpuenergyd.core.observation import IterationObservation
from gpuenergyd.core.pipeline import InstructionClass, InstructionKind
from gpuenergyd.core.policy import GpuView
from gpuenergyd.core.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd_policies.profiling.times import TimeCurve, fit_times

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_KNEE_RATIO_PRIOR, _KNEE_RATIO_SIGMA = 0.75, 0.06
_VOLTAGE_PRIOR, _VOLTAGE_SIGMA = 1.3, 0.15
_STATIC_POWER_PRIOR_W, _STATIC_POWER_SIGMA_W = 50.0, 20.0
"""Priors over data-centre GPUs: fitted knees lie at 0.70-0.78 of the maximum clock, voltages at 1.21-1.40 of the
knee's, static power at 32-80 W (V100, A100, A40, H100 as measured or assumed in published sweeps)."""
_ENERGY_NOISE_RATIO = 0.01
_MIN_ENERGY_NOISE_RATIO = 0.001
"""The first is assumed, then replaced by what the fit leaves over: good data may speak louder than the priors."""


class NotEnoughDataError(Exception):
    """The observations do not determine the profile; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Power of one GPU; `dynamic_j[kind, chunk]` is what one instruction adds to the static power below the knee."""

    static_power_w: float
    knee_mhz: float
    max_voltage_ratio: float
    max_sm_clock_mhz: int
    dynamic_j: Mapping[tuple[InstructionKind, int], float]
    waiting_w_per_mhz: float

    def energy_j(self, kind: InstructionKind, chunk_index: int, sm_clock_mhz: float, time_s: float) -> float:
        """Return what one instruction costs that takes `time_s` at a clock."""
        return self.static_power_w * time_s + self.dynamic_j[kind, chunk_index] * self._voltage_squared(sm_clock_mhz)

    def waiting_power_w(self, sm_clock_mhz: float) -> float:
        """Return the power while waiting for a peer at a clock."""
        return self.static_power_w + self.waiting_w_per_mhz * sm_clock_mhz * self._voltage_squared(sm_clock_mhz)

    def _voltage_squared(self, sm_clock_mhz: float) -> float:
        return float(_voltage(sm_clock_mhz, self.knee_mhz, self.max_voltage_ratio, self.max_sm_clock_mhz) ** 2)


@dataclass(frozen=True, slots=True)
class FittedProfile:
    """A pipeline's profile as fitted, with how well it explains what was seen."""

    profile: PipelineProfile
    power_models: tuple[PowerModel, ...]
    energy_error_ratio: float
    """Root mean square of (fitted - measured) / measured over GPU iterations."""


def fit_profile(observations: Sequence[IterationObservation], gpus: Sequence[GpuView]) -> FittedProfile:
    """Return the profile that the observations show; `gpus[r]` belongs to rank r.

    Raises:
        NotEnoughDataError: a class without samples, or no energy for some rank.
    """
    curves = fit_times(observations)
    if {c.pp_rank for c in curves} != set(range(len(gpus))):
        raise NotEnoughDataError("some rank has no timed instructions")
    models, error_ratio = _fit_power(observations, gpus, curves)
    classes: dict[InstructionClass, InstructionProfile] = {}
    for instruction_class, curve in curves.items():
        gpu = gpus[instruction_class.pp_rank]
        model = models[instruction_class.pp_rank]
        clocks = [c for c in gpu.supported_sm_clocks_mhz if c >= curve.lowest_mhz]
        options = []
        for clock, time_s in zip(clocks, curve.times_s(clocks), strict=True):
            kind, chunk = instruction_class.kind, instruction_class.chunk_index
            energy_j = model.energy_j(kind, chunk, curve.effective_mhz(clock), float(time_s))
            options.append(ClockOption(clock, float(time_s), energy_j))
        where = f"fit of {instruction_class.kind} on rank {instruction_class.pp_rank}"
        classes[instruction_class] = instruction_profile(options, where=where)
    waiting_w = [model.waiting_power_w(model.max_sm_clock_mhz) for model in models]
    return FittedProfile(
        profile=PipelineProfile(classes, blocking_power_w=float(np.mean(waiting_w))),
        power_models=models,
        energy_error_ratio=error_ratio,
    )


# --- power ---


_What = tuple[int, InstructionKind | None, int]
"""Rank, kind (None: waiting) and chunk: what a coefficient belongs to."""


@dataclass(frozen=True, slots=True)
class _Shares:
    """Every share of every GPU iteration, one row per share; `row_of` says which iteration it belongs to."""

    row_of: IntArray
    rank_of: IntArray
    what_of: IntArray
    clock_mhz: FloatArray
    amount: FloatArray
    """Instructions done (time over time per instruction), or MHz seconds of waiting: times a coefficient, joules."""
    time_s: FloatArray
    energy_j: FloatArray
    """One per row: what the counter said."""


def _shares(
    observations: Sequence[IterationObservation],
    curves: Mapping[InstructionClass, TimeCurve],
) -> tuple[_Shares, dict[_What, int]]:
    index_of: dict[_What, int] = {}
    columns: list[tuple[int, int, int, float, float, float]] = []
    energies: list[float] = []
    for observation in observations:
        for rank in observation.ranks:
            if rank.energy_j is None or not rank.energy_j > 0:
                continue
            for share in rank.time_at:
                what = index_of.setdefault((rank.pp_rank, share.kind, share.chunk_index), len(index_of))
                clock_mhz, amount = float(share.sm_clock_mhz), share.time_s * share.sm_clock_mhz
                if share.kind is not None:
                    curve = curves[InstructionClass(rank.pp_rank, share.kind, share.chunk_index)]
                    clock_mhz = curve.effective_mhz(share.sm_clock_mhz)
                    amount = share.time_s / float(curve.times_s([share.sm_clock_mhz])[0])
                columns.append((len(energies), rank.pp_rank, what, clock_mhz, amount, share.time_s))
            energies.append(rank.energy_j)
    table = np.array(columns, dtype=float).reshape(-1, 6)
    row_of, rank_of, what_of = (table[:, k].astype(np.int64) for k in range(3))
    shares = _Shares(row_of, rank_of, what_of, table[:, 3], table[:, 4], table[:, 5], np.array(energies))
    return shares, index_of


def _fit_power(
    observations: Sequence[IterationObservation],
    gpus: Sequence[GpuView],
    curves: Mapping[InstructionClass, TimeCurve],
) -> tuple[tuple[PowerModel, ...], float]:
    shares, index_of = _shares(observations, curves)
    missing = sorted(set(range(len(gpus))) - set(shares.rank_of.tolist()))
    if missing:
        raise NotEnoughDataError(f"no energy measured for ranks {missing}")
    models = sorted({gpu.model_name for gpu in gpus})
    model_of_rank = np.array([models.index(gpu.model_name) for gpu in gpus])
    top_of_rank = np.array([max(gpu.supported_sm_clocks_mhz) for gpu in gpus], dtype=float)
    model, top = model_of_rank[shares.rank_of], top_of_rank[shares.rank_of]
    n = len(models)

    def fitted_j(x: FloatArray) -> FloatArray:
        knee_ratio, voltage, static_w, coefficients = x[:n], x[n : 2 * n], x[2 * n : 3 * n], x[3 * n :]
        squared = _voltage(shares.clock_mhz, knee_ratio[model] * top, voltage[model], top) ** 2
        joules = static_w[model] * shares.time_s + coefficients[shares.what_of] * shares.amount * squared
        return np.asarray(np.bincount(shares.row_of, weights=joules, minlength=len(shares.energy_j)), dtype=np.float64)

    prior = np.repeat([_KNEE_RATIO_PRIOR, _VOLTAGE_PRIOR, _STATIC_POWER_PRIOR_W], n)
    sigma = np.repeat([_KNEE_RATIO_SIGMA, _VOLTAGE_SIGMA, _STATIC_POWER_SIGMA_W], n)

    def misfit(x: FloatArray) -> FloatArray:
        return (fitted_j(x) - shares.energy_j) / shares.energy_j

    def residuals(x: FloatArray, noise_ratio: float) -> FloatArray:
        return np.concatenate([misfit(x) / noise_ratio, (x[: 3 * n] - prior) / sigma])

    # Coefficients start where each would explain half of the mean power on its own.
    mean_power_w = float(shares.energy_j.sum() / shares.time_s.sum())
    pace = np.bincount(shares.what_of, weights=shares.time_s) / np.bincount(shares.what_of, weights=shares.amount)
    start = np.concatenate([prior, 0.5 * mean_power_w * pace])
    lower = np.concatenate([np.repeat([0.5, 1.0, 0.0], n), np.zeros(len(index_of))])
    upper = np.concatenate([np.repeat([0.95, 2.0, np.inf], n), np.full(len(index_of), np.inf)])
    x, noise_ratio = start, _ENERGY_NOISE_RATIO
    for _ in range(2):
        x = least_squares(
            residuals, x, args=(noise_ratio,), bounds=(lower, upper), loss="soft_l1", x_scale=np.maximum(start, 1e-6)
        ).x
        error_ratio = float(np.sqrt(np.mean(misfit(x) ** 2)))
        noise_ratio = min(max(error_ratio, _MIN_ENERGY_NOISE_RATIO), _ENERGY_NOISE_RATIO)
    coefficients = x[3 * n :]
    power_models = tuple(
        PowerModel(
            static_power_w=float(x[2 * n + model_of_rank[r]]),
            knee_mhz=float(x[model_of_rank[r]] * top_of_rank[r]),
            max_voltage_ratio=float(x[n + model_of_rank[r]]),
            max_sm_clock_mhz=int(top_of_rank[r]),
            dynamic_j={
                (kind, chunk): float(coefficients[i])
                for (rank, kind, chunk), i in index_of.items()
                if rank == r and kind is not None
            },
            waiting_w_per_mhz=float(coefficients[index_of[r, None, 0]]) if (r, None, 0) in index_of else 0.0,
        )
        for r in range(len(gpus))
    )
    return power_models, error_ratio


def _voltage(
    clock_mhz: float | FloatArray,
    knee_mhz: float | FloatArray,
    max_voltage_ratio: float | FloatArray,
    top_mhz: float | FloatArray,
) -> FloatArray:
    """Return the voltage against that below the knee."""
    above = np.maximum(0.0, np.asarray(clock_mhz) - knee_mhz) / (np.asarray(top_mhz) - knee_mhz)
    return np.asarray(1.0 + (np.asarray(max_voltage_ratio) - 1.0) * above, dtype=np.float64)
