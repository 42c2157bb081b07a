"""From a few iterations to time and energy of every kind of instruction at every clock.

Times. An instruction that ran in shares of different clocks satisfies sum(share / t(clock)) = 1. The unknowns are the
log times at the measured clocks; between them log time is interpolated monotonically over the clock (PCHIP), never by
a formula, because an error in time costs more than one in energy.

Energy. A GPU's energy over an iteration is the sum over what it did of time times power, with
    power(kind, f) = P_static + c_kind * f * v(f)^2,   v(f) = 1 + (v_max - 1) * max(0, f - f_knee) / (f_max - f_knee)
and waiting as a kind of its own. The knee, v_max and P_static are shared by GPUs of one model, each GPU has
its own coefficients; all are found at once by least squares on relative residuals with priors on the shared three.
Extrapolation below the lowest measured clock is refused: it overshoots deadlines.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.optimize import least_squares

from gpuenergyd.core.observation import InstructionSample, IterationObservation
from gpuenergyd.core.pipeline import InstructionClass, InstructionKind
from gpuenergyd.core.policy import GpuView
from gpuenergyd.core.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile

FloatArray = NDArray[np.float64]

_KNEE_RATIO_PRIOR, _KNEE_RATIO_SIGMA = 0.75, 0.06
_VOLTAGE_PRIOR, _VOLTAGE_SIGMA = 1.3, 0.15
_STATIC_POWER_PRIOR_W, _STATIC_POWER_SIGMA_W = 50.0, 20.0
"""Priors over data-centre GPUs: fitted knees lie at 0.70-0.78 of the maximum clock, voltages at 1.21-1.40 of the
knee's, static power at 32-80 W (V100, A100, A40, H100 as measured or assumed in published sweeps)."""
_ENERGY_NOISE_RATIO = 0.01
_TIME_NOISE_RATIO = 0.003
_MIN_SHARE_RATIO = 0.02
"""Shares smaller than this of an instruction are rounding noise of two clocks, not a measurement."""


class NotEnoughDataError(Exception):
    """The observations do not determine the profile; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Power of one GPU at a clock, for what it may be doing; None is waiting."""

    static_power_w: float
    knee_mhz: float
    max_voltage_ratio: float
    max_sm_clock_mhz: int
    coefficients_w_per_mhz: Mapping[tuple[InstructionKind | None, int], float]

    def power_w(self, kind: InstructionKind | None, chunk_index: int, sm_clock_mhz: float) -> float:
        """Return the power of one kind of work."""
        shape = _clock_shape_mhz(sm_clock_mhz, self.knee_mhz, self.max_voltage_ratio, self.max_sm_clock_mhz)
        return self.static_power_w + self.coefficients_w_per_mhz[kind, chunk_index] * float(shape)


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
    times = _fit_times(observations, gpus)
    models, error_ratio = _fit_power(observations, gpus)
    classes: dict[InstructionClass, InstructionProfile] = {}
    for instruction_class, (knots_mhz, knot_times_s) in times.items():
        gpu = gpus[instruction_class.pp_rank]
        model = models[instruction_class.pp_rank]
        clocks = [c for c in gpu.supported_sm_clocks_mhz if c >= knots_mhz[0]]
        options = []
        for clock, time_s in zip(clocks, _interpolate(clocks, knots_mhz, knot_times_s), strict=True):
            power_w = model.power_w(instruction_class.kind, instruction_class.chunk_index, clock)
            options.append(ClockOption(clock, float(time_s), power_w * float(time_s)))
        where = f"fit of {instruction_class.kind} on rank {instruction_class.pp_rank}"
        classes[instruction_class] = instruction_profile(options, where=where)
    waiting_w = [model.power_w(None, 0, model.max_sm_clock_mhz) for model in models]
    return FittedProfile(
        profile=PipelineProfile(classes, blocking_power_w=float(np.mean(waiting_w))),
        power_models=models,
        energy_error_ratio=error_ratio,
    )


# --- times ---


