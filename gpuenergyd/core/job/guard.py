"""Slowdown guard: compares a plan's iterations with the baseline, independently of the policy's prediction."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median, median_low
from types import MappingProxyType

from gpuenergyd.core.measurement.observation import InstructionSample, IterationObservation
from gpuenergyd.core.measurement.robust import MEDIAN_PER_MEAN_ERROR, robust_sigma
from gpuenergyd.core.measurement.sustained_clock import moved_clocks
from gpuenergyd.core.pipeline.graph import chunk_name
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget

_CHANGED_AT_SIGMA = 2.5
_LEAST_BEFORE = 2
"""Minimum iterations under earlier plans with which an instruction at the same clock is compared."""


class Finding(StrEnum):
    """Findings of the guard about a plan."""

    TOO_SLOW = "too slow"
    """Slower than the target by more than the budget: the plan is wrong, or the job has become slower. The job returns
    to full speed."""
    FULL_SPEED_IS_FASTER = "full speed is faster"
    """Too slow for the present target, but not for the one that the plan was made for, because full speed has become
    faster. Not a fault, but the job returns to full speed and is planned again."""
    STAGE_IS_FASTER = "stage is faster"
    """A stage is faster than when the plan began and waits for the others, which were slowed down to its former speed.
    Not a fault, but the job returns to full speed and is planned again."""
    JOB_IS_FASTER = "job is faster"
    """Much faster than predicted. Not a fault; the plan stays unless a full-speed block shows that the job changed."""


@dataclass(frozen=True, slots=True)
class GuardRules:
    """Limits of the guard; `budget_ratio` is the tolerated slowdown beyond the target."""

    budget_ratio: float = 0.01
    windows: tuple[int, ...] = (4, 8, 16)
    """Numbers of a plan's regular iterations over which medians are checked: short windows react quickly, long ones are
    precise. In the shortest window more than half of the iterations must be too slow, because clocks may happen to
    rise late in half of them; all where single iterations were as late by chance, under whatever plan."""
    gross_ratio: float = 0.05
    gross_iterations: int = 2
    """Consecutive iterations that must all exceed `gross_ratio`, unless they differ and single ones were as late."""
    certainty_sigma: float = 2.0
    """A median must exceed the budget by this many of its standard errors."""
    faster_ratio: float = 0.05
    faster_instruction_ratio: float = 0.02
    """Speed-up of one kind of instruction since the plan began, from which on the plan's slack may be gone."""
    first_iterations: tuple[int, int] = (3, 8)
    """Minimum and maximum number of a plan's first iterations with which later ones are compared."""


@dataclass(slots=True)
class GuardWindow:
    """What the guard checks: iterations from `since` on, against the target of the current plan."""

    since: int = 0
    target: PerformanceTarget | None = None
    num_faster_checks: int = 0
    """Number of full-speed blocks run because the job was faster than expected under the current plan."""
    next_faster_check_at: int = 0
    """First iteration at which the next such block may begin."""
    checked_from: int | None = None
    """First iteration of such a block, until its result is known."""
    num_faster_returns: int = 0
    """Number of returns to full speed because something was faster than expected, since the job last changed."""
    next_faster_return_at: int = 0
    """First iteration at which the next such return may happen."""
    plan_target: PerformanceTarget | None = None
    """Target at the time when the current plan began."""

    def begin_plan(self) -> None:
        """Start guarding another plan: reset the checks for a job that is faster than expected."""
        self.plan_target = self.target
        self.num_faster_checks = self.next_faster_check_at = 0
        self.checked_from = None

    def expect(self, target: PerformanceTarget | None, *, since: int) -> None:
        """Compare iterations from `since` on with another target."""
        self.target = target
        self.since = max(self.since, since)


