"""Possible curves of a loop over clocks and power limits, and what measurements leave of them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd_policies.setting_curves import (
    Curves,
    FloatArray,
    LoopAtFullSpeed,
    MeasuredPoint,
    StandardErrors,
    possible_curves,
)
from gpuenergyd_policies.uniform_settings import Setting
from tests.support.examples import examples

CLOCKS = tuple(Setting(Lever.CLOCKS, mhz) for mhz in range(2000, 800, -10))
LIMITS = tuple(Setting(Lever.POWER_LIMITS, watts) for watts in range(400, 95, -5))
ERRORS = StandardErrors(0.001, 0.003)
_ratios = st.floats(0.0, 1.0)


def _truth(share: float, dynamic: float, knee: float, top: float, slowdown: float) -> tuple[float, float]:
    """Return energy and clock at a slowdown, relative to full speed, of a curve with other parameters than assumed."""
    clock = share / (share + slowdown)
    volts = (1 + (top - 1) * max(0.0, clock - knee) / (1 - knee)) / top
    return (1 - dynamic) * (1 + slowdown) + dynamic * volts**2, clock


def _loop(power_w: float = 300.0, limit_w: float | None = None, working: float = 1.0) -> LoopAtFullSpeed:
    return LoopAtFullSpeed(power_w, limit_w, working, 1.0)


def _median_saving(curves: Curves, slowdown_ratio: float) -> float:
    return float(np.median(curves.savings(np.full(len(curves.logs), slowdown_ratio))))


@given(st.floats(20.0, 900.0), st.one_of(st.none(), st.floats(50.0, 1000.0)), st.floats(0.05, 1.0))
@settings(max_examples=examples(20), deadline=None)
def test_possible_curves_begin_at_full_speed_and_savings_grow_with_the_slowdown(
    power_w: float, limit_w: float | None, working: float
) -> None:
    curves = possible_curves(CLOCKS + LIMITS, _loop(power_w, limit_w, working))

    for top in (CLOCKS[0], LIMITS[0]):
        column = curves.settings.index(top)
        assert np.allclose(curves.times[:, column], 1.0)
        assert np.allclose(curves.energies[:, column], 1.0)
    clocks = possible_curves(CLOCKS, _loop(power_w, limit_w, working))
    assert (np.diff(clocks.times.mean(axis=0)) >= 0).all()
    savings = [_median_saving(clocks, ratio) for ratio in (0.0, 0.01, 0.02, 0.05)]
    assert savings == sorted(savings)
    assert abs(savings[0]) < 0.01


@given(st.floats(0.15, 1.0), st.floats(0.4, 0.9), st.floats(0.5, 0.82), st.floats(1.15, 1.45), st.integers(0, 1000))
@settings(max_examples=examples(60), deadline=None)
def test_up_to_the_slowest_measured_point_the_saving_is_known_within_two_points(
    share: float, dynamic: float, knee: float, top: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    points = {}
    for clock in (0.985, 0.94, 0.9):
        slowdown = share * (1 / clock - 1)
        energy = _truth(share, dynamic, knee, top, slowdown)[0] * (1 + 0.003 * random.standard_normal())
        points[Setting(Lever.CLOCKS, round(2000 * clock))] = MeasuredPoint(1 + slowdown, energy, ERRORS)
    curves = possible_curves(CLOCKS, _loop()).given(points, full_speed=ERRORS)

    for ratio in (0.01, 0.02, 0.05):
        if ratio <= share * (1 / 0.9 - 1):
            wanted = max(1 - _truth(share, dynamic, knee, top, ratio * k / 10)[0] for k in range(11))
            assert abs(_median_saving(curves, ratio) - wanted) <= 0.02


def test_a_measured_power_limit_is_met_by_the_curves_and_narrows_its_neighbours() -> None:
    prior = possible_curves(LIMITS, _loop(380.0, 400.0))
    at, near = (prior.settings.index(Setting(Lever.POWER_LIMITS, watts)) for watts in (300, 310))

    curves = prior.given({prior.settings[at]: MeasuredPoint(1.1, 0.88, ERRORS)}, full_speed=ERRORS)

    assert abs(curves.times[:, at].mean() - 1.1) < 0.003
    assert abs(curves.energies[:, at].mean() - 0.88) < 0.006
    assert curves.times[:, near].std() < 0.5 * prior.times[:, near].std()


def test_measurements_that_no_possible_curve_explains_still_leave_many() -> None:
    far = {CLOCKS[10]: MeasuredPoint(1.02, 0.4, ERRORS)}
    curves = possible_curves(CLOCKS, _loop()).given(far, full_speed=ERRORS)

    assert len(np.unique(curves.logs[:, -1])) >= 50
    assert np.isfinite(curves.logs).all()


def test_settings_that_are_not_among_those_of_the_curves_change_nothing() -> None:
    curves = possible_curves(CLOCKS, _loop())

    assert curves.given({LIMITS[1]: MeasuredPoint(1.1, 0.5, ERRORS)}, full_speed=ERRORS) is curves


def test_coarse_settings_leave_a_part_of_the_slowdown_unused() -> None:
    fine, coarse = (possible_curves(own, _loop()) for own in (CLOCKS, CLOCKS[::8]))

    assert _median_saving(coarse, 0.01) < _median_saving(fine, 0.01)


@given(_ratios, _ratios)
@settings(max_examples=examples(20), deadline=None)
def test_a_cost_decides_how_much_of_the_slowdown_is_used(eta: float, weight: float) -> None:
    curves = possible_curves(CLOCKS, _loop())
    permitted = np.full(len(curves.logs), 0.05)

    def cost(times: FloatArray, energies: FloatArray) -> FloatArray:
        return np.asarray(eta * energies + (1 - eta) * (1 + weight) * times, dtype=np.float64)

    assert np.median(curves.savings(permitted, cost)) <= np.median(curves.savings(permitted)) + 1e-9
