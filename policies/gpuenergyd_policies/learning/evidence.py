"""What iterations under any plan show of a job's curves: times of instructions and energies of GPUs, by plan."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from statistics import fmean, stdev

from gpuenergyd.core.measurement.observation import InstructionSample, IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd_policies.learning.seen import CallSeen, EnergySeen, TimeSeen, TimeSpent

COMMON_ERROR_RATIO = 0.003
"""Of one instruction's time, and of the mean of any number of times or energies: iterations have errors in common."""
_MIN_SHARE_RATIO = 0.03
"""Shares of an instruction's time below this tell nothing of their clocks: their progress is that of the prior."""
_ENERGY_NOISE_RATIO = 0.02
_MIN_FOR_NOISE = 4
_MOST_UNCOUNTED_CALLS = 0.02
"""Mean number of calls per instruction up to which times count as times without calls."""


def times_seen(observations: Iterable[IterationObservation]) -> list[TimeSeen]:
    """Return the times of all samples of undisturbed iterations."""
    found = []
    for observation in observations:
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
                    _calls_in(sample, observation),
                    tuple(share for share in shares if 0 < share[1] < least_s),
                )
            )
    return found


def _calls_in(sample: InstructionSample, observation: IterationObservation) -> tuple[CallSeen, ...]:
    """Return the calls that set the clock during the instructions of a sample."""
    if sample.num_calls <= _MOST_UNCOUNTED_CALLS:
        return ()
    found, left = [], sample.num_calls
    for call in observation.call_samples:
        longer = max(call.before, call.after, key=lambda share: share.time_s)
        if call.instruction_class == sample.instruction_class and longer.sm_clock_mhz == sample.main_share.sm_clock_mhz:
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
            key = None
            if share.kind is not None:
                key = InstructionClass(member.pp_rank, share.kind, share.chunk_index)
                key = None if key in waits else key
            spent_s[key, share.sm_clock_mhz] += share.time_s / len(members)
    spent = tuple(TimeSpent(key, clock, time_s) for (key, clock), time_s in spent_s.items())
    sigma = math.hypot(noise_ratio / math.sqrt(len(members)), COMMON_ERROR_RATIO)
    return EnergySeen(members[0].pp_rank, fmean(m.energy_j or 0.0 for m in members), sigma, spent)