def evaluate(
    recent: Sequence[IterationObservation],
    plan: ClockPlan,
    baseline: BaselineView,
    target: PerformanceTarget,
    rules: GuardRules,
    *,
    before: Sequence[IterationObservation] = (),
    passed: Iterable[float] = (),
    at_full_speed: Sequence[IterationObservation] = (),
) -> tuple[Finding, str] | None:
    """Return a finding about a plan with its log message, or None; `recent` are its regular iterations, newest last.

    `before` are iterations under the preceding plans for the same target, included where the plan is too slow from its
    first iteration on. `passed` is how late single iterations were by chance, `at_full_speed` are the baseline's.
    """
    target_s = target.iteration_time_s(baseline.iteration_time_s)
    times_s = [o.own_time_s for o in recent]
    all_s = [o.own_time_s for o in (*before, *recent)]
    noise_s = rules.certainty_sigma * baseline.iteration_sigma_s
    shortest, *longer = rules.windows
    is_any_late = max(times_s[-shortest:], default=0.0) > target_s * (1 + rules.budget_ratio)
    passed_s = target_s * max(passed, default=0.0) if is_any_late else 0.0
    newest_s = all_s[-rules.gross_iterations :] or [0.0]
    is_one_cause = max(newest_s) - min(newest_s) <= math.sqrt(2) * noise_s
    checks: list[tuple[Callable[[Sequence[float]], float], int, float, float]] = [
        (min, rules.gross_iterations, rules.gross_ratio, 0.0 if is_one_cause else passed_s),
        (median_low, shortest, rules.budget_ratio, passed_s),
        (min, shortest, rules.budget_ratio, 0.0),
        *((median, n, rules.budget_ratio, 0.0) for n in longer),
    ]
    for typical, num_iterations, budget_ratio, by_chance_s in checks:
        allowed_s = target_s * (1 + budget_ratio)
        least_s = max(allowed_s + noise_s / math.sqrt(num_iterations), by_chance_s)
        window_s = times_s[-num_iterations:]
        if 0 < len(window_s) < num_iterations and min(window_s) > allowed_s:
            window_s = all_s[-num_iterations:]
        if len(window_s) >= num_iterations and (measured_s := typical(window_s)) > least_s:
            line = f"plan {plan.plan_id!r} takes {measured_s:.4g} s per iteration, {allowed_s:.4g} s are allowed"
            return Finding.TOO_SLOW, line
    if len(times_s) >= shortest and plan.predicted is not None:
        measured_s, expected_s = median(times_s[-shortest:]), plan.predicted.iteration_time_s
        if measured_s < expected_s * (1 - rules.faster_ratio) - noise_s / math.sqrt(shortest):
            return Finding.JOB_IS_FASTER, f"an iteration takes {measured_s:.4g} s, {expected_s:.4g} s were expected"
    timed = [o for o in recent if o.is_timed]
    newest = [*(o for o in before if o.is_timed), *timed]
    faster = _faster_instruction(timed, newest, rules) or _above_full_speed(newest[-shortest:], at_full_speed, rules)
    if faster is None:
        return None
    num_ranks = len({sample.pp_rank for sample in newest[-1].instruction_samples})
    text = _without_only_rank(faster, newest[-1])
    return Finding.STAGE_IS_FASTER if num_ranks > 1 else Finding.JOB_IS_FASTER, text


def passed_ratios(
    kept: Sequence[IterationObservation], targets_s: Mapping[str, float], rules: GuardRules
) -> Iterator[float]:
    """Yield times, relative to their plans' targets, of older iterations after which the next one was on time."""
    shortest, longest = min(rules.windows), max(rules.windows)
    regular = [o for o in kept[:-shortest] if o.is_regular]
    known = [(o, targets_s[o.plan_id]) for o in regular if o.plan_id is not None and o.plan_id in targets_s]
    for (o, target_s), (following, _) in pairwise(known) if len(known) > longest - shortest else ():
        if following.plan_id == o.plan_id and following.own_time_s <= target_s * (1 + rules.budget_ratio):
            yield o.own_time_s / target_s


