"""Time curves of phases that wait: flat, unless low clocks show that they compute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd_policies.profiling.power import PowerModel
from gpuenergyd_policies.profiling.times import TimeCurve, fit_times

C = InstructionKind.C
KEY = InstructionClass(0, C)
CLOCKS_MHZ = (1410, 1320, 1215, 1080, 930, 780)


def curve_of(times_s: list[tuple[int, float]]) -> TimeCurve:
    observations = [
        IterationObservation(index, None, 0.2, (InstructionSample(0, C, (ClockShare(mhz, time_s),), 1),), ())
        for index, (mhz, time_s) in enumerate(times_s)
    ]
    return fit_times(observations)[KEY]


@given(st.lists(st.floats(0.0, 0.05), min_size=len(CLOCKS_MHZ), max_size=len(CLOCKS_MHZ)), st.integers(0, 5))
def test_a_wait_takes_the_same_time_at_every_clock(waits_s: list[float], num_more: int) -> None:
    usual = [(CLOCKS_MHZ[0], 0.06)] * 4 + [(mhz, 0.06) for mhz in CLOCKS_MHZ]
    waited = [(mhz, 0.06 + wait_s) for mhz, wait_s in zip(CLOCKS_MHZ, waits_s, strict=True)][:num_more]
    curve = curve_of(usual + waited)

    assert curve.is_flat
    assert set(curve.times_s(CLOCKS_MHZ).tolist()) == {0.06}
    assert set(curve.sigmas_ratio(CLOCKS_MHZ).tolist()) == {0.0}
    assert curve.lowest_mhz == CLOCKS_MHZ[-1]


def test_a_phase_that_computes_is_no_wait() -> None:
    curve = curve_of([(mhz, 0.02 + 0.04 * CLOCKS_MHZ[0] / mhz) for mhz in CLOCKS_MHZ for _ in range(2)])

    assert not curve.is_flat
    assert curve.times_s([CLOCKS_MHZ[-1]])[0] == pytest.approx(0.02 + 0.04 * CLOCKS_MHZ[0] / CLOCKS_MHZ[-1], rel=0.01)


def test_the_power_of_a_wait_falls_with_the_clock_below_the_knee_too() -> None:
    model = PowerModel(35.0, 1100.0, 1.2, 1410, {(C, 0, 0): 0.02}, 0.02)

    low_j, lower_j = (model.energy_j((C, 0, 0), mhz, 0.1) for mhz in (1000, 500))
    assert low_j == pytest.approx((35.0 + 0.02 * 1000) * 0.1)
    assert lower_j == pytest.approx((35.0 + 0.02 * 500) * 0.1)


@pytest.mark.parametrize("lowest_mhz", CLOCKS_MHZ[3:])
def test_a_wait_is_not_offered_at_clocks_that_prolong_it(lowest_mhz: int) -> None:
    curve = curve_of([(mhz, 0.06 if mhz >= lowest_mhz else 0.09) for mhz in CLOCKS_MHZ for _ in range(3)])

    assert curve.is_flat
    assert curve.lowest_mhz == lowest_mhz


def test_a_wait_for_slow_ranks_at_some_clocks_does_not_hide_lower_ones() -> None:
    slow_mhz = CLOCKS_MHZ[2:4]
    curve = curve_of([(CLOCKS_MHZ[0], 0.06)] * 4 + [(mhz, 0.09 if mhz in slow_mhz else 0.06) for mhz in CLOCKS_MHZ])

    assert curve.is_flat
    assert curve.lowest_mhz == CLOCKS_MHZ[-1]
