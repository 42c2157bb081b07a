"""Possible curves of a loop, and what measurements leave of them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd_policies.loop_curves import (
    SLOWDOWNS,
    FloatArray,
    LoopAtFullSpeed,
    MeasuredPoint,
    Steps,
    possible_curves,
    weighed,
)
from tests.support.examples import examples

NO_STEPS = Steps()
_ratios = st.floats(0.0, 1.0)


def _truth(share: float, dynamic: float, knee: float, top: float, slowdown: float) -> tuple[float, float]:
    """Return energy and clock at a slowdown, relative to full speed, of a curve with other parameters than assumed."""
    clock = share / (share + slowdown)
    volts = (1 + (top - 1) * max(0.0, clock - knee) / (1 - knee)) / top
    return (1 - dynamic) * (1 + slowdown) + dynamic * volts**2, clock


@given(st.floats(20.0, 900.0), st.one_of(st.none(), st.floats(50.0, 1000.0)), st.floats(0.05, 1.0))
@settings(max_examples=examples(20), deadline=None)
def test_possible_curves_begin_at_full_speed_and_savings_grow_with_the_slowdown(
    power_w: float, limit_w: float | None, working: float
) -> None:
    curves = possible_curves(LoopAtFullSpeed(power_w, limit_w, working))

    assert np.allclose(curves.energies[:, 0], 1.0)
    assert np.isclose(curves.weights.sum(), 1.0)
    found = [curves.saving(ratio, steps=NO_STEPS) for ratio in (0.0, 0.01, 0.02, 0.05)]
    assert all(own.low <= own.median <= own.high for own in found)
    assert [own.median for own in found] == sorted(own.median for own in found)
    assert abs(found[0].median) < 0.01


@given(st.floats(0.15, 1.0), st.floats(0.4, 0.9), st.floats(0.5, 0.82), st.floats(1.15, 1.45), st.integers(0, 1000))
@settings(max_examples=examples(60), deadline=None)
def test_up_to_the_slowest_measured_point_the_saving_is_known_within_two_points(
    share: float, dynamic: float, knee: float, top: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    points = []
    for clock in (0.985, 0.94, 0.9):
        slowdown = share * (1 / clock - 1)
        energy = _truth(share, dynamic, knee, top, slowdown)[0] * (1 + 0.003 * random.standard_normal())
        points.append(MeasuredPoint(slowdown, energy, 0.001, 0.003))
    curves = weighed(possible_curves(LoopAtFullSpeed(300.0)), points)

    for ratio in (0.01, 0.02, 0.05):
        if ratio <= points[-1].slowdown_ratio:
            wanted = max(1 - _truth(share, dynamic, knee, top, ratio * k / 10)[0] for k in range(11))
            assert abs(curves.saving(ratio, steps=NO_STEPS).median - wanted) <= 0.02


def test_measurements_that_no_possible_curve_explains_still_leave_many() -> None:
    curves = weighed(possible_curves(LoopAtFullSpeed(300.0)), [MeasuredPoint(0.02, 0.4, 0.001, 0.003)])

    assert 1 / float(np.sum(np.square(curves.weights))) >= 50
    assert np.isfinite(curves.energies).all()


def test_a_setting_slower_than_all_points_changes_nothing() -> None:
    curves = possible_curves(LoopAtFullSpeed(300.0))

    assert weighed(curves, [MeasuredPoint(float(SLOWDOWNS[-1]) + 0.1, 0.5, 0.001, 0.003)]) is curves


def test_steps_between_settings_leave_a_part_of_the_slowdown_unused() -> None:
    curves = possible_curves(LoopAtFullSpeed(300.0))

    assert curves.saving(0.01, steps=Steps(time_ratio=0.02)).median < curves.saving(0.01, steps=NO_STEPS).median


@given(_ratios, _ratios)
@settings(max_examples=examples(20), deadline=None)
def test_a_cost_decides_how_much_of_the_slowdown_is_used(eta: float, weight: float) -> None:
    curves = possible_curves(LoopAtFullSpeed(300.0))

    def cost(times: FloatArray, energies: FloatArray) -> FloatArray:
        return np.asarray(eta * energies + (1 - eta) * (1 + weight) * times, dtype=np.float64)

    free, priced = curves.saving(0.05, steps=NO_STEPS), curves.saving(0.05, steps=NO_STEPS, cost=cost)
    assert priced.median <= free.median + 1e-9