def _faster_instruction(
    recent: Sequence[IterationObservation], newest: Sequence[IterationObservation], rules: GuardRules
) -> str | None:
    """Return the log message for a kind of instruction that became faster under a plan; None if none did.

    The iteration time may be unchanged, because a faster stage waits for the stages that were slowed down to its pace.
    While a plan has too few iterations, its instructions are compared with the same ones at the same clock under the
    plans before it, which `newest` also contains.
    """
    num_last = rules.windows[0]
    at_least, at_most = rules.first_iterations
    # In the first iteration clocks are still changing.
    first = recent[1:-num_last][:at_most]
    if len(first) < at_least:
        has_plans_before = len(newest) > len(recent)
        return _faster_at_the_same_clock(newest[:-num_last], newest[-num_last:], rules) if has_plans_before else None
    then = [_mean_times_s(observation) for observation in first]
    last = [_mean_times_s(observation) for observation in recent[-num_last:]]
    for what in then[0]:
        then_s = [times_s.get(what, 0.0) for times_s in then]
        last_s = [times_s.get(what, math.inf) for times_s in last]
        time_s, slowest_s = median(then_s), max(last_s)
        is_faster = slowest_s < time_s * (1 - rules.faster_instruction_ratio) and not _may_be_chance(then_s, last_s)
        if is_faster and _is_faster_at_some_clock(what, first, recent, rules):
            return f"{what} takes {slowest_s / time_s:.3f} times as long as when the plan began"
    return None


def _faster_at_the_same_clock(
    first: Sequence[IterationObservation], last: Sequence[IterationObservation], rules: GuardRules
) -> str | None:
    """Return the log message for a kind of instruction that became faster at a clock; None if none did."""
    num_last = rules.windows[0]
    then, now = _all_times_at_clocks_s(first), _all_times_at_clocks_s(last)
    for what, mhz in then.keys() & now.keys():
        then_s, now_s = then[what, mhz], now[what, mhz]
        if len(then_s) < _LEAST_BEFORE or len(now_s) < num_last:
            continue
        ratio = max(now_s) / median(then_s)
        if ratio < 1 - rules.faster_instruction_ratio and not _may_be_chance(then_s, now_s):
            return f"{what} takes {ratio:.3f} times as long as when the plan began"
    return None


def _above_full_speed(
    last: Sequence[IterationObservation], at_full_speed: Sequence[IterationObservation], rules: GuardRules
) -> str | None:
    """Return the log message for a kind of instruction that runs above its full-speed clock; None if none does.

    Such a clock means that whatever limited the GPU's clock at full speed, such as heat, has gone.
    """
    if len(last) < rules.windows[0]:
        return None
    full_speed_mhz = _highest_clocks_mhz(at_full_speed)
    clocks_mhz = [_highest_clocks_mhz([observation]) for observation in last]
    for what, top_mhz in full_speed_mhz.items():
        least_mhz = min(ratios.get(what, 0) for ratios in clocks_mhz)
        if least_mhz > (1 + rules.faster_instruction_ratio) * top_mhz:
            return f"{what} runs at {least_mhz} MHz, above the {top_mhz} MHz of full speed"
    return None


def _highest_clocks_mhz(observations: Sequence[IterationObservation]) -> dict[str, int]:
    """Return the highest clock at which each kind of instruction ran from start to end."""
    by_clock = sorted(_all_times_at_clocks_s(observations), key=lambda at: at[1])
    return dict(by_clock)  # of the entries of one kind, the last one stays


def _all_times_at_clocks_s(observations: Sequence[IterationObservation]) -> dict[tuple[str, int], list[float]]:
    """Return the times of each kind of instruction, by the clock at which it ran from start to end."""
    times_s: dict[tuple[str, int], list[float]] = defaultdict(list)
    for sample in (sample for observation in observations for sample in observation.instruction_samples):
        if len(sample.shares) == 1 and not sample.kind.is_wait:
            times_s[_name(sample), sample.shares[0].sm_clock_mhz].append(sample.time_s)
    return times_s


def _is_faster_at_some_clock(
    what: str, first: Sequence[IterationObservation], recent: Sequence[IterationObservation], rules: GuardRules
) -> bool:
    """Return whether an instruction became faster at an unchanged clock, not only because a clock change came earlier.

    If no instruction ran at one clock from start to end, clock cycles are compared: a higher clock never needs fewer
    cycles.
    """
    newest = recent[-rules.windows[0] :]
    then, last = _times_at_clocks_s(what, first), _times_at_clocks_s(what, newest)
    ratios = [last[mhz] / then[mhz] for mhz in then.keys() & last.keys()]
    return min(ratios or [_mean_cycles(what, newest) / _mean_cycles(what, first)]) < 1 - rules.faster_instruction_ratio


