"""The power model: power of every kind of instruction, fitted to the energy of whole iterations, with uncertainties.

A GPU's energy in an iteration is the sum of time times power over its instructions and waits, with
    v(f) = 1 + (v_max - 1) * max(0, f - f_knee) / (f_max - f_knee)
    power(kind, f) = P_static + a_kind * v(f)^2 / t_kind(f)
    power(waiting, f) = P_static + c * f * v(f)^2
where phases of a training loop that wait (communication, data) have a c of their own;
that is, an instruction switches the same transistors at every clock, at the voltage of that clock; under a power cap,
at the voltage of the capped clock. GPUs of one model share the knee, v_max and P_static; each GPU has its own a and c.
All are estimated together: maximum a posteriori, by least squares on relative residuals with priors on the shared three
parameters, and on waiting power where it is published. The curvature at the optimum gives their covariance. An
iteration whose energy is far from the fit of the others is excluded as disturbed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.sparse import csr_matrix, diags_array

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.robust import robust_sigma
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd_policies.profiling.times import TimeCurve

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_KNEE_RATIO_PRIOR, _KNEE_RATIO_SIGMA = 0.75, 0.06
_VOLTAGE_PRIOR, _VOLTAGE_SIGMA = 1.3, 0.15
_STATIC_POWER_PRIOR_W, _STATIC_POWER_SIGMA_W = 50.0, 20.0
"""Priors for data-centre GPUs: fitted knees are at 0.70-0.78 of the maximum clock, maximum voltages at 1.21-1.40 of
the voltage at the knee, static power is 32-80 W (V100, A100, A40, H100, from published sweeps)."""
_BLOCKING_SIGMA_RATIO = 0.2
_ENERGY_NOISE_RATIO = 0.01
_MIN_ENERGY_NOISE_RATIO = 0.001
"""Assumed noise, then replaced by the residual of the fit, so that precise data outweigh the priors."""
_DISTURBED_SIGMAS = 5.0
_MIN_DISTURBED_RATIO = 0.04
_MAX_DISTURBED_SHARE = 0.25
"""Above this share the model does not fit, and no iteration is excluded."""
_ROUNDS = 3
_LARGE = 60
"""Parameters above which least squares are solved by iteration on sparse derivatives: an exact solution of its steps
takes tens of seconds for 64 ranks."""


class NotEnoughDataError(Exception):
    """The observations do not determine the profile; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Power of one GPU; `dynamic_j[kind, chunk, part]` is the dynamic energy of one instruction below the knee.

    Of a phase that waits, it is the dynamic energy in J per MHz and s.

    The part is that of its time curve, between steps: the work differs on both sides of a step.
    """

    static_power_w: float
    knee_mhz: float
    max_voltage_ratio: float
    max_sm_clock_mhz: int
    dynamic_j: Mapping[tuple[InstructionKind, int, int], float]
    waiting_w_per_mhz: float

    def energy_j(self, work: tuple[InstructionKind, int, int], sm_clock_mhz: float, time_s: float) -> float:
        """Return the energy of one instruction (kind, chunk, part) that takes `time_s` at a clock."""
        amount = time_s * sm_clock_mhz if work[0].is_wait else 1.0
        return self.static_power_w * time_s + self.dynamic_j[work] * amount * self._voltage_squared(sm_clock_mhz)

    def energies_j(
        self, works: Sequence[tuple[InstructionKind, int, int]], sm_clocks_mhz: FloatArray, times_s: FloatArray
    ) -> FloatArray:
        """Return the energies of instructions (kind, chunk, part) that take these times at these clocks."""
        voltages = _voltage(sm_clocks_mhz, self.knee_mhz, self.max_voltage_ratio, self.max_sm_clock_mhz)
        dynamic_j = np.array([self.dynamic_j[work] for work in works], dtype=np.float64)
        dynamic_j = dynamic_j * np.where([work[0].is_wait for work in works], sm_clocks_mhz * times_s, 1.0)
        return np.asarray(self.static_power_w * times_s + dynamic_j * voltages**2, dtype=np.float64)

    def waiting_power_w(self, sm_clock_mhz: float) -> float:
        """Return the power while waiting for a peer at a clock."""
        return self.static_power_w + self.waiting_w_per_mhz * sm_clock_mhz * self._voltage_squared(sm_clock_mhz)

    def _voltage_squared(self, sm_clock_mhz: float) -> float:
        return float(_voltage(sm_clock_mhz, self.knee_mhz, self.max_voltage_ratio, self.max_sm_clock_mhz) ** 2)


WorkKey = tuple[int, InstructionKind | None, int, int]
"""Key of a coefficient: rank, kind (None: waiting), chunk, and part of the time curve."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of time of all GPU iterations, one row per share; `row_of` is the index of its GPU iteration."""

    row_of: IntArray
    rank_of: IntArray
    work_of: IntArray
    clock_mhz: FloatArray
    locked_mhz: FloatArray
    amount: FloatArray
    """Instructions (time over time per instruction), or MHz s of waiting; multiplied by a coefficient, joules."""
    time_s: FloatArray
    energy_j: FloatArray
    """Measured energy, one per GPU iteration."""
    index_of: Mapping[WorkKey, int]

    def without(self, disturbed: BoolArray) -> "Shares":
        """Return the shares of all GPU iterations but the disturbed ones."""
        kept = ~disturbed[self.row_of]
        number_of = np.cumsum(~disturbed) - 1
        return Shares(
            number_of[self.row_of[kept]],
            self.rank_of[kept],
            self.work_of[kept],
            self.clock_mhz[kept],
            self.locked_mhz[kept],
            self.amount[kept],
            self.time_s[kept],
            self.energy_j[~disturbed],
            self.index_of,
        )


