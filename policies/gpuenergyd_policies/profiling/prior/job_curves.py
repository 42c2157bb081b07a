"""Curves of a running job: belief about the time and power of each class at each clock, and profiles drawn from it.

Evidence is what any plan shows: the times of instructions at the clocks that they ran at, and the energy of each GPU in
an iteration. No iteration is run for its own sake.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd_policies.profiling.power import NotEnoughDataError
from gpuenergyd_policies.profiling.prior.curves import POWER, TIME, CurveModel, Evidence, Points, Posterior
from gpuenergyd_policies.profiling.prior.shape import CurvePrior, FloatArray

_ROUNDS = 3
"""Linearizations of energy; the second hardly changes the first."""
_MIN_BUSY_SHARE = 0.1
"""Least share of a GPU's energy that its instructions must have drawn for it to tell their power."""


@dataclass(frozen=True, slots=True)
class ClassAtFullSpeed:
    """What the baseline shows of a class: its time, and the SM clock that its GPU really ran at."""

    key: InstructionClass
    clocks_mhz: tuple[int, ...]
    """Clocks that plans may use, the maximum first."""
    time_s: float
    full_speed_mhz: float


@dataclass(frozen=True, slots=True)
class TimeSeen:
    """Mean time that instructions of a class spent at each requested clock, and the relative error of their sum."""

    key: InstructionClass
    shares: tuple[tuple[int, float], ...]
    """(clock in MHz, time in s), more than one if the clock changed during the instructions."""
    sigma_ratio: float


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Time of a rank in instructions of a class at one requested clock; key None: waiting."""

    key: InstructionClass | None
    sm_clock_mhz: int
    time_s: float


@dataclass(frozen=True, slots=True)
class EnergySeen:
    """Energy of one rank in an iteration, or the mean of several under one plan, and its relative standard error."""

    pp_rank: int
    energy_j: float
    sigma_ratio: float
    spent: tuple[TimeSpent, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Power of a rank that waits for a peer, and how well it is known."""

    power_w: float
    sigma_ratio: float


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

    def profile(self, *, caution_sigmas: float = 0.0) -> PipelineProfile:
        """Return the mean profile, times below the maximum clock longer by some standard deviations."""
        at_max = self._is_max()
        log_time = self.time.mean + np.where(at_max, 0.0, caution_sigmas * self.time.sigma)
        return self._profile(log_time, self.power.mean, where="mean curve")

    def drawn(self, random: np.random.Generator) -> PipelineProfile:
        """Return a profile drawn from the belief."""
        drawn = [own.mean + _root(own) @ random.standard_normal(len(own.mean)) for own in self._both()]
        return self._profile(drawn[0], drawn[1], where="drawn curve")

    def drawn_times_s(self, num_draws: int, random: np.random.Generator) -> FloatArray:
        """Return times of all entries in draws, shape (draws, entries)."""
        root = _root(self.time)
        draws = self.time.mean + random.standard_normal((num_draws, len(root))) @ root.T
        times_s = np.repeat([own.time_s for own in self.classes], self._lengths())
        return np.stack([np.exp(self._physical(draw, is_time=True)) * times_s for draw in draws])

    def index_of(self) -> dict[tuple[InstructionClass, int], int]:
        """Return the entry of each class at each clock."""
        entries = [(own.key, clock) for own in self.classes for clock in own.clocks_mhz]
        return {entry: k for k, entry in enumerate(entries)}

    def _both(self) -> tuple[Posterior, Posterior]:
        return self.time, self.power

    def _lengths(self) -> list[int]:
        return [len(own.clocks_mhz) for own in self.classes]

    def _is_max(self) -> FloatArray:
        return np.concatenate([np.arange(length) == 0 for length in self._lengths()])

    def _physical(self, values: FloatArray, *, is_time: bool) -> FloatArray:
        """Return the values of every class made monotone below the bend: times rise, power falls as the clock falls.

        Time rises no faster than 1 / clock: an instruction needs at most as many clock cycles as at a higher clock.
        Above the bend neither holds: a GPU at its power cap may be faster at a clock that it need not vary.
        """
        found, begin = values.copy(), 0
        for own in self.classes:
            clocks = np.array(own.clocks_mhz, dtype=np.float64)
            part = found[begin : begin + len(clocks)]
            bend = min(len(clocks) - 1, int(np.sum(clocks > own.full_speed_mhz)))
            below = part[bend:]
            if is_time:
                part -= part[0]
                part[bend:] = np.maximum.accumulate(below)
                cycles = np.log(clocks / clocks[0])
                part[:] = np.minimum.accumulate(part + cycles) - cycles
            else:
                part[bend:] = np.minimum.accumulate(below)
            begin += len(clocks)
        return found

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
        return PipelineProfile(classes, self.waiting_w)


