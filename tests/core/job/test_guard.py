"""When the guard stops a plan: how slow, over how many iterations, how sure, and when the job has become faster."""

from collections.abc import Sequence

import pytest

from gpuenergyd.core.job.guard import Finding, GuardRules, evaluate, passed_ratios, what_changed
from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionKind, combined_chunk_index
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget

RULES = GuardRules()
PLAN = ClockPlan("p", PlanPurpose.TUNED)
F, B = InstructionKind.F, InstructionKind.B


def sample(time_s: float, kind: InstructionKind = F, rank: int = 0, **given: int) -> InstructionSample:
    shares = (ClockShare(given.get("clock", 1200), time_s),)
    return InstructionSample(rank, kind, shares, given.get("count", 4), given.get("chunk", 0))


def iteration(index: int, time_s: float, *samples: InstructionSample, waited_s: float = 0.0) -> IterationObservation:
    return IterationObservation(index, "p", time_s, samples, (), waited_s=waited_s)


def iterations(times_s: Sequence[float], *samples: InstructionSample) -> list[IterationObservation]:
    return [iteration(index, time_s, *samples) for index, time_s in enumerate(times_s)]


def found_in(recent: Sequence[IterationObservation]) -> tuple[Finding, str] | None:
    return evaluate(recent, PLAN, BaselineView(1.0, None, 10), PerformanceTarget(), RULES)


def finding(
    times_s: Sequence[float],
    *,
    sigma_s: float = 0.0,
    plan: ClockPlan = PLAN,
    slowdown: float = 0.0,
    passed: Sequence[float] = (),
) -> Finding | None:
    baseline = BaselineView(1.0, None, 10, sigma_s)
    found = evaluate(iterations(times_s), plan, baseline, PerformanceTarget(slowdown), RULES, passed=passed)
    return None if found is None else found[0]


@pytest.mark.parametrize(
    ("times_s", "stopped"),
    [
        ([], False),
        ([1.2], False),  # once is chance
        ([1.2, 1.06], True),  # twice by more than 5 % is not
        ([1.2, 1.05], False),
        ([1.06, 1.06, 1.0], False),  # and only the last two count
        ([1.02] * 3, False),
        ([1.02] * 4, True),  # 1 % over four iterations
        ([1.01] * 16, False),  # the budget itself is allowed
        ([1.0] * 8 + [1.02] * 4, True),
        ([1.0] * 2 + [1.02] * 2, False),
        ([1.0] * 6 + [1.04] * 2, False),  # two of four: clocks that rose late by chance
        ([1.0] * 6 + [1.04, 1.0, 1.04, 1.04], True),
        ([1.0, 1.04] * 4, True),  # every other one, over eight
    ],
)
def test_a_plan_is_stopped_for_a_little_over_many_or_much_over_two(times_s: list[float], *, stopped: bool) -> None:
    assert (finding(times_s) is Finding.TOO_SLOW) is stopped


def test_the_allowance_for_noise_shrinks_with_the_number_of_iterations() -> None:
    """Two standard errors of a median over n iterations: 0.02 at n = 4, 0.01 at n = 16 for a spread of 0.02."""
    assert finding([1.029] * 4, sigma_s=0.02) is None
    assert finding([1.031] * 4, sigma_s=0.02) is Finding.TOO_SLOW
    assert finding([1.021] * 15, sigma_s=0.02) is None
    assert finding([1.021] * 16, sigma_s=0.02) is Finding.TOO_SLOW


def test_the_guard_compares_with_the_target() -> None:
    assert finding([1.1] * 16, slowdown=0.1) is None
    assert finding([1.12] * 16, slowdown=0.1) is Finding.TOO_SLOW


def test_a_wait_for_another_replica_is_not_slowness_of_the_plan() -> None:
    recent = [iteration(k, 1.3, waited_s=0.3) for k in range(8)]

    assert found_in(recent) is None


def test_a_finding_names_the_plan_its_time_and_the_allowed_time() -> None:
    assert found_in(iterations([1.5] * 4)) == (
        Finding.TOO_SLOW,
        "plan 'p' takes 1.5 s per iteration, 1.05 s are allowed",
    )


