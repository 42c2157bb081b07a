"""What a replica would take at full speed and alone, told from iterations that ran otherwise.

Two ranks, two microbatches, GPipe: 0.1 s forward and 0.2 s backward make 0.9 s; 0.1 s pass between iterations.
"""

from dataclasses import replace

import pytest

from gpuenergyd.core.distributed.pace import PaceEstimator
from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionKind, dependency_graph, gpipe
from gpuenergyd.core.pipeline.plan import PlanPurpose

GRAPH = dependency_graph(gpipe(2, 2))
TOP, LOW = 1400, 700
TIMES_S = {InstructionKind.F: 0.1, InstructionKind.B: 0.2}
BUSY_S, OVERHEAD_S = 0.9, 0.1


def at_clock(clock_mhz: int, slowness: float = 1.0, count: int = 2) -> tuple[InstructionSample, ...]:
    """Return every kind of instruction of both ranks, so many times as long as at full speed."""
    return tuple(
        InstructionSample(rank, kind, (ClockShare(clock_mhz, slowness * time_s),), count)
        for rank in range(2)
        for kind, time_s in TIMES_S.items()
    )


def iteration(
    samples: tuple[InstructionSample, ...], busy_s: float | None = BUSY_S, overhead_s: float = OVERHEAD_S
) -> IterationObservation:
    return IterationObservation(0, "p", (busy_s or BUSY_S) + overhead_s, samples, (), busy_s=busy_s)


def gauge(*overheads_s: float) -> PaceEstimator:
    """Return one that has seen iterations at full speed, of these times between instructions."""
    made = PaceEstimator()
    for overhead_s in overheads_s or (OVERHEAD_S,) * 3:
        made.observe(iteration(at_clock(TOP), overhead_s=overhead_s), PlanPurpose.BASELINE, GRAPH)
    return made


def profiled(made: PaceEstimator, clock_mhz: int, slowness: float) -> None:
    samples = at_clock(clock_mhz, slowness)
    made.observe(iteration(samples, BUSY_S * slowness), PlanPurpose.TRIAL, GRAPH)


def tuned(made: PaceEstimator, clock_mhz: int, slowness: float) -> float | None:
    """Return the own time after an iteration that teaches nothing, forgetting what was known before."""
    made.own_time_s = None
    made.observe(iteration(at_clock(clock_mhz, slowness), BUSY_S * slowness), None, GRAPH)
    return made.own_time_s


def test_at_full_speed_own_time_is_busy_time_plus_usual_overhead() -> None:
    made = gauge()

    assert made.own_time_s == pytest.approx(1.0)
    assert made.overhead_s == pytest.approx(OVERHEAD_S)


def test_own_time_is_unknown_before_the_first_iteration() -> None:
    assert PaceEstimator().own_time_s is None
    assert PaceEstimator().overhead_s is None
    assert tuned(PaceEstimator(), LOW, 1.5) is None


def test_overhead_beyond_the_usual_one_is_a_wait() -> None:
    made = gauge()

    noted = made.observe(iteration(at_clock(TOP), overhead_s=0.3), PlanPurpose.TUNED, GRAPH)

    assert noted.waited_s == pytest.approx(0.2)
    assert noted.own_time_s == pytest.approx(1.0)
    assert made.own_time_s == pytest.approx(1.0)


def test_a_wait_below_1_percent_of_the_iteration_is_ignored() -> None:
    made = gauge()

    chance = made.observe(iteration(at_clock(TOP), overhead_s=0.1099), PlanPurpose.TUNED, GRAPH)
    wait = made.observe(iteration(at_clock(TOP), overhead_s=0.1105), PlanPurpose.TUNED, GRAPH)

    assert chance.waited_s == 0.0
    assert wait.waited_s == pytest.approx(0.0105)


def test_the_usual_overhead_is_the_lower_quintile() -> None:
    assert gauge(0.5, 0.4, 0.3, 0.2, 0.1).overhead_s == pytest.approx(0.2)
    assert gauge(0.4, 0.3, 0.2, 0.1).overhead_s == pytest.approx(0.1)


def test_overhead_at_straggler_pace_is_not_learned() -> None:
    made = gauge()

    noted = made.observe(iteration(at_clock(TOP), overhead_s=0.02), PlanPurpose.TUNED, GRAPH, is_at_straggler_pace=True)

    assert noted.is_at_straggler_pace
    assert noted.waited_s == 0.0
    assert made.overhead_s == pytest.approx(OVERHEAD_S)


def test_overhead_beyond_the_least_of_the_other_replicas_is_a_wait() -> None:
    made = PaceEstimator()

    noted = made.observe(iteration(at_clock(TOP)), PlanPurpose.BASELINE, GRAPH, least_overhead_s=0.04)

    assert noted.waited_s == pytest.approx(0.06)
    assert made.own_time_s == pytest.approx(0.94)


def test_busy_time_longer_than_the_iteration_gives_no_negative_overhead() -> None:
    made = PaceEstimator()

    noted = made.observe(iteration(at_clock(TOP), overhead_s=-0.05), PlanPurpose.BASELINE, GRAPH)

    assert noted.waited_s == 0.0
    assert made.own_time_s == pytest.approx(0.9)