def _fit_times(
    observations: Sequence[IterationObservation], gpus: Sequence[GpuView]
) -> dict[InstructionClass, tuple[FloatArray, FloatArray]]:
    samples: dict[InstructionClass, list[InstructionSample]] = defaultdict(list)
    for observation in observations:
        for sample in observation.instruction_samples:
            samples[InstructionClass(sample.pp_rank, sample.kind, sample.chunk_index)].append(sample)
    if {c.pp_rank for c in samples} != set(range(len(gpus))):
        raise NotEnoughDataError("some rank has no timed instructions")
    return {instruction_class: _fit_class_times(members) for instruction_class, members in samples.items()}


def _fit_class_times(samples: Sequence[InstructionSample]) -> tuple[FloatArray, FloatArray]:
    """Return (clocks ascending in MHz, times in s) of one class at its measured clocks."""
    mostly: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for sample in samples:
        main = max(sample.shares, key=lambda share: share.time_s)
        mostly[main.sm_clock_mhz].append((sample.time_s, sample.count))
    knots = np.array(sorted(mostly), dtype=float)
    start = np.array(
        [np.average([t for t, _ in mostly[int(k)]], weights=[c for _, c in mostly[int(k)]]) for k in knots]
    )
    shares, weights = [], []
    for sample in samples:
        kept = [s for s in sample.shares if s.time_s >= _MIN_SHARE_RATIO * sample.time_s]
        rest_s = sample.time_s - sum(s.time_s for s in kept)
        shares.append([(s.sm_clock_mhz, s.time_s + rest_s / len(kept)) for s in kept])
        weights.append(np.sqrt(sample.count))
    clocks = np.array([clock for row in shares for clock, _ in row], dtype=float)
    spent_s = np.array([time_s for row in shares for _, time_s in row])
    row_of = np.repeat(np.arange(len(shares)), [len(row) for row in shares])
    weight = np.array(weights)

    def residuals(log_times: FloatArray) -> FloatArray:
        progress = spent_s / np.asarray(_interpolate(clocks, knots, np.exp(log_times)))
        total = np.asarray(np.bincount(row_of, weights=progress, minlength=len(shares)), dtype=np.float64)
        return (total - 1.0) * weight / _TIME_NOISE_RATIO

    fit = least_squares(residuals, np.log(start), loss="soft_l1")
    monotone_s: FloatArray = np.minimum.accumulate(np.exp(fit.x))
    return knots, monotone_s


def _interpolate(clocks_mhz: Sequence[float] | FloatArray, knots_mhz: FloatArray, times_s: FloatArray) -> FloatArray:
    clocks = np.clip(np.asarray(clocks_mhz, dtype=float), knots_mhz[0], knots_mhz[-1])
    if len(knots_mhz) == 1:
        return np.full(len(clocks), times_s[0])
    return np.asarray(np.exp(PchipInterpolator(knots_mhz, np.log(times_s))(clocks)), dtype=np.float64)


# --- power ---


@dataclass(frozen=True, slots=True)
class _EnergyRow:
    pp_rank: int
    energy_j: float
    what: tuple[int, ...]
    """Index of the coefficient of each share."""
    clocks_mhz: tuple[int, ...]
    times_s: tuple[float, ...]