def test_a_job_much_faster_than_predicted_has_changed() -> None:
    predicted = ClockPlan("p", PlanPurpose.TUNED, predicted=PlanPrediction(1.0, 100.0))

    assert finding([0.94] * 4, plan=predicted) is Finding.JOB_IS_FASTER
    assert finding([0.96] * 4, plan=predicted) is None
    assert finding([0.94] * 3, plan=predicted) is None
    assert finding([0.94] * 4) is None  # nothing was expected
    assert finding([0.5] * 8 + [1.0] * 4, plan=predicted) is None  # only the newest count


@pytest.mark.parametrize(
    ("num_before", "then_s", "last_s", "is_faster"),
    [
        (4, 0.10, [0.097] * 4, True),
        (4, 0.10, [0.099] * 4, False),
        (4, 0.10, [0.097, 0.097, 0.0985, 0.097], False),  # every one of the last four
        (3, 0.10, [0.097] * 4, False),  # the first has clocks on their way; two are too few
        (12, 0.10, [0.097] * 4, True),
    ],
)
def test_a_job_whose_instruction_became_faster_has_changed(
    num_before: int, then_s: float, last_s: list[float], *, is_faster: bool
) -> None:
    recent = [iteration(k, 1.0, sample(then_s), sample(0.2, B)) for k in range(num_before)]
    recent[0] = iteration(0, 1.0, sample(0.5), sample(0.5, B))  # the very first is not looked at
    recent += [iteration(20 + k, 1.0, sample(time_s), sample(0.2, B)) for k, time_s in enumerate(last_s)]

    found = found_in(recent)

    line = "F takes 0.970 times as long as when the plan began"
    assert found == ((Finding.JOB_IS_FASTER, line) if is_faster else None)


def test_one_faster_stage_of_several_is_not_a_faster_job() -> None:
    recent = [iteration(k, 1.0, sample(0.1), sample(0.2, B, 1)) for k in range(6)]
    recent += [iteration(20 + k, 1.0, sample(0.097), sample(0.2, B, 1)) for k in range(4)]

    assert found_in(recent) == (Finding.STAGE_IS_FASTER, "F of rank 0 takes 0.970 times as long as when the plan began")


def test_noise_makes_neither_a_faster_job_nor_a_faster_stage() -> None:
    predicted = ClockPlan("p", PlanPurpose.TUNED, predicted=PlanPrediction(1.0, 100.0))
    noisy = BaselineView(1.0, None, 10, iteration_sigma_s=0.1)
    first_s, last_s = [0.1, 0.08, 0.12, 0.09, 0.11, 0.13], [0.07, 0.09, 0.08, 0.075]
    recent = [iteration(k, 0.94, sample(time_s)) for k, time_s in enumerate([*first_s, *last_s])]

    assert evaluate(recent, predicted, noisy, PerformanceTarget(), RULES) is None


def test_the_end_of_a_plan_is_compared_with_its_begin_only() -> None:
    """Eight iterations, the very first left out; what came later has no say."""
    recent = iterations([1.0], sample(0.1)) + [iteration(k, 1.0, sample(0.1)) for k in range(1, 9)]
    recent += [iteration(k, 1.0, sample(0.05)) for k in range(9, 30)]

    assert found_in(recent) == (Finding.JOB_IS_FASTER, "F takes 0.500 times as long as when the plan began")


def at_two_clocks(index: int, num_fast: int, fast_s: float = 0.1) -> IterationObservation:
    """Return an iteration with four instructions of a kind: some at 1200 MHz, the others, 0.2 s long, at 900."""
    fast = sample(fast_s, count=num_fast, clock=1200)
    return iteration(index, 1.0, fast, sample(0.2, count=4 - num_fast, clock=900))


def test_the_mean_of_an_instruction_is_weighted_by_its_count() -> None:
    """One at 0.1 s and three at 0.2 s are 0.175 s each; three at 0.09 s and one at 0.2 s are 0.1175 s."""
    slow = [at_two_clocks(k, 1) for k in range(6)]
    fast = [at_two_clocks(9 + k, 3, 0.09) for k in range(4)]

    line = "F takes 0.671 times as long as when the plan began"
    assert found_in(slow + fast) == (Finding.JOB_IS_FASTER, line)
    assert found_in(fast + slow) is None