def test_an_iteration_with_an_error_of_busy_time_has_the_usual_overhead_in_its_pace() -> None:
    made = gauge()

    noted = made.observe(iteration(at_clock(TOP), overhead_s=-0.05), PlanPurpose.TUNED, GRAPH)

    assert noted.waited_s == 0.0
    assert made.own_time_s == pytest.approx(BUSY_S + OVERHEAD_S)
    assert made.overhead_s == pytest.approx(OVERHEAD_S)


def test_without_busy_time_only_slowness_is_learned() -> None:
    made = gauge()
    slow = at_clock(LOW, 1.6)
    seen = replace(iteration(slow), busy_s=None)

    assert made.observe(seen, PlanPurpose.TRIAL, GRAPH) is seen
    assert tuned(made, LOW, 1.6) == pytest.approx(1.0)


def test_own_time_does_not_depend_on_the_plan_once_slowness_is_known() -> None:
    made = gauge()

    assert tuned(made, LOW, 1.6) is None
    profiled(made, LOW, 1.6)

    assert tuned(made, LOW, 1.6) == pytest.approx(1.0)
    assert tuned(made, LOW, 1.6 * 1.1) == pytest.approx(1.09)  # throttled: a tenth of 0.9 s on top


def test_slowness_is_interpolated_in_the_cycle_time() -> None:
    """1 us at 1000 MHz lies two fifths of the way from 1/1400 to 1/700."""
    made = gauge()
    profiled(made, LOW, 1.8)

    assert tuned(made, 1000, 1.32) == pytest.approx(1.0)


def test_below_the_lowest_measured_clock_own_time_is_not_estimated() -> None:
    made = gauge()
    profiled(made, LOW, 1.6)

    assert tuned(made, LOW - 15, 1.6) is None
    assert tuned(made, TOP + 15, 1.0) is None


def test_the_first_iteration_of_a_tuned_plan_teaches_its_clocks() -> None:
    made = gauge()

    made.observe(iteration(at_clock(LOW, 1.6), BUSY_S * 1.6), PlanPurpose.TUNED, GRAPH)

    assert tuned(made, LOW, 1.6) == pytest.approx(1.0)
    assert tuned(made, LOW, 1.6 * 1.2) == pytest.approx(1.2 * BUSY_S + OVERHEAD_S)


def test_slowness_beyond_the_ratio_of_clocks_is_an_outlier() -> None:
    """At half the clock an instruction takes at most twice as long, and a twentieth more by chance; never less."""
    made = gauge()
    profiled(made, LOW, 2.11)
    profiled(made, LOW, 0.94)
    assert tuned(made, LOW, 1.6) is None

    profiled(made, LOW, 2.09)
    assert tuned(made, LOW, 2.09) == pytest.approx(1.0)


def at_full_speed(made: PaceEstimator, slower: float) -> None:
    made.observe(iteration(at_clock(TOP, slower), BUSY_S * slower), PlanPurpose.BASELINE, GRAPH)


def test_a_gpu_that_becomes_slower_while_clocks_are_tried_does_not_make_them_slow() -> None:
    made = gauge()
    profiled(made, LOW, 1.6)
    profiled(made, 1000, 1.3 * 1.2)  # beyond what the lower clock leaves possible

    assert tuned(made, 1000, 1.26) == pytest.approx(1.0, rel=0.02)


def test_readings_before_a_changed_time_at_full_speed_are_dropped() -> None:
    made = gauge()
    profiled(made, LOW, 1.9)
    at_full_speed(made, 1.0)
    profiled(made, 500, 1.9 * 1.2)
    assert tuned(made, 500, 1.9 * 1.2) == pytest.approx(1.0)

    at_full_speed(made, 1.2)
    at_full_speed(made, 1.2)
    assert tuned(made, 500, 1.9 * 1.2) is None

    profiled(made, 500, 1.2 * 2.4)
    assert tuned(made, 500, 1.2 * 2.4) == pytest.approx(1.2 * BUSY_S + OVERHEAD_S)


def test_readings_before_a_changed_time_at_full_speed_are_kept_while_nothing_else_is_known() -> None:
    made = gauge()
    profiled(made, LOW, 1.6)

    at_full_speed(made, 1.2)

    assert tuned(made, LOW, 1.6) == pytest.approx(1.0)


def test_slowness_is_fixed_after_four_readings() -> None:
    made = gauge()
    for slowness in (1.5, 1.5, 1.7, 1.7, 1.9, 1.9, 1.9):
        profiled(made, LOW, slowness)

    assert tuned(made, LOW, 1.6) == pytest.approx(1.0)


def at_two_clocks(first: tuple[int, float], second: tuple[int, float]) -> IterationObservation:
    """Return an iteration that runs at two clocks: (clock, part of the time at full speed that it takes at it)."""
    samples = tuple(
        replace(one, shares=tuple(ClockShare(clock_mhz, part * one.time_s) for clock_mhz, part in (first, second)))
        for one in at_clock(TOP)
    )
    return iteration(samples, (first[1] + second[1]) * BUSY_S)


