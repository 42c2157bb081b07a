"""What iterations under any plan show of a job's curves: times of instructions and energies of GPUs, by plan."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from statistics import fmean, stdev

import numpy as np

from gpuenergyd.core.measurement.observation import CallSample, InstructionSample, IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd_policies.learning.curves import CurveModel, Evidence
from gpuenergyd_policies.learning.seen import (
    CallSeen,
    ClassAtFullSpeed,
    EnergySeen,
    TimeRow,
    TimeRows,
    TimeSeen,
    TimeSpent,
    time_evidence,
    time_rows,
)
from gpuenergyd_policies.learning.sizes import Factors

COMMON_ERROR_RATIO = 0.003
"""Of one instruction's time, and of the mean of any number of times or energies: iterations have errors in common."""
_MIN_SHARE_RATIO = 0.03
"""Shares of an instruction's time below this say nothing about their clocks: the prior supplies their progress."""
_ENERGY_NOISE_RATIO = 0.02
_MIN_FOR_NOISE = 4
"""Iterations under one plan from which their powers tell the noise of energies."""
_MOST_UNCOUNTED_CALLS = 0.02
"""Mean number of calls per instruction up to which times count as times without calls."""


def times_seen(observations: Iterable[IterationObservation]) -> list[TimeSeen]:
    """Return the times of all samples of undisturbed iterations."""
    found = []
    for observation in observations:
        calls_of: dict[InstructionClass, list[CallSample]] = defaultdict(list)
        for call in observation.call_samples:
            calls_of[call.instruction_class].append(call)
        for sample in observation.instruction_samples if observation.is_regular else ():
            if not sample.time_s > 0:
                continue
            shares = sorted((s.sm_clock_mhz, s.time_s) for s in sample.shares)
            least_s = _MIN_SHARE_RATIO * sample.time_s
            sigma = COMMON_ERROR_RATIO * math.sqrt(1 + 1 / max(1, sample.count))
            found.append(
                TimeSeen(
                    sample.instruction_class,
                    tuple(share for share in shares if share[1] >= least_s),
                    sigma,
                    _calls_in(sample, calls_of[sample.instruction_class]),
                    tuple(share for share in shares if 0 < share[1] < least_s),
                )
            )
    return found


def _calls_in(sample: InstructionSample, calls: Sequence[CallSample]) -> tuple[CallSeen, ...]:
    """Return which calls of its class set the clock during the instructions of a sample."""
    if sample.num_calls <= _MOST_UNCOUNTED_CALLS:
        return ()
    found, left = [], sample.num_calls
    for call in calls:
        longer = max(call.before, call.after, key=lambda share: share.time_s)
        if longer.sm_clock_mhz == sample.main_share.sm_clock_mhz:
            count = min(1.0, call.count / sample.count)
            after_mhz = call.after.sm_clock_mhz if call.after.time_s else call.before.sm_clock_mhz
            found.append(CallSeen(call.before.sm_clock_mhz, after_mhz, count))
            left -= count
    if left > _MOST_UNCOUNTED_CALLS:
        main_mhz = sample.main_share.sm_clock_mhz
        found.append(CallSeen(main_mhz, main_mhz, left))
    return tuple(found)


def energies_seen(
    observations: Sequence[IterationObservation], waits: Collection[InstructionClass] = ()
) -> list[EnergySeen]:
    """Return the mean energy of each rank under each plan, over its undisturbed iterations; `waits` compute nothing.

    The noise of one energy is that of iterations under the same plan, ranks together.
    """
    by_plan: dict[tuple[str | None, int], list[RankEnergy]] = defaultdict(list)
    for observation in observations:
        for rank in observation.ranks if observation.is_regular else ():
            if rank.energy_j is not None and rank.energy_j > 0 and rank.time_at:
                by_plan[observation.plan_id, rank.pp_rank].append(rank)
    noise = _noise_ratio(list(by_plan.values()))
    return [_mean_energy(members, noise, waits) for members in by_plan.values()]


def _noise_ratio(groups: Sequence[Sequence[RankEnergy]]) -> float:
    squares, num = 0.0, 0
    for members in groups:
        powers_w = [(m.energy_j or 0.0) / m.window_s for m in members]
        if len(powers_w) >= _MIN_FOR_NOISE:
            squares += (len(powers_w) - 1) * (stdev(powers_w) / fmean(powers_w)) ** 2
            num += len(powers_w) - 1
    return max(math.sqrt(squares / num), COMMON_ERROR_RATIO) if num else _ENERGY_NOISE_RATIO


def _mean_energy(members: Sequence[RankEnergy], noise_ratio: float, waits: Collection[InstructionClass]) -> EnergySeen:
    spent_s: dict[tuple[InstructionClass | None, int], float] = defaultdict(float)
    for member in members:
        for share in member.time_at:
            key = None if share.kind is None else InstructionClass(member.pp_rank, share.kind, share.chunk_index)
            spent_s[None if key in waits else key, share.sm_clock_mhz] += share.time_s / len(members)
    spent = tuple(TimeSpent(key, clock, time_s) for (key, clock), time_s in spent_s.items())
    sigma = math.hypot(noise_ratio / math.sqrt(len(members)), COMMON_ERROR_RATIO)
    return EnergySeen(members[0].pp_rank, fmean(m.energy_j or 0.0 for m in members), sigma, spent)


_MIN_RATIO, _MIN_SIGMAS = 0.1, 5.0
"""How far, in log time and in standard deviations, a time must be off all others: single clocks of measured tables are
up to 6 % off any curve."""
_FACTORS = Factors(job=2.0, stage=2.0, single_class=4.0, single_kind=2.0)
"""On the deviations assumed in that comparison: a job that differs much from the prior has no outliers for that."""
_MAX_SHARE = 0.1
"""Of the values: if more are off, the prior is wrong and not they."""


def without_outliers(
    times: Sequence[TimeSeen],
    possible: Sequence[Sequence[ClassAtFullSpeed]],
    of_time: CurveModel,
    *,
    calls_sigma_s: tuple[float, float] = (0.0, 0.0),
) -> list[TimeSeen]:
    """Return the times without those that are off all others, whichever classes of `possible` are the true ones.

    `possible` are the same classes with other clocks at full speed: times that one of them explains are kept.
    """
    rows = time_rows(possible[0], times, has_calls=any(calls_sigma_s))
    dropped = set.intersection(*(_outliers(rows, classes, of_time, calls_sigma_s) for classes in possible))
    return [own for own in times if own.row not in dropped]


def _outliers(
    rows: TimeRows, classes: Sequence[ClassAtFullSpeed], of_time: CurveModel, calls_sigma_s: tuple[float, float]
) -> set[TimeRow]:
    """Return the rows of outliers, the worst found first and left out of the next comparison."""
    seen = time_evidence(classes, rows, of_time, calls_sigma_s=calls_sigma_s, num_rounds=1)
    observed, evidence = seen.observed, seen.evidence
    kept = np.arange(len(rows.rows))
    for _ in range(math.ceil(_MAX_SHARE * len(rows.rows))):
        own = Evidence(evidence.weights[kept], evidence.values[kept], evidence.noise[np.ix_(kept, kept)])
        off, sigma = of_time.left_out(observed, own, _FACTORS)
        surprise = np.where(np.abs(off) > _MIN_RATIO, np.abs(off) / sigma, 0.0)
        if surprise.max() <= _MIN_SIGMAS:
            break
        kept = np.delete(kept, int(np.argmax(surprise)))
    return set(rows.rows) - {rows.rows[k] for k in kept.tolist()}