def test_more_time_at_a_higher_clock_is_not_a_faster_instruction() -> None:
    recent = [at_two_clocks(k, 1) for k in range(6)] + [at_two_clocks(9 + k, 3) for k in range(4)]

    assert found_in(recent) is None


@pytest.mark.parametrize(("last_s", "is_faster"), [((0.05, 0.045), False), ((0.02, 0.05), True)])
def test_an_instruction_whose_clock_changes_counts_by_cycles(last_s: tuple[float, float], *, is_faster: bool) -> None:
    """At 900 MHz it took 0.1 s, or 90 million cycles; 0.05 s there and 0.045 s at 1200 MHz are 99 million."""
    mixed = InstructionSample(0, F, (ClockShare(900, last_s[0]), ClockShare(1200, last_s[1])), 4)
    recent = [iteration(k, 1.0, sample(0.1, clock=900)) for k in range(6)]
    recent += [iteration(9 + k, 1.0, mixed) for k in range(4)]

    assert (found_in(recent) is not None) is is_faster


def test_a_missing_instruction_is_not_a_faster_one() -> None:
    recent = [iteration(k, 1.0, sample(0.1)) for k in range(6)] + [iteration(9 + k, 1.0) for k in range(4)]

    assert found_in(recent) is None


def test_the_largest_change_between_two_full_speed_runs_is_named() -> None:
    before = iterations([1.0, 1.0, 1.1], sample(0.1), sample(0.2, B, 1, chunk=2))
    now = iterations([1.02] * 3, sample(0.104), sample(0.186, B, 1, chunk=2))

    named = what_changed(before, now, at_least_ratio=0.03)

    combined = [iterations([1.0] * 3, sample(s, InstructionKind.FB, chunk=combined_chunk_index(1, 0))) for s in (1, 2)]
    assert named == "B of rank 1 chunk 2 takes 0.930 times as long as before"
    assert what_changed(*combined, at_least_ratio=0.03) == "FB chunk 1+0 takes 2.000 times as long as before"
    assert what_changed(before, now, at_least_ratio=0.08) is None
    assert what_changed(iterations([1.0]), iterations([1.05]), at_least_ratio=0.03) == (
        "an iteration takes 1.050 times as long as before"
    )


def test_an_instruction_with_a_clock_change_does_not_count_at_full_speed() -> None:
    split = InstructionSample(0, F, (ClockShare(1200, 0.1), ClockShare(900, 0.1)), 1)

    assert what_changed(iterations([1.0], sample(0.1)), iterations([1.0], split), at_least_ratio=0.03) is None


def test_a_difference_within_the_noise_of_the_iterations_is_no_change() -> None:
    """Medians differ by 2.2 %, but times vary by 10 %."""
    before = [iteration(k, time_s) for k, time_s in enumerate([0.93, 1.09, 1.0, 0.94, 1.08, 1.0, 0.91, 1.1])]
    now = [iteration(k, time_s) for k, time_s in enumerate([0.978, 0.89, 1.06, 0.9, 1.04])]
    quiet = [iteration(k, time_s) for k, time_s in enumerate([0.978, 0.979, 0.977, 0.978, 0.978])]

    assert what_changed(before, now, at_least_ratio=0.02) is None
    named = what_changed(iterations([1.0] * 8), quiet, at_least_ratio=0.02)
    assert named == "an iteration takes 0.978 times as long as before"


def _full_speed(times_s: Sequence[float]) -> list[IterationObservation]:
    return [iteration(index, 1.0, sample(time_s)) for index, time_s in enumerate(times_s)]


def test_few_times_that_agree_by_chance_show_no_change_of_times_that_scatter() -> None:
    """Four times that happen to agree look certain; how much they scatter is known from the many before."""
    now = _full_speed([1.06, 1.061, 1.06, 1.059])
    scattered = _full_speed([0.973, 1.027, 0.973, 1.027, 0.96, 1.04, 0.985, 1.015])
    alike = _full_speed([1.0, 1.001, 0.999, 1.0, 1.002, 0.998, 1.0, 1.001])

    assert what_changed(scattered, now, at_least_ratio=0.02) is None
    assert what_changed(alike, now, at_least_ratio=0.02) is not None