def _fit_power(
    observations: Sequence[IterationObservation], gpus: Sequence[GpuView]
) -> tuple[tuple[PowerModel, ...], float]:
    coefficient_of: dict[tuple[int, InstructionKind | None, int], int] = {}
    rows: list[_EnergyRow] = []
    for observation in observations:
        for rank in observation.ranks:
            if rank.energy_j is None or not rank.energy_j > 0:
                continue
            what = tuple(
                coefficient_of.setdefault((rank.pp_rank, share.kind, share.chunk_index), len(coefficient_of))
                for share in rank.time_at
            )
            clocks = tuple(share.sm_clock_mhz for share in rank.time_at)
            rows.append(_EnergyRow(rank.pp_rank, rank.energy_j, what, clocks, tuple(s.time_s for s in rank.time_at)))
    measured_ranks = {row.pp_rank for row in rows}
    if measured_ranks != set(range(len(gpus))):
        missing = sorted(set(range(len(gpus))) - measured_ranks)
        raise NotEnoughDataError(f"no energy measured for ranks {missing}")
    models = sorted({gpu.model_name for gpu in gpus})
    model_of_rank = np.array([models.index(gpu.model_name) for gpu in gpus])
    top_of_rank = np.array([max(gpu.supported_sm_clocks_mhz) for gpu in gpus], dtype=float)

    row_of = np.repeat(np.arange(len(rows)), [len(row.times_s) for row in rows])
    rank_of = np.array([row.pp_rank for row in rows])[row_of]
    clock = np.array([c for row in rows for c in row.clocks_mhz], dtype=float)
    time_s = np.array([t for row in rows for t in row.times_s])
    what_of = np.array([w for row in rows for w in row.what])
    energy_j = np.array([row.energy_j for row in rows])
    num_models, num_coefficients = len(models), len(coefficient_of)

    def split(x: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        return x[:num_models], x[num_models : 2 * num_models], x[2 * num_models : 3 * num_models], x[3 * num_models :]

    def fitted_j(x: FloatArray) -> FloatArray:
        knee_ratio, voltage, static_w, coefficients = split(x)
        model = model_of_rank[rank_of]
        top = top_of_rank[rank_of]
        shape = _clock_shape_mhz(clock, knee_ratio[model] * top, voltage[model], top)
        power_w = static_w[model] + coefficients[what_of] * shape
        return np.asarray(np.bincount(row_of, weights=power_w * time_s, minlength=len(rows)), dtype=np.float64)

    def residuals(x: FloatArray) -> FloatArray:
        knee_ratio, voltage, static_w, _ = split(x)
        return np.concatenate(
            [
                (fitted_j(x) - energy_j) / energy_j / _ENERGY_NOISE_RATIO,
                (knee_ratio - _KNEE_RATIO_PRIOR) / _KNEE_RATIO_SIGMA,
                (voltage - _VOLTAGE_PRIOR) / _VOLTAGE_SIGMA,
                (static_w - _STATIC_POWER_PRIOR_W) / _STATIC_POWER_SIGMA_W,
            ]
        )

    mean_power_w = float(energy_j.sum() / time_s.sum())
    start = np.concatenate(
        [
            np.full(num_models, _KNEE_RATIO_PRIOR),
            np.full(num_models, _VOLTAGE_PRIOR),
            np.full(num_models, _STATIC_POWER_PRIOR_W),
            np.full(num_coefficients, mean_power_w / float(top_of_rank.max()) / 2),
        ]
    )
    lower = np.concatenate(
        [np.full(num_models, 0.5), np.full(num_models, 1.0), np.zeros(num_models + num_coefficients)]
    )
    upper = np.concatenate(
        [np.full(num_models, 0.95), np.full(num_models, 2.0), np.full(num_models + num_coefficients, np.inf)]
    )
    fit = least_squares(
        residuals, start, bounds=(lower, upper), loss="soft_l1", x_scale=np.maximum(np.abs(start), 1e-3)
    )
    knee_ratio, voltage, static_w, coefficients = split(fit.x)
    error_ratio = float(np.sqrt(np.mean(((fitted_j(fit.x) - energy_j) / energy_j) ** 2)))
    return (
        tuple(
            PowerModel(
                static_power_w=float(static_w[model_of_rank[r]]),
                knee_mhz=float(knee_ratio[model_of_rank[r]] * top_of_rank[r]),
                max_voltage_ratio=float(voltage[model_of_rank[r]]),
                max_sm_clock_mhz=int(top_of_rank[r]),
                coefficients_w_per_mhz={
                    (kind, chunk): float(coefficients[i])
                    for (rank, kind, chunk), i in coefficient_of.items()
                    if rank == r
                }
                | ({} if (r, None, 0) in coefficient_of else {(None, 0): 0.0}),
            )
            for r in range(len(gpus))
        ),
        error_ratio,
    )


def _clock_shape_mhz(
    clock_mhz: float | FloatArray,
    knee_mhz: float | FloatArray,
    max_voltage_ratio: float | FloatArray,
    top_mhz: float | FloatArray,
) -> FloatArray:
    """Return f * v(f)^2, what dynamic power is proportional to."""
    above = np.maximum(0.0, np.asarray(clock_mhz) - knee_mhz) / (np.asarray(top_mhz) - knee_mhz)
    voltage = 1.0 + (np.asarray(max_voltage_ratio) - 1.0) * above
    shape: FloatArray = np.asarray(clock_mhz) * voltage**2
    return shape