def _mean_cycles(what: str, observations: Sequence[IterationObservation]) -> float:
    """Return the mean clock cycles of a kind of instruction, in millions."""
    samples = [sample for o in observations for sample in o.instruction_samples if _name(sample) == what]
    cycles = sum(sample.count * share.time_s * share.sm_clock_mhz for sample in samples for share in sample.shares)
    return cycles / max(1, sum(sample.count for sample in samples))


def _times_at_clocks_s(what: str, observations: Sequence[IterationObservation]) -> dict[int, float]:
    """Return the median time of a kind of instruction, by the clock at which it ran from start to end."""
    times_s = _all_times_at_clocks_s(observations)
    return {mhz: median(values) for (name, mhz), values in times_s.items() if name == what}


def what_changed(
    before: Sequence[IterationObservation], now: Sequence[IterationObservation], *, at_least_ratio: float
) -> str | None:
    """Return the log message for the largest change between two sets of full-speed iterations; None without a change.

    Compares the whole iteration and each kind of instruction on each rank; only significant changes are reported that a
    power limit whose clock has moved does not explain.
    """
    moved = moved_clocks(before, now)
    then_s, now_s, at_same_clock_s = _times_s(before), _times_s(now), _times_s(now, moved.ratios)
    changed = {}
    for what, times_s in then_s.items():
        if what in now_s:
            ratio, of_cycles = (median(newer[what]) / median(times_s) for newer in (now_s, at_same_clock_s))
            is_large = abs(ratio - 1) > at_least_ratio and abs(of_cycles - 1) > at_least_ratio + moved.error_ratio
            if is_large and not _may_be_chance(times_s, now_s[what]):
                changed[what] = ratio
    if not changed:
        return None
    largest = max(changed, key=lambda what: abs(changed[what] - 1))
    return f"{_without_only_rank(largest, now[-1])} takes {changed[largest]:.3f} times as long as before"


def _times_s(
    observations: Sequence[IterationObservation], moved: Mapping[int, float] = MappingProxyType({})
) -> dict[str, list[float]]:
    """Return the times of each kind of instruction, and of iterations, as they were before clocks `moved`, by rank."""
    times_s: dict[str, list[float]] = defaultdict(list)
    for observation in observations:
        of_all = fmean(moved.values()) if moved and len(moved) == len(observation.ranks) else 1.0
        times_s["an iteration"].append(of_all * observation.own_time_s)
        for sample in observation.instruction_samples:
            if len(sample.shares) == 1 and not sample.kind.is_wait:
                times_s[_name(sample)].append(moved.get(sample.pp_rank, 1.0) * sample.time_s)
    return times_s


def _may_be_chance(before_s: Sequence[float], now_s: Sequence[float]) -> bool:
    """Return whether the medians of two sets of times may differ by chance.

    Few values underestimate their own scatter, so the larger scatter of the two sets is used.
    """
    scatter = max(_scatter_ratio(before_s), _scatter_ratio(now_s))
    sigma = MEDIAN_PER_MEAN_ERROR * scatter * math.sqrt(1 / len(before_s) + 1 / len(now_s))
    return abs(median(now_s) / median(before_s) - 1) <= _CHANGED_AT_SIGMA * sigma


def _scatter_ratio(values: Sequence[float]) -> float:
    """Return the robust standard deviation of values, relative to their median."""
    middle = median(values)
    return robust_sigma(abs(value - middle) for value in values) / middle


def _mean_times_s(observation: IterationObservation) -> dict[str, float]:
    """Return the mean time of each kind of instruction in one iteration, over all its clocks, without waits."""
    totals: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for sample in (sample for sample in observation.instruction_samples if not sample.kind.is_wait):
        time_s, count = totals[_name(sample)]
        totals[_name(sample)] = (time_s + sample.count * sample.time_s, count + sample.count)
    return {what: time_s / count for what, (time_s, count) in totals.items() if count}


def _name(sample: InstructionSample) -> str:
    name = chunk_name(sample.kind, sample.chunk_index)
    return f"{sample.kind} of rank {sample.pp_rank}{name and ' chunk ' + name}"


def _without_only_rank(text: str, observation: IterationObservation) -> str:
    """Leave out the rank where a job has one: a replica's place in its pipeline is not its rank in the training."""
    has_one = len({sample.pp_rank for sample in observation.instruction_samples}) == 1
    return text.replace(" of rank 0", "") if has_one else text