@pytest.mark.parametrize(
    ("before_s", "times_s", "stopped"),
    [
        ([1.02] * 3, [1.02], True),  # four iterations, whatever their plans
        ([1.02] * 3, [1.0], False),  # the new plan may be on time
        ([1.02] * 8, [1.0, 1.02, 1.02], False),
        ([1.2], [1.06], True),
        ([1.02] * 2, [1.02], False),
        ([1.02] * 4, [], False),  # nothing is known of the new plan yet
    ],
)
def test_a_late_plan_counts_with_late_ones(before_s: list[float], times_s: list[float], *, stopped: bool) -> None:
    recent, before = iterations(times_s), iterations(before_s)
    found = evaluate(recent, PLAN, BaselineView(1.0, None, 10), PerformanceTarget(), RULES, before=before)

    assert (found is not None and found[0] is Finding.TOO_SLOW) is stopped


def test_iterations_as_late_as_single_ones_were_by_chance_end_a_plan_only_if_all_four_are() -> None:
    assert finding([1.2, 1.3], passed=[1.2], sigma_s=0.02) is None
    assert finding([1.21, 1.3], passed=[1.2], sigma_s=0.02) is Finding.TOO_SLOW  # later than any by chance
    assert finding([1.2, 1.25], passed=[1.3], sigma_s=0.02) is Finding.TOO_SLOW  # alike within noise: one cause
    assert finding([1.02] * 4, passed=[1.2]) is Finding.TOO_SLOW  # as late, but all four
    assert finding([1.04, 1.0, 1.04, 1.04], passed=[1.04]) is None
    assert finding([1.04, 1.0, 1.04, 1.04], passed=[1.03]) is Finding.TOO_SLOW


def test_late_by_chance_is_an_iteration_before_one_on_time_among_enough() -> None:
    def latest(times_s: list[float], plan: str = "p") -> float:
        return max(passed_ratios(iterations(times_s), {plan: 1.0}, RULES), default=0.0)

    assert latest([1.0, 1.2] + [1.0] * 15) == 1.2
    assert latest([1.0, 1.2, 1.1] + [1.0] * 14) == 1.1  # the next one was not on time
    assert latest([1.0] * 13 + [1.2] + [1.0] * 3) == 1.0  # the last four are in question
    assert latest([1.0, 1.2] + [1.0] * 14) == latest([1.2] * 30, "another") == 0.0


@pytest.mark.parametrize(("clock", "is_faster"), [(1200, True), (1100, False)])
def test_an_instruction_is_compared_at_the_same_clock_under_the_plan_before(clock: int, *, is_faster: bool) -> None:
    before = [iteration(k, 1.0, sample(0.10, clock=clock)) for k in range(5)]
    recent = [iteration(5 + k, 1.0, sample(0.09)) for k in range(4)]

    found = evaluate(recent, PLAN, BaselineView(1.0, None, 10), PerformanceTarget(), RULES, before=before)

    assert (found is not None and found[0] is Finding.JOB_IS_FASTER) is is_faster


@pytest.mark.parametrize(("clock", "is_found"), [(1290, True), (1215, False), (1200, False)])
def test_a_clock_above_that_of_full_speed_shows_that_its_limit_has_gone(clock: int, *, is_found: bool) -> None:
    recent = [iteration(k, 1.0, sample(0.1, clock=clock), sample(0.1, rank=1)) for k in range(4)]
    full_speed = [iteration(k, 1.0, sample(0.1), sample(0.1, rank=1)) for k in range(8)]

    found = evaluate(recent, PLAN, BaselineView(1.0, None, 10), PerformanceTarget(), RULES, at_full_speed=full_speed)

    line = f"F of rank 0 runs at {clock} MHz, above the 1200 MHz of full speed"
    assert found == ((Finding.STAGE_IS_FASTER, line) if is_found else None)
