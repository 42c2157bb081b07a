"""Steps in the work of an instruction, and the sequence of clocks that the design measures."""

from itertools import pairwise

import pytest

from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd_policies.profiling.design import LOWEST_RATIO, clock_levels, next_clock
from gpuenergyd_policies.profiling.times import TimeCurve, fit_times
from tests.policies.profiling.test_profiling import CLOCKS, true_time_s

F = InstructionKind.F
LEVELS = (1410, 1290, 1140, 1005, 900, 780)


def curve_of(time_s_at: dict[int, float], *, times: int = 2) -> TimeCurve:
    """Return the curve of one class, with a number of measurements per clock."""
    seen = [
        IterationObservation(k, "p", 1.0, (InstructionSample(0, F, (ClockShare(clock, time_s),), 8),), ())
        for k, (clock, time_s) in enumerate([*time_s_at.items()] * times)
    ]
    return fit_times(seen)[InstructionClass(0, F)]


def stepped_time_s(clock: int, *, step_mhz: int, factor: float) -> float:
    return true_time_s(F, clock) * (factor if clock < step_mhz else 1.0)


@pytest.mark.parametrize("factor", [0.9, 0.93, 1.35])
@pytest.mark.parametrize("below", [1, 2, 3])
def test_a_step_in_the_work_is_located_and_both_sides_are_fitted(below: int, factor: float) -> None:
    low, high = LEVELS[below + 1], LEVELS[below]
    step_mhz = (low + high) // 2

    curve = curve_of({clock: stepped_time_s(clock, step_mhz=step_mhz, factor=factor) for clock in LEVELS})

    assert curve.steps_mhz == ((float(low), float(high)),)
    assert not curve.doubtful_mhz
    for clock in range(LEVELS[-1], LEVELS[0] + 1, 15):
        assert curve.is_offered(clock) == (not low < clock < high)
        if curve.is_offered(clock):
            expected_s = stepped_time_s(clock, step_mhz=step_mhz, factor=factor)
            assert float(curve.times_s([clock])[0]) == pytest.approx(expected_s, rel=0.006)


def test_a_step_needs_two_measurements() -> None:
    time_s_at = {clock: stepped_time_s(clock, step_mhz=1072, factor=0.85) for clock in LEVELS}

    once, twice = curve_of(time_s_at, times=1), curve_of(time_s_at)

    assert once.doubtful_mhz
    assert not once.steps_mhz
    assert twice.steps_mhz
    assert not twice.doubtful_mhz


def test_smooth_work_has_no_step() -> None:
    assert not curve_of({clock: true_time_s(F, clock) for clock in LEVELS}).steps_mhz


def test_a_power_cap_is_not_mistaken_for_a_step() -> None:
    for cap in (1350, 1200, 1050, 950):
        assert not curve_of({clock: true_time_s(F, min(clock, cap)) for clock in LEVELS}).steps_mhz


def test_above_a_power_cap_only_the_highest_clock_is_offered() -> None:
    curve = curve_of({clock: true_time_s(F, min(clock, 1260)) for clock in (1410, 1230, 1050, 900, 780)})

    capped = curve.as_capped()

    assert curve.cap_mhz is None
    assert curve.bend_mhz == pytest.approx(1260, rel=0.02)
    assert capped.cap_mhz == curve.bend_mhz == capped.effective_mhz(1410)
    assert curve.is_offered(1350)
    assert not capped.is_offered(1350)
    assert capped.is_offered(1410)
    for clock in (780, 975, 1230, 1410):
        assert float(capped.times_s([clock])[0]) == pytest.approx(true_time_s(F, min(clock, 1260)), rel=0.01)


def test_a_curve_without_a_bend_is_not_capped() -> None:
    curve = curve_of({clock: true_time_s(F, clock) for clock in LEVELS})

    assert curve.bend_mhz is None
    assert curve.as_capped() == curve


def test_clocks_are_chosen_one_by_one_ends_first_and_never_twice() -> None:
    asked: list[int] = []
    while (clock := next_clock(CLOCKS, asked)) is not None:
        assert clock in CLOCKS
        assert clock not in asked
        asked.append(clock)

    assert asked[0] == max(CLOCKS)
    assert asked[1] == min(c for c in CLOCKS if c >= LOWEST_RATIO * max(CLOCKS))
    ordered = sorted(asked)
    assert all(high / low < 1.09 for low, high in pairwise(ordered))


@pytest.mark.parametrize("cap", [1300, 1200, 1150])
def test_the_highest_clock_below_a_power_cap_is_chosen_and_none_above(cap: int) -> None:
    asked: list[int] = []
    while len(asked) < 8:
        time_s_at = {clock: true_time_s(F, min(clock, cap)) for clock in asked}
        clock = next_clock(CLOCKS, asked, [curve_of(time_s_at)] if len(asked) > 1 else [])
        if clock is None:
            break
        asked.append(clock)

    assert asked[3] == pytest.approx(cap, rel=0.03)
    assert not any(1.05 * cap < clock < max(CLOCKS) for clock in asked)


def test_no_level_is_below_the_lowest_clock_of_a_plan() -> None:
    for clocks in (CLOCKS, tuple(range(1530, 134, -7)), (1410, 900, 500)):
        assert min(clock_levels(clocks)) >= LOWEST_RATIO * max(clocks)