def shares_of(observations: Sequence[IterationObservation], curves: Mapping[InstructionClass, TimeCurve]) -> Shares:
    """Return the shares of all GPU iterations with a measured energy and known instructions."""
    index_of: dict[WorkKey, int] = {}
    columns: list[tuple[float, ...]] = []
    energies: list[float] = []
    time_s_at: dict[tuple[InstructionClass, int], float] = {}
    for observation in observations:
        for rank in observation.ranks:
            if rank.energy_j is None or not rank.energy_j > 0 or not rank.time_at:
                continue
            for share in rank.time_at:
                clock_mhz, amount, part = float(share.sm_clock_mhz), share.time_s * share.sm_clock_mhz, 0
                if share.kind is not None:
                    key = InstructionClass(rank.pp_rank, share.kind, share.chunk_index)
                    clock_mhz, part = (
                        curves[key].effective_mhz(share.sm_clock_mhz),
                        curves[key].part_index(share.sm_clock_mhz),
                    )
                    if (key, share.sm_clock_mhz) not in time_s_at:
                        time_s_at[key, share.sm_clock_mhz] = float(curves[key].times_s([share.sm_clock_mhz])[0])
                    if not share.kind.is_wait:
                        amount = share.time_s / time_s_at[key, share.sm_clock_mhz]
                work = index_of.setdefault((rank.pp_rank, share.kind, share.chunk_index, part), len(index_of))
                row = (len(energies), rank.pp_rank, work, clock_mhz, share.sm_clock_mhz, amount, share.time_s)
                columns.append(row)
            energies.append(rank.energy_j)
    table = np.array(columns, dtype=float).reshape(-1, 7)
    row_of, rank_of, work_of = (table[:, k].astype(np.int64) for k in range(3))
    clocks_mhz, locked_mhz, amounts, times_s = (table[:, k] for k in range(3, 7))
    joules = np.array(energies)
    return Shares(row_of, rank_of, work_of, clocks_mhz, locked_mhz, amounts, times_s, joules, index_of)


