"""Turns measured instruction times and GPU energies into evidence for the curve model, linear in their logarithms.

With `share_j` the time of an instruction at clock j, sum(share_j / t(j)) = 1: linear in log times near any of them. A
GPU's energy without waiting is a sum of times and powers: linear in log powers.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gpuenergyd.core.measurement.sustained_clock import SustainedClock
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd_policies.learning.curves import CurveModel, Evidence
from gpuenergyd_policies.learning.deviations import Points
from gpuenergyd_policies.learning.shape import BEND_WIDTH, FloatArray
from gpuenergyd_policies.learning.waits import WaitingPhase

_ROUNDS = 3
"""Linearizations; the second hardly changes the first."""
_MIN_BUSY_SHARE = 0.1
"""Least share of a GPU's energy that its instructions must have drawn for it to tell their power."""
_MAX_SLOWER_SHARE = 0.1
"""Share of time below full speed in iterations at full speed: clocks may still rise in the first one."""
_SEPARATE_KINDS = frozenset({InstructionKind.O, InstructionKind.C, InstructionKind.D})
"""Kinds that do other work than the forwards and backwards that prior curves are of."""


class NotEnoughDataError(Exception):
    """The observations do not determine the profile; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class ClassAtFullSpeed:
    """What the baseline shows of a class: its time, and the SM clock that its GPU really ran at."""

    key: InstructionClass
    clocks_mhz: tuple[int, ...]
    """Clocks that plans may use, the maximum first."""
    time_s: float
    full_speed_mhz: float
    sustained: SustainedClock | None = None
    """What its GPU sustains at its power limit; None for one that was not seen at it."""

    @property
    def top_mhz(self) -> float:
        """The highest clock that differs from lower ones: just above the bend where the power limit holds all work."""
        if self.sustained is None or not self.sustained.holds_all_work:
            return float(self.clocks_mhz[0])
        return min(float(self.clocks_mhz[0]), self.full_speed_mhz * math.exp(BEND_WIDTH))


@dataclass(frozen=True, slots=True)
class CallSeen:
    """A call that set the clock during an instruction: the clocks before and after it, and calls per instruction."""

    before_mhz: int
    after_mhz: int
    """The clock before if another one took effect only after the instruction."""
    count: float


@dataclass(frozen=True, slots=True)
class TimeSeen:
    """Mean time that instructions of a class spent at each requested clock, and the relative error of their sum."""

    key: InstructionClass
    shares: tuple[tuple[int, float], ...]
    """(clock in MHz, time in s), more than one if the clock changed during the instructions."""
    sigma_ratio: float
    calls: tuple[CallSeen, ...] = ()
    short_shares: tuple[tuple[int, float], ...] = ()
    """`shares` of clocks at which too little time was spent to learn anything about them."""

    @property
    def clocks_mhz(self) -> tuple[int, ...]:
        return tuple(clock for clock, _ in self.shares)

    @property
    def row(self) -> "TimeRow":
        """What it has in common with times that it is averaged with."""
        return self.key, self.clocks_mhz, _kind_of(self.calls)


class CallKind(Enum):
    """Calls during instructions: of a late clock, those that raise it make them longer, and reductions shorter."""

    NONE = 0
    SAME_CLOCK = 1
    RAISE = 2
    REDUCTION = 3


def _kind_of(calls: Sequence[CallSeen]) -> CallKind:
    if not calls:
        return CallKind.NONE
    balance = sum(call.count * np.sign(call.after_mhz - call.before_mhz) for call in calls)
    if balance == 0:
        return CallKind.SAME_CLOCK
    return CallKind.RAISE if balance > 0 else CallKind.REDUCTION


TimeRow = tuple[InstructionClass, tuple[int, ...], CallKind]
"""Class, clocks, and the way clocks were being set."""


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
    """Power of a rank that waits for a peer at the maximum clock, how it falls with the clock, and how well known."""

    power_w: float
    sigma_ratio: float
    exponent: float
    """Of the clock, which power is proportional to a power of."""
    exponent_sigma: float
    phases: tuple[WaitingPhase, ...] = ()
    """Phases of a training loop that wait, too."""


def points_of(classes: Sequence[ClassAtFullSpeed], entries: Sequence[tuple[int, float]]) -> Points:
    """Return the points of (index of the class, clock) pairs."""
    kinds = sorted({(own.key.kind, own.key.chunk_index) for own in classes})
    of_class = np.array([index for index, _ in entries], dtype=np.int64)
    stage = np.array([own.key.pp_rank for own in classes], dtype=np.int64)
    kind = np.array([kinds.index((own.key.kind, own.key.chunk_index)) for own in classes], dtype=np.int64)
    full_speed = np.array([own.full_speed_mhz for own in classes], dtype=np.float64)
    top = np.array([own.top_mhz for own in classes], dtype=np.float64)
    clocks = np.minimum([clock for _, clock in entries], top[of_class])
    separate = np.array([own.key.kind in _SEPARATE_KINDS for own in classes], dtype=np.float64)
    return Points(stage[of_class], kind[of_class], clocks, full_speed[of_class], top[of_class], separate[of_class])


@dataclass(frozen=True, slots=True)
class TimeRows:
    """Means of times, weighted by precision: one row per class, clocks and kind of calls, in order of first sight.

    Independent of the assumed full-speed clocks, so that several assumptions can be compared on the same rows.
    """

    rows: tuple[TimeRow, ...]
    points: tuple[tuple[int, float], ...]
    """(index of the class, clock in MHz) of each column of `spent`."""
    spent: FloatArray
    """Time at each point, as a share of the class's time at full speed."""
    variances: FloatArray
    """Variance of the relative error of each row."""
    short_points: tuple[tuple[int, float], ...]
    short: FloatArray
    """`points` and `spent` for clocks at which little time was spent."""
    call_points: tuple[tuple[int, float], ...]
    """(class index, clock in MHz) of each column of `calls_from` and `calls_to`."""
    calls_from: FloatArray
    """Calls per instruction that find the GPU at each point."""
    calls_to: FloatArray
    """Calls per instruction after which it is there."""


