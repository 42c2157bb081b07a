"""From a few iterations to time and energy of every kind of instruction at every clock.

Times. An instruction that ran in shares of different clocks satisfies sum(share / t(clock)) = 1. The unknowns are the
log times at the measured clocks; between them log time is interpolated monotonically over the clock (PCHIP), never by
a formula, because an error in time costs more than one in energy.

Energy. A GPU's energy over an iteration is the sum over what it did of time times power, with
    v(f) = 1 + (v_max - 1) * max(0, f - f_knee) / (f_max - f_knee)
    power(kind, f) = P_static + a_kind * v(f)^2 / t_kind(f)
    power(waiting, f) = P_static + c * f * v(f)^2
that is, an instruction switches the same transistors at every clock, at the voltage of that clock. The knee, v_max and
P_static are shared by GPUs of one model, each GPU has its own a and c; all are found at once by least squares
on relative residuals with priors on the shared three.
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
IntArray = NDArray[np.int64]

_KNEE_RATIO_PRIOR, _KNEE_RATIO_SIGMA = 0.75, 0.06
_VOLTAGE_PRIOR, _VOLTAGE_SIGMA = 1.3, 0.15
_STATIC_POWER_PRIOR_W, _STATIC_POWER_SIGMA_W = 50.0, 20.0
"""Priors over data-centre GPUs: fitted knees lie at 0.70-0.78 of the maximum clock, voltages at 1.21-1.40 of the
knee's, static power at 32-80 W (V100, A100, A40, H100 as measured or assumed in published sweeps)."""
_ENERGY_NOISE_RATIO = 0.01
_MIN_ENERGY_NOISE_RATIO = 0.001
"""The first is assumed, then replaced by what the fit leaves over: good data may speak louder than the priors."""
_TIME_NOISE_RATIO = 0.003
_MIN_SHARE_RATIO = 0.02
"""Shares smaller than this of an instruction are rounding noise of two clocks, not a measurement."""


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
    times = _fit_times(observations, gpus)
    models, error_ratio = _fit_power(observations, gpus, times)
    classes: dict[InstructionClass, InstructionProfile] = {}
    for instruction_class, (knots_mhz, knot_times_s) in times.items():
        gpu = gpus[instruction_class.pp_rank]
        model = models[instruction_class.pp_rank]
        clocks = [c for c in gpu.supported_sm_clocks_mhz if c >= knots_mhz[0]]
        options = []
        for clock, time_s in zip(clocks, _interpolate(clocks, knots_mhz, knot_times_s), strict=True):
            kind, chunk = instruction_class.kind, instruction_class.chunk_index
            options.append(ClockOption(clock, float(time_s), model.energy_j(kind, chunk, clock, float(time_s))))
        where = f"fit of {instruction_class.kind} on rank {instruction_class.pp_rank}"
        classes[instruction_class] = instruction_profile(options, where=where)
    waiting_w = [model.waiting_power_w(model.max_sm_clock_mhz) for model in models]
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
    weight = np.array(weights, dtype=np.float64) / _TIME_NOISE_RATIO

    def residuals(log_times: FloatArray) -> FloatArray:
        progress = spent_s / np.asarray(_interpolate(clocks, knots, np.exp(log_times)))
        total = np.bincount(row_of, weights=progress, minlength=len(shares))
        return np.asarray((total - 1.0) * weight, dtype=np.float64)

    fit = least_squares(residuals, np.log(start), loss="soft_l1")
    return knots, np.asarray(np.minimum.accumulate(np.exp(fit.x)), dtype=np.float64)


def _interpolate(clocks_mhz: Sequence[float] | FloatArray, knots_mhz: FloatArray, times_s: FloatArray) -> FloatArray:
    clocks = np.clip(np.asarray(clocks_mhz, dtype=float), knots_mhz[0], knots_mhz[-1])
    if len(knots_mhz) == 1:
        return np.full(len(clocks), times_s[0])
    return np.asarray(np.exp(PchipInterpolator(knots_mhz, np.log(times_s))(clocks)), dtype=np.float64)


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
    times: Mapping[InstructionClass, tuple[FloatArray, FloatArray]],
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
                amount = share.time_s * share.sm_clock_mhz
                if share.kind is not None:
                    knots, knot_times_s = times[InstructionClass(rank.pp_rank, share.kind, share.chunk_index)]
                    amount = share.time_s / float(_interpolate([share.sm_clock_mhz], knots, knot_times_s)[0])
                columns.append((len(energies), rank.pp_rank, what, share.sm_clock_mhz, amount, share.time_s))
            energies.append(rank.energy_j)
    table = np.array(columns, dtype=float).reshape(-1, 6)
    row_of, rank_of, what_of = (table[:, k].astype(np.int64) for k in range(3))
    shares = _Shares(row_of, rank_of, what_of, table[:, 3], table[:, 4], table[:, 5], np.array(energies))
    return shares, index_of


def _fit_power(
    observations: Sequence[IterationObservation],
    gpus: Sequence[GpuView],
    times: Mapping[InstructionClass, tuple[FloatArray, FloatArray]],
) -> tuple[tuple[PowerModel, ...], float]:
    shares, index_of = _shares(observations, times)
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