@dataclass(frozen=True)
class PowerFit:
    """The most probable parameters, their covariance, and the residuals.

    `parameters` holds knee ratios, voltages and static powers per GPU model, then a coefficient per `Shares.work_of`.
    """

    parameters: FloatArray
    covariance: FloatArray
    shares: Shares
    residual_ratios: FloatArray
    """(measured - fitted) / fitted, one per GPU iteration that was not excluded."""
    num_disturbed: int
    _model_of_rank: tuple[int, ...]
    _top_of_rank: tuple[float, ...]

    @property
    def energy_error_ratio(self) -> float:
        """Root mean square of the residuals."""
        return float(np.sqrt(np.mean(self.residual_ratios**2)))

    def models(self, parameters: FloatArray | None = None) -> tuple[PowerModel, ...]:
        """Return the power model of each rank, for the fitted or for other parameters."""
        x = self.parameters if parameters is None else parameters
        n = 1 + max(self._model_of_rank)
        coefficients, index_of = x[3 * n :], self.shares.index_of
        return tuple(
            PowerModel(
                static_power_w=float(x[2 * n + model]),
                knee_mhz=float(x[model] * top),
                max_voltage_ratio=float(x[n + model]),
                max_sm_clock_mhz=int(top),
                dynamic_j={
                    (kind, chunk, part): float(coefficients[i])
                    for (rank, kind, chunk, part), i in index_of.items()
                    if rank == r and kind is not None
                },
                waiting_w_per_mhz=float(coefficients[index_of[r, None, 0, 0]]) if (r, None, 0, 0) in index_of else 0.0,
            )
            for r, (model, top) in enumerate(zip(self._model_of_rank, self._top_of_rank, strict=True))
        )

    @cached_property
    def _spread(self) -> FloatArray:
        """A square root of the covariance: times standard normal numbers, it gives deviations of the parameters."""
        # Noise can make the smallest eigenvalues slightly negative; they carry no variance.
        variances, axes = np.linalg.eigh(self.covariance)
        return np.asarray(axes * np.sqrt(np.maximum(variances, 0.0)), dtype=np.float64)

    def drawn_models(self, random: np.random.Generator) -> tuple[PowerModel, ...]:
        """Return power models drawn from the posterior distribution."""
        n = 1 + max(self._model_of_rank)
        x = self.parameters + self._spread @ random.standard_normal(len(self.parameters))
        lower, upper = _bounds(n, len(self.parameters) - 3 * n)
        return self.models(np.clip(x, lower, upper))


def fit_power(shares: Shares, gpus: Sequence[GpuView]) -> PowerFit:
    """Return the power model fitted to all GPUs, or raise NotEnoughDataError if a rank has no measured energy."""
    missing = sorted(set(range(len(gpus))) - set(shares.rank_of.tolist()))
    if missing:
        raise NotEnoughDataError(f"ranks {missing} have no measured energy")
    whole = _Fit(shares, gpus)
    x, noise_ratio = whole.solve(whole.start, _ENERGY_NOISE_RATIO), _ENERGY_NOISE_RATIO
    fit, disturbed = whole, np.zeros(len(shares.energy_j), dtype=np.bool_)
    for _ in range(_ROUNDS - 1):
        misfit = whole.misfit(x)
        spread = robust_sigma(np.abs(misfit - np.median(misfit)).tolist())
        disturbed = np.abs(misfit) > max(_DISTURBED_SIGMAS * spread, _MIN_DISTURBED_RATIO)
        if disturbed.mean() > _MAX_DISTURBED_SHARE or _excludes_a_rank(shares, disturbed):
            disturbed[:] = False
        fit = _Fit(shares.without(disturbed), gpus) if disturbed.any() else whole
        error_ratio = float(np.sqrt(np.mean(fit.misfit(x) ** 2)))
        noise_ratio = min(max(error_ratio, _MIN_ENERGY_NOISE_RATIO), max(_ENERGY_NOISE_RATIO, error_ratio))
        x = fit.solve(x, noise_ratio)
    fitted_j = fit.fitted_j(x)
    return PowerFit(
        parameters=x,
        covariance=fit.covariance(x, noise_ratio),
        shares=fit.shares,
        residual_ratios=(fit.shares.energy_j - fitted_j) / fitted_j,
        num_disturbed=int(disturbed.sum()),
        _model_of_rank=tuple(int(m) for m in fit.model_of_rank),
        _top_of_rank=tuple(float(t) for t in fit.top_of_rank),
    )


def _excludes_a_rank(shares: Shares, disturbed: BoolArray) -> bool:
    rank_of_row = np.zeros(len(disturbed), dtype=np.int64)
    rank_of_row[shares.row_of] = shares.rank_of
    return set(rank_of_row[~disturbed].tolist()) != set(rank_of_row.tolist())