def fit_curves(
    classes: Sequence[ClassAtFullSpeed],
    prior: CurvePrior,
    times: Sequence[TimeSeen],
    energies: Sequence[EnergySeen],
    waiting: Waiting,
    *,
    are_pooled: bool = True,
    can_widen: bool = True,
    want_draws: bool = False,
) -> FittedCurves:
    """Return the belief about the curves of a job from its iterations so far, at least those at full speed.

    Raises:
        NotEnoughDataError: a rank has no measured energy at full speed.
    """
    own_index = {own.key: k for k, own in enumerate(classes)}
    wanted = _points(classes, [(k, clock) for k, own in enumerate(classes) for clock in own.clocks_mhz])
    of_time = CurveModel(prior.time, TIME, are_pooled, can_widen)
    time = of_time.posterior(wanted, *_time_evidence(classes, own_index, times, of_time), want_covariance=want_draws)
    reference_w = _reference_w(classes, energies, waiting)
    of_power = CurveModel(prior.power, POWER, are_pooled, can_widen)
    seen = _energy_evidence(classes, own_index, energies, waiting, reference_w, of_power)
    power = of_power.posterior(wanted, *seen, want_covariance=want_draws)
    return FittedCurves(tuple(classes), time, power, reference_w, waiting.power_w)


def _points(classes: Sequence[ClassAtFullSpeed], entries: Sequence[tuple[int, float]]) -> Points:
    kinds = sorted({(own.key.kind, own.key.chunk_index) for own in classes})
    of_class = np.array([index for index, _ in entries], dtype=np.int64)
    stage = np.array([own.key.pp_rank for own in classes], dtype=np.int64)
    kind = np.array([kinds.index((own.key.kind, own.key.chunk_index)) for own in classes], dtype=np.int64)
    full_speed = np.array([own.full_speed_mhz for own in classes], dtype=np.float64)
    top = np.array([own.clocks_mhz[0] for own in classes], dtype=np.float64)
    clocks = np.array([clock for _, clock in entries], dtype=np.float64)
    return Points(stage[of_class], kind[of_class], clocks, full_speed[of_class], top[of_class])


def _time_evidence(
    classes: Sequence[ClassAtFullSpeed],
    own_index: Mapping[InstructionClass, int],
    times: Sequence[TimeSeen],
    of_time: CurveModel,
) -> tuple[Points, Evidence]:
    """Return one value per class and set of clocks below the maximum, the mean weighted by precision.

    With `share_j` at clock j, sum(share_j / t(j)) = 1: linear in log time, where the belief from the values is.
    """
    sums: dict[tuple[int, tuple[int, ...]], list[tuple[float, list[float]]]] = defaultdict(list)
    for seen in times:
        index, clocks = own_index[seen.key], tuple(clock for clock, _ in seen.shares)
        if min(clocks) < classes[index].clocks_mhz[0]:
            sums[index, clocks].append((seen.sigma_ratio**-2, [time_s for _, time_s in seen.shares]))
    column: dict[tuple[int, float], int] = {}
    for index, clocks in sums:
        for clock in clocks:
            column.setdefault((index, clock), len(column))
    spent, variances = np.zeros((len(sums), len(column))), []
    for row, ((index, clocks), members) in enumerate(sums.items()):
        weights = np.array([weight for weight, _ in members])
        mean_s = weights @ np.array([shares for _, shares in members]) / weights.sum()
        for clock, time_s in zip(clocks, mean_s.tolist(), strict=True):
            spent[row, column[index, clock]] = time_s / classes[index].time_s
        variances.append(1 / weights.sum())
    observed = _points(classes, list(column))
    noise = np.diag(np.array(variances, dtype=np.float64).reshape(-1))
    is_mixed = any(len(clocks) > 1 for _, clocks in sums)
    curve = observed.shape @ np.array(of_time.prior.mean)
    evidence = Evidence(spent, np.zeros(len(sums)), noise)
    for number in range(_ROUNDS if is_mixed else 1):
        progress = spent * np.exp(-curve)
        total = progress.sum(axis=1)
        weights = progress / total[:, None]
        evidence = Evidence(weights, np.log(total) + weights @ curve, noise)
        if is_mixed and number < _ROUNDS - 1:
            curve = of_time.posterior(observed, observed, evidence).mean
    return observed, evidence