def time_rows(classes: Sequence[ClassAtFullSpeed], times: Sequence[TimeSeen], *, has_calls: bool) -> TimeRows:
    """Return the rows of times; of those at the maximum clock only with `has_calls`, and where calls were made."""
    own_index = {own.key: k for k, own in enumerate(classes)}
    members: dict[TimeRow, list[TimeSeen]] = defaultdict(list)
    for seen in times:
        if min(seen.clocks_mhz) < classes[own_index[seen.key]].clocks_mhz[0] or (has_calls and seen.calls):
            members[seen.row].append(seen)
    column = _numbered((own_index[key], clock) for key, clocks, _ in members for clock in clocks)
    column_of_short = _numbered(
        (own_index[seen.key], clock) for own in members.values() for seen in own for clock, _ in seen.short_shares
    )
    calls = ((own_index[seen.key], call) for own in members.values() for seen in own for call in seen.calls)
    of_call = _numbered((index, clock) for index, call in calls for clock in (call.before_mhz, call.after_mhz))
    spent, variances = np.zeros((len(members), len(column))), np.zeros(len(members))
    short = np.zeros((len(members), len(column_of_short)))
    calls_from, calls_to = np.zeros((len(members), len(of_call))), np.zeros((len(members), len(of_call)))
    for row, ((key, _, _), own) in enumerate(members.items()):
        index = own_index[key]
        total = sum(seen.sigma_ratio**-2 for seen in own)
        variances[row] = 1 / total
        for seen in own:
            weight = seen.sigma_ratio**-2 / total
            for clock, time_s in seen.shares:
                spent[row, column[index, clock]] += weight * time_s / classes[index].time_s
            for clock, time_s in seen.short_shares:
                short[row, column_of_short[index, clock]] += weight * time_s / classes[index].time_s
            for call in seen.calls:
                calls_from[row, of_call[index, call.before_mhz]] += weight * call.count
                calls_to[row, of_call[index, call.after_mhz]] += weight * call.count
    return TimeRows(
        tuple(members),
        tuple(column),
        spent,
        variances,
        tuple(column_of_short),
        short,
        tuple(of_call),
        calls_from,
        calls_to,
    )


def _numbered(points: Iterable[tuple[int, float]]) -> dict[tuple[int, float], int]:
    return {point: number for number, point in enumerate(dict.fromkeys(points))}


@dataclass(frozen=True, slots=True)
class TimeEvidence:
    """Rows of times as evidence on log times.

    `calls[:, 0]` is the change of each value per second that a call stops the GPU, `calls[:, 1]` per second that clocks
    take effect later than reported.
    """

    observed: Points
    evidence: Evidence
    calls: FloatArray


def time_evidence(
    classes: Sequence[ClassAtFullSpeed],
    rows: TimeRows,
    of_time: CurveModel,
    *,
    calls_sigma_s: tuple[float, float] = (0.0, 0.0),
    num_rounds: int = _ROUNDS,
) -> TimeEvidence:
    """Return rows of times as evidence; of those at the maximum clock only what calls made of them counts.

    An instruction at one clock takes t. In one whose clock changes, sum(share_j / t(j)) = 1 + n S / t(before)
    + D (1 / t(after) - 1 / t(before)), with n calls that each stop the GPU for S, and clocks that take effect D later
    than they are reported: linear in log times where the belief from the values is, and in S and D. `calls_sigma_s` are
    the standard deviations of the belief about S and D; zero where calls are known to cost nothing. Progress in short
    shares is that of the prior.
    """
    prior, spent = np.array(of_time.prior.mean), rows.spent
    times_s = np.array([classes[index].time_s for index, _ in rows.call_points])
    per_second = np.exp(-points_of(classes, rows.call_points).shape @ prior) / times_s
    calls = np.stack([rows.calls_from @ per_second, (rows.calls_to - rows.calls_from) @ per_second], axis=-1)
    observed = points_of(classes, rows.points)
    by_calls = calls * np.array(calls_sigma_s)
    noise = np.diag(rows.variances) + by_calls @ by_calls.T
    in_short = rows.short @ np.exp(-points_of(classes, rows.short_points).shape @ prior)
    is_mixed = any(len(clocks) > 1 for _, clocks, _ in rows.rows) or bool(rows.short_points)
    curve = observed.shape @ prior
    evidence = Evidence(spent, np.zeros(len(spent)), noise)
    for number in range(num_rounds if is_mixed else 1):
        progress = spent * np.exp(-curve)
        total = progress.sum(axis=1) + in_short
        weights = progress / total[:, None]
        evidence = Evidence(weights, np.log(total) + weights @ curve, noise)
        if is_mixed and number < num_rounds - 1:
            curve = of_time.mean(observed, evidence)
    return TimeEvidence(observed, evidence, calls)