class _Fit:
    """The least-squares problem of one set of GPU iterations."""

    def __init__(self, shares: Shares, gpus: Sequence[GpuView]) -> None:
        # A stage of several tensor-parallel GPUs has the sum of their powers: a model of its own.
        models = sorted({(gpu.model_name, gpu.num_gpus) for gpu in gpus})
        num_gpus = np.array([num for _, num in models], dtype=float)
        self.shares = shares
        self.model_of_rank = np.array([models.index((gpu.model_name, gpu.num_gpus)) for gpu in gpus])
        self.top_of_rank = np.array([max(gpu.supported_sm_clocks_mhz) for gpu in gpus], dtype=float)
        self._n = n = len(models)
        self._model, self._top = self.model_of_rank[shares.rank_of], self.top_of_rank[shares.rank_of]
        self._waiting = [
            (rank, index, blocking_power_w)
            for (rank, kind, *_), index in shares.index_of.items()
            if (kind is None or kind.is_wait) and (blocking_power_w := gpus[rank].blocking_power_w) is not None
        ]
        prior = np.repeat([_KNEE_RATIO_PRIOR, _VOLTAGE_PRIOR, _STATIC_POWER_PRIOR_W], n)
        self._prior = np.asarray(prior, dtype=np.float64)
        self._sigma = np.repeat([_KNEE_RATIO_SIGMA, _VOLTAGE_SIGMA, _STATIC_POWER_SIGMA_W], n)
        self._prior[2 * n :] *= num_gpus
        self._sigma[2 * n :] *= num_gpus
        # Initially, each coefficient alone would explain half of the mean power.
        num_works = len(shares.index_of)
        mean_power_w = float(shares.energy_j.sum() / shares.time_s.sum())
        times_s = np.bincount(shares.work_of, weights=shares.time_s, minlength=num_works)
        amounts = np.bincount(shares.work_of, weights=shares.amount, minlength=num_works)
        pace = np.divide(times_s, amounts, out=np.zeros(num_works), where=amounts > 0)
        self.start = np.concatenate([self._prior, 0.5 * mean_power_w * pace])
        self._bounds = _bounds(n, num_works)

    def fitted_j(self, x: FloatArray) -> FloatArray:
        """Return the energy of every GPU iteration."""
        shares, n = self.shares, self._n
        knee_ratio, voltage, static_w, coefficients = x[:n], x[n : 2 * n], x[2 * n : 3 * n], x[3 * n :]
        knee_mhz = knee_ratio[self._model] * self._top
        squared = _voltage(shares.clock_mhz, knee_mhz, voltage[self._model], self._top) ** 2
        joules = static_w[self._model] * shares.time_s + coefficients[shares.work_of] * shares.amount * squared
        return np.asarray(np.bincount(shares.row_of, weights=joules, minlength=len(shares.energy_j)), dtype=np.float64)

    def misfit(self, x: FloatArray) -> FloatArray:
        """Return (fitted - measured) / measured of every GPU iteration."""
        return (self.fitted_j(x) - self.shares.energy_j) / self.shares.energy_j

    def solve(self, start: FloatArray, noise_ratio: float) -> FloatArray:
        """Return the most probable parameters."""
        scale = np.maximum(self.start, 1e-6)
        is_large = len(start) > _LARGE

        def jacobian(x: FloatArray) -> csr_matrix | FloatArray:
            found = self._jacobian(x, noise_ratio)
            return found if is_large else np.asarray(found.toarray(), dtype=np.float64)

        fit = least_squares(
            self._residuals(noise_ratio),
            start,
            jac=jacobian,  # pyright: ignore[reportArgumentType]
            bounds=self._bounds,
            loss="soft_l1",
            x_scale=scale,
            tr_solver="lsmr" if is_large else "exact",
        )
        return np.asarray(fit.x, dtype=np.float64)

    def covariance(self, x: FloatArray, noise_ratio: float) -> FloatArray:
        """Return the covariance of the parameters, from the curvature at their most probable values."""
        scale = np.maximum(self.start, 1e-6)
        jacobian = csr_matrix(self._jacobian(x, noise_ratio) @ diags_array(scale))
        curvature = csr_matrix(jacobian.T @ jacobian).toarray()
        return np.asarray(np.linalg.pinv(curvature) * np.outer(scale, scale), dtype=np.float64)

    def _jacobian(self, x: FloatArray, noise_ratio: float) -> csr_matrix:
        """Return the derivatives of the residuals by the parameters; each coefficient concerns one rank's rows."""
        shares, n, num_rows = self.shares, self._n, len(self.shares.energy_j)
        knee_ratio, voltage, coefficients = x[:n][self._model], x[n : 2 * n][self._model], x[3 * n :]
        knee_mhz = knee_ratio * self._top
        ratio = 1.0 / (self.shares.energy_j * noise_ratio)
        volts = _voltage(shares.clock_mhz, knee_mhz, voltage, self._top)
        is_above = shares.clock_mhz > knee_mhz
        above = np.where(is_above, (shares.clock_mhz - knee_mhz) / (self._top - knee_mhz), 0.0)
        # d above / d knee_mhz = (clock - top) / (top - knee)^2 above the knee.
        above_by_knee = (
            np.where(is_above, (shares.clock_mhz - self._top) / (self._top - knee_mhz) ** 2, 0.0) * self._top
        )
        by_voltage = coefficients[shares.work_of] * shares.amount * 2 * volts
        entries = (
            (self._model, by_voltage * (voltage - 1.0) * above_by_knee),
            (n + self._model, by_voltage * above),
            (2 * n + self._model, shares.time_s),
            (3 * n + shares.work_of, shares.amount * volts**2),
        )
        rows = [shares.row_of] * len(entries)
        columns = [column for column, _ in entries]
        values = [value * ratio[shares.row_of] for _, value in entries]
        rows.append(num_rows + np.arange(3 * n))
        columns.append(np.arange(3 * n))
        values.append(1.0 / self._sigma)
        for number, (rank, index, published_w) in enumerate(self._waiting):
            model, top = self.model_of_rank[rank], self.top_of_rank[rank]
            of_published = 1.0 / (published_w * _BLOCKING_SIGMA_RATIO)
            coefficient, voltage_ratio = x[3 * n + index], x[n + model]
            rows.append(np.full(3, num_rows + 3 * n + number))
            columns.append(np.array([n + model, 2 * n + model, 3 * n + index]))
            values.append(
                of_published
                * np.array([2 * coefficient * top * voltage_ratio, 1.0, top * voltage_ratio**2], dtype=np.float64)
            )
        shape = (num_rows + 3 * n + len(self._waiting), len(x))
        return csr_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=shape)

    def _residuals(self, noise_ratio: float) -> Callable[[FloatArray], FloatArray]:
        def residuals(x: FloatArray) -> FloatArray:
            shared = (x[: 3 * self._n] - self._prior) / self._sigma
            return np.concatenate([self.misfit(x) / noise_ratio, shared, self._waiting_misfit(x)])

        return residuals

    def _waiting_misfit(self, x: FloatArray) -> FloatArray:
        n, off = self._n, []
        for rank, index, published_w in self._waiting:
            model, top = self.model_of_rank[rank], self.top_of_rank[rank]
            waiting_w = x[2 * n + model] + x[3 * n + index] * top * x[n + model] ** 2
            off.append((waiting_w / published_w - 1) / _BLOCKING_SIGMA_RATIO)
        return np.array(off, dtype=np.float64)


def _bounds(num_models: int, num_works: int) -> tuple[FloatArray, FloatArray]:
    lower = np.concatenate([np.repeat([0.5, 1.0, 0.0], num_models), np.zeros(num_works)])
    upper = np.concatenate([np.repeat([0.95, 2.0, np.inf], num_models), np.full(num_works, np.inf)])
    return lower, upper


def _voltage(
    clock_mhz: float | FloatArray,
    knee_mhz: float | FloatArray,
    max_voltage_ratio: float | FloatArray,
    top_mhz: float | FloatArray,
) -> FloatArray:
    """Return the voltage relative to that below the knee."""
    above = np.maximum(0.0, np.asarray(clock_mhz) - knee_mhz) / (np.asarray(top_mhz) - knee_mhz)
    return np.asarray(1.0 + (np.asarray(max_voltage_ratio) - 1.0) * above, dtype=np.float64)