def _reference_w(
    classes: Sequence[ClassAtFullSpeed], energies: Sequence[EnergySeen], waiting: Waiting
) -> dict[int, float]:
    """Return the mean power of each rank's instructions at full speed."""
    top_of = {own.key: own.clocks_mhz[0] for own in classes}
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for seen in energies:
        busy_s = sum(s.time_s for s in seen.spent if s.key is not None)
        waiting_s = sum(s.time_s for s in seen.spent if s.key is None)
        if all(s.key is None or s.sm_clock_mhz >= top_of[s.key] for s in seen.spent) and busy_s > 0:
            busy_j = max(seen.energy_j - waiting.power_w * waiting_s, _MIN_BUSY_SHARE * seen.energy_j)
            sums[seen.pp_rank][0] += busy_j
            sums[seen.pp_rank][1] += busy_s
    missing = sorted({own.key.pp_rank for own in classes} - set(sums))
    if missing:
        raise NotEnoughDataError(f"ranks {missing} have no measured energy at full speed")
    return {rank: joules / seconds for rank, (joules, seconds) in sums.items()}


def _energy_evidence(
    classes: Sequence[ClassAtFullSpeed],
    own_index: Mapping[InstructionClass, int],
    energies: Sequence[EnergySeen],
    waiting: Waiting,
    reference_w: Mapping[int, float],
    of_power: CurveModel,
) -> tuple[Points, Evidence]:
    """Return the energies as weighted means of log powers, linearized where the belief from them is."""
    column: dict[tuple[int, int], int] = {}
    rows: list[tuple[int, int, float]] = []
    busy_j, sigma, waits = [], [], []
    for seen in energies:
        waiting_j = waiting.power_w * sum(s.time_s for s in seen.spent if s.key is None)
        if not seen.energy_j > waiting_j / (1 - _MIN_BUSY_SHARE):
            continue
        for share in seen.spent:
            if share.key is not None and share.time_s > 0:
                k = column.setdefault((own_index[share.key], share.sm_clock_mhz), len(column))
                rows.append((len(busy_j), k, share.time_s * reference_w[seen.pp_rank]))
        busy_j.append(seen.energy_j - waiting_j)
        sigma.append(seen.sigma_ratio * seen.energy_j / busy_j[-1])
        waits.append(waiting.sigma_ratio * waiting_j / busy_j[-1])
    observed = _points(classes, list(column))
    joules_at = np.zeros((len(busy_j), len(column)))
    for row, k, joules in rows:
        joules_at[row, k] += joules
    noise = np.diag(np.square(sigma)) + np.outer(waits, waits)
    curve = observed.shape @ np.array(of_power.prior.mean)
    evidence = Evidence(joules_at, np.array(busy_j), noise)
    for number in range(_ROUNDS):
        expected = joules_at * np.exp(curve)
        total = expected.sum(axis=1)
        weights = expected / total[:, None]
        evidence = Evidence(weights, np.log(np.array(busy_j) / total) + weights @ curve, noise)
        if number < _ROUNDS - 1:
            curve = of_power.posterior(observed, observed, evidence).mean
    return observed, evidence


def _root(belief: Posterior) -> FloatArray:
    if belief.covariance is None:
        raise ValueError("no draws: the curves were fitted without want_draws")
    jitter = 1e-9 + 1e-9 * float(np.trace(belief.covariance)) / max(1, len(belief.covariance))
    return np.asarray(np.linalg.cholesky(belief.covariance + jitter * np.eye(len(belief.covariance))), dtype=np.float64)