def reference_powers_w(
    classes: Sequence[ClassAtFullSpeed], energies: Sequence[EnergySeen], waiting: Waiting
) -> dict[int, float]:
    """Return the mean power of each rank's instructions at full speed, to which its curves are relative."""
    full_speed_mhz = {own.key: own.full_speed_mhz for own in classes}
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for seen in energies:
        busy_s = sum(s.time_s for s in seen.spent if s.key is not None)
        waiting_s = sum(s.time_s for s in seen.spent if s.key is None)
        slower_s = sum(s.time_s for s in seen.spent if s.key is not None and s.sm_clock_mhz < full_speed_mhz[s.key])
        if busy_s > 0 and slower_s <= _MAX_SLOWER_SHARE * busy_s:
            busy_j = max(seen.energy_j - waiting.power_w * waiting_s, _MIN_BUSY_SHARE * seen.energy_j)
            sums[seen.pp_rank][0] += busy_j
            sums[seen.pp_rank][1] += busy_s
    missing = sorted({own.key.pp_rank for own in classes} - set(sums))
    if missing:
        raise NotEnoughDataError(f"ranks {missing} have no measured energy at full speed")
    return {rank: joules / seconds for rank, (joules, seconds) in sums.items()}


@dataclass(frozen=True, slots=True)
class PowerSeen:
    """Energies as evidence on log powers, and what they have to do with the power while waiting.

    `waiting[:, 0]` is the change of each value per relative change of the waiting power, `waiting[:, 1]` per change of
    its exponent.
    """

    observed: Points
    evidence: Evidence
    waiting: FloatArray


def power_evidence(
    classes: Sequence[ClassAtFullSpeed],
    energies: Sequence[EnergySeen],
    waiting: Waiting,
    reference_w: Mapping[int, float],
    of_power: CurveModel,
) -> PowerSeen:
    """Return the energies as weighted means of log powers, linearized where the belief from them is."""
    own_index = {own.key: k for k, own in enumerate(classes)}
    top_of_rank = {own.key.pp_rank: own.clocks_mhz[0] for own in classes}
    column: dict[tuple[int, float], int] = {}
    rows: list[tuple[int, int, float]] = []
    busy_j: list[float] = []
    sigma: list[float] = []
    waits: list[tuple[float, float]] = []
    for seen in energies:
        waits_j = [
            (waiting.power_w * math.exp(waiting.exponent * low) * s.time_s, low)
            for s in seen.spent
            if s.key is None
            for low in [math.log(s.sm_clock_mhz / top_of_rank[seen.pp_rank])]
        ]
        own_j = seen.energy_j - sum(joules for joules, _ in waits_j)
        if not own_j > _MIN_BUSY_SHARE * seen.energy_j:
            continue
        for share in seen.spent:
            if share.key is not None and share.time_s > 0:
                k = column.setdefault((own_index[share.key], share.sm_clock_mhz), len(column))
                rows.append((len(busy_j), k, share.time_s * reference_w[seen.pp_rank]))
        busy_j.append(own_j)
        sigma.append(seen.sigma_ratio * seen.energy_j / own_j)
        waits.append((sum(j for j, _ in waits_j) / own_j, sum(j * low for j, low in waits_j) / own_j))
    observed = points_of(classes, list(column))
    joules_at = np.zeros((len(busy_j), len(column)))
    for row, k, joules in rows:
        joules_at[row, k] += joules
    per_waiting = np.array(waits, dtype=np.float64).reshape(-1, 2)
    of_waiting = per_waiting * np.array([waiting.sigma_ratio, waiting.exponent_sigma])
    noise = np.diag(np.square(sigma)) + of_waiting @ of_waiting.T
    curve = observed.shape @ np.array(of_power.prior.mean)
    evidence = Evidence(joules_at, np.array(busy_j), noise)
    for number in range(_ROUNDS):
        expected = joules_at * np.exp(curve)
        total = expected.sum(axis=1)
        weights = expected / total[:, None]
        evidence = Evidence(weights, np.log(np.array(busy_j) / total) + weights @ curve, noise)
        if number < _ROUNDS - 1:
            curve = of_power.mean(observed, evidence)
    return PowerSeen(observed, evidence, per_waiting)
