"""Profiles: Pareto sets, hulls, interpolation and validation."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd.errors import ProfileError

OPTIONS = st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 1000.0)), min_size=1, max_size=12).map(
    lambda values: instruction_profile((ClockOption(1000 - k, *v) for k, v in enumerate(values)), where="test")
)


def _clocks(options: tuple[ClockOption, ...]) -> list[int]:
    return [o.sm_clock_mhz for o in options]


def test_options_are_kept_highest_clock_first() -> None:
    profile = instruction_profile([ClockOption(900, 1.2, 80.0), ClockOption(1400, 1.0, 100.0)], where="test")

    assert profile.at_max_clock.sm_clock_mhz == 1400
    assert profile.at_clock(900).energy_j == 80.0


def test_a_throttled_maximum_clock_is_not_the_fastest() -> None:
    profile = instruction_profile(
        [ClockOption(1400, 1.0, 110.0), ClockOption(1350, 1.0, 100.0), ClockOption(1300, 0.99, 105.0)], where="test"
    )

    assert profile.fastest.sm_clock_mhz == 1300
    assert _clocks(profile.pareto(0.0)) == [1300, 1350]


@given(OPTIONS, st.floats(0.0, 200.0))
def test_the_pareto_set_is_undominated_and_the_hull_convex(
    profile: InstructionProfile, blocking_power_w: float
) -> None:
    pareto = profile.pareto(blocking_power_w)
    costs = [o.effective_energy_j(blocking_power_w) for o in pareto]
    hull = profile.lower_hull(blocking_power_w)

    assert [o.time_s for o in pareto] == sorted({o.time_s for o in pareto})
    assert all(a > b for a, b in pairwise(costs))
    assert (hull[0], hull[-1]) == (pareto[0], pareto[-1])
    slopes = [
        (b.effective_energy_j(blocking_power_w) - a.effective_energy_j(blocking_power_w)) / (b.time_s - a.time_s)
        for a, b in pairwise(hull)
    ]
    assert all(a <= b + 1e-9 * abs(b) for a, b in pairwise(slopes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "where: no measurements"),
        ([ClockOption(0, 1.0, 1.0)], "frequency 0 MHz must be > 0"),
        ([ClockOption(900, 0.0, 1.0)], "time 0.0 s at 900 MHz"),
        ([ClockOption(900, math.nan, 1.0)], "time nan s at 900 MHz"),
        ([ClockOption(900, 1.0, -1.0)], "energy -1.0 J at 900 MHz"),
        ([ClockOption(900, 1.0, math.inf)], "energy inf J at 900 MHz"),
        ([ClockOption(900, 1.0, 1.0), ClockOption(900, 2.0, 1.0)], "900 MHz is given twice"),
    ],
)
def test_invalid_measurements_are_rejected(options: list[ClockOption], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        instruction_profile(options, where="where")


def test_missing_class_and_missing_clock_are_named() -> None:
    profile = PipelineProfile({}, blocking_power_w=0.0)

    with pytest.raises(ProfileError, match="no profile for B of stage 3 chunk 1"):
        profile[InstructionClass(3, InstructionKind.B, 1)]
    with pytest.raises(ProfileError, match="no measurement at 800 MHz; measured: 1400, 1000"):
        instruction_profile([ClockOption(1400, 1.0, 100.0), ClockOption(1000, 2.0, 80.0)], where="t").at_clock(800)


def test_constant_times_at_the_highest_clocks_mean_throttling() -> None:
    def table(cap: int) -> InstructionProfile:
        options = [ClockOption(c, 0.02 + 0.08 * 1700 / min(c, cap), 30.0) for c in range(1700, 800, -15)]
        return instruction_profile(options, where="test")

    assert table(1450).throttling_clock_mhz == pytest.approx(1450, abs=35)
    assert table(5000).throttling_clock_mhz is None


def test_a_single_clock_is_never_throttled() -> None:
    assert instruction_profile([ClockOption(1400, 0.1, 1.0)], where="test").throttling_clock_mhz is None


def test_the_fastest_of_equals_is_the_cheaper_one() -> None:
    profile = instruction_profile([ClockOption(1400, 1.0, 110.0), ClockOption(1350, 1.0, 100.0)], where="t")

    assert profile.fastest.sm_clock_mhz == 1350
    assert profile.at_max_clock.sm_clock_mhz == 1400


def test_interpolation_is_linear_in_the_clock() -> None:
    options = [ClockOption(1400, 1.0, 100.0), ClockOption(1000, 2.0, 80.0), ClockOption(600, 6.0, 40.0)]
    profile = instruction_profile(options, where="t")

    assert profile.interpolated(1300) == ClockOption(1300, 1.25, 95.0)
    assert profile.interpolated(700) == ClockOption(700, 5.0, 50.0)
    assert [profile.interpolated(mhz) for mhz in (1400, 1000, 600)] == options
    assert profile.interpolated(599) == options[2]
    assert profile.interpolated(1401) == options[0]


def test_equal_energy_at_more_time_is_dominated() -> None:
    profile = instruction_profile([ClockOption(1400, 1.0, 100.0), ClockOption(1200, 2.0, 100.0)], where="t")

    assert _clocks(profile.pareto(0.0)) == [1400]
    assert profile.options[1].effective_energy_j(10.0) == 80.0


def test_an_option_on_the_hulls_edge_is_no_vertex() -> None:
    on_it = [ClockOption(1400, 1.0, 100.0), ClockOption(1200, 2.0, 90.0), ClockOption(1000, 3.0, 80.0)]
    below = [on_it[0], ClockOption(1200, 2.0, 89.9), on_it[2]]

    assert _clocks(instruction_profile(on_it, where="t").lower_hull(0.0)) == [1400, 1000]
    assert _clocks(instruction_profile(below, where="t").lower_hull(0.0)) == [1400, 1200, 1000]


@pytest.mark.parametrize(
    ("time_s", "expected"),
    [
        (1.0, 1300),
        (1.014, 1300),  # 1.4 % lost of the time, 7.7 % of the clock
        (1.016, None),  # more than 1.5 %
        (0.9, 1300),
    ],
)
def test_a_clock_is_throttled_if_lower_ones_lose_little_time(time_s: float, expected: int | None) -> None:
    options = [ClockOption(1400, 1.0, 100.0), ClockOption(1300, time_s, 90.0)]

    assert instruction_profile(options, where="t").throttling_clock_mhz == expected


def test_a_loss_of_time_of_a_quarter_of_the_clocks_loss_is_no_throttling() -> None:
    """1360 MHz is 2.94 % below 1400: a quarter of that is 0.735 %."""
    for lost, expected in ((0.0073, 1360), (0.0074, None)):
        options = [ClockOption(1400, 1.0, 100.0), ClockOption(1360, 1.0 + lost, 90.0)]
        assert instruction_profile(options, where="t").throttling_clock_mhz == expected


def test_energy_may_be_zero_but_time_and_clock_may_not() -> None:
    assert instruction_profile([ClockOption(1, 1e-9, 0.0)], where="t").at_max_clock.energy_j == 0.0