def test_an_instruction_at_two_clocks_is_scaled_by_its_shares() -> None:
    """Half of the work at full speed, half at 1.6 times; what is learned from such a one is the slow clock's."""
    made, seen = gauge(), at_two_clocks((TOP, 0.5), (LOW, 0.8))

    made.observe(seen, PlanPurpose.TRIAL, GRAPH)

    assert tuned(made, LOW, 1.6) == pytest.approx(1.0)
    made.own_time_s = None
    made.observe(seen, PlanPurpose.TUNED, GRAPH)
    assert made.own_time_s == pytest.approx(1.0)


def test_a_disturbed_instruction_is_ignored() -> None:
    """One of three is held up to twice its time: above 1.3 times the median it is left out of the mean."""
    made = gauge()
    disturbed = (*at_clock(TOP, count=2), *at_clock(TOP, 2.0, count=1))

    made.observe(iteration(disturbed), PlanPurpose.TUNED, GRAPH)
    assert made.own_time_s == pytest.approx(1.0)

    made.observe(iteration((*at_clock(TOP, count=2), *at_clock(TOP, 1.3, count=1))), PlanPurpose.TUNED, GRAPH)
    assert made.own_time_s == pytest.approx(1.09)


def test_a_profiling_iteration_is_not_scaled_by_its_own_slowness() -> None:
    made = gauge()
    made.own_time_s = None

    profiled(made, LOW, 1.6)

    assert made.own_time_s is None


def test_a_missing_instruction_leaves_own_time_unchanged() -> None:
    made = gauge()

    made.observe(iteration(at_clock(TOP, 2.0)[:3]), PlanPurpose.TUNED, GRAPH)

    assert made.own_time_s == pytest.approx(1.0)


def test_full_speed_is_the_highest_clock_with_its_newest_times() -> None:
    made = PaceEstimator()
    made.observe(iteration(at_clock(1380, 1.5)), PlanPurpose.BASELINE, GRAPH)
    for slowness in (3.0, 1.0, 1.0, 1.0):
        made.observe(iteration(at_clock(TOP, slowness)), PlanPurpose.BASELINE, GRAPH)
    made.observe(iteration(at_clock(1380, 9.0)), PlanPurpose.BASELINE, GRAPH)

    profiled(made, LOW, 1.6)

    assert tuned(made, LOW, 1.6) == pytest.approx(1.0)


def test_a_former_highest_clock_gets_a_slowness_of_its_own() -> None:
    """1380 MHz was the highest seen; once 1400 is, it lies between that and the lowest known."""
    made = PaceEstimator()
    made.observe(iteration(at_clock(1380)), PlanPurpose.BASELINE, GRAPH)
    profiled(made, 1380, 1.0)
    made.observe(iteration(at_clock(TOP)), PlanPurpose.BASELINE, GRAPH)

    assert tuned(made, 1380, 1.0) is None
    profiled(made, LOW, 2.0)
    assert tuned(made, 1380, TOP / 1380) == pytest.approx(1.0)


def test_profiling_before_full_speed_teaches_nothing() -> None:
    made = PaceEstimator()

    profiled(made, LOW, 1.6)

    assert tuned(gauge(), LOW, 1.6) is None
    assert made.own_time_s is None


def test_the_usual_overhead_is_of_the_last_64_iterations() -> None:
    """The lower fifth of 64 is the thirteenth: twelve small ones are passed over, thirteen are not."""
    assert gauge(*[0.05] * 12, *[0.1] * 52).overhead_s == pytest.approx(0.1)
    assert gauge(*[0.05] * 13, *[0.1] * 51).overhead_s == pytest.approx(0.05)
    assert gauge(*[0.05] * 13, *[0.1] * 52).overhead_s == pytest.approx(0.1)


def test_only_iterations_with_an_estimate_count_as_readings() -> None:
    made = gauge()
    assert made.num_readings == 3

    tuned(made, LOW, 1.6)
    assert made.num_readings == 3
    profiled(made, LOW, 1.6)
    assert made.num_readings == 3
    tuned(made, LOW, 1.6)
    assert made.num_readings == 4


def test_an_instruction_without_a_main_clock_is_not_learned() -> None:
    """More of it than the whole at other clocks: nothing is left for the one that is learned."""
    made = gauge()

    made.observe(at_two_clocks((TOP, 1.0), (LOW, 1.2)), PlanPurpose.TRIAL, GRAPH)

    assert tuned(made, LOW, 1.6) is None


@pytest.mark.parametrize(("known_slowness", "part"), [(1.2, 0.6), (None, 0.7)], ids=["known", "by the clock"])
def test_other_shares_are_scaled_by_their_known_slowness_or_else_by_the_clock(
    known_slowness: float | None, part: float
) -> None:
    """Half of the work at 1000 MHz, known to take 1.2 times as long (the clock alone would say 1.4), half at 700."""
    made = gauge()
    if known_slowness is not None:
        profiled(made, 1000, known_slowness)

    made.observe(at_two_clocks((1000, part), (LOW, 0.9)), PlanPurpose.TRIAL, GRAPH)

    assert tuned(made, LOW, 1.8) == pytest.approx(1.0)
