"""Calibration: every direction and target clock is visited often enough, and the statistics count what was not seen."""

from collections import Counter

import pytest

from gpuenergyd.core.pipeline.switching import ENOUGH, ClockRegion, Direction, ObservedSwitch, direction_of, region_of
from gpuenergyd_doctor.walk import calibrated_targets, calibration_clocks_mhz, calibration_walk_mhz
from gpuenergyd_sim.driver.device_parameters import MODELS


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.key)
def test_the_clocks_of_every_model_cover_all_regions_from_the_maximum_on(model: object) -> None:
    supported = MODELS[getattr(model, "key")].supported_sm_clocks_mhz  # noqa: B009

    clocks_mhz = calibration_clocks_mhz(supported)

    assert clocks_mhz[0] == supported[0]
    assert set(clocks_mhz) <= set(supported)
    assert Counter(region_of(clock, supported[0]) for clock in clocks_mhz) == dict.fromkeys(ClockRegion, 2)


@pytest.mark.parametrize(
    ("supported", "chosen"), [((), ()), ((1410,), (1410,)), ((1410, 1395), (1410,)), ((1410, 1000), (1410, 1000))]
)
def test_clocks_too_close_for_a_reading_are_not_chosen(supported: tuple[int, ...], chosen: tuple[int, ...]) -> None:
    assert calibration_clocks_mhz(supported) == chosen


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clocks_mhz", [(1410, 900), (1410, 1290, 1200, 1095, 960, 780)])
def test_a_walk_reaches_each_clock_often_enough_in_each_direction(clocks_mhz: tuple[int, ...], seed: int) -> None:
    walk = calibration_walk_mhz(clocks_mhz, num_changes=ENOUGH, seed=seed)

    steps = list(zip((clocks_mhz[0], *walk), walk, strict=False))
    visits = Counter((direction_of(*step), step[1]) for step in steps)
    expected = {(Direction.RAISE, c) for c in clocks_mhz[:-1]} | {(Direction.LOWER, c) for c in clocks_mhz[1:]}
    assert set(visits) == expected
    assert min(visits.values()) >= ENOUGH
    assert all(source != target for source, target in steps)
    assert len(walk) < 2 * ENOUGH * len(expected)
    assert walk == calibration_walk_mhz(clocks_mhz, num_changes=ENOUGH, seed=seed)


def test_the_statistics_are_by_direction_and_target_with_raises_first() -> None:
    quick = [ObservedSwitch(900, 1410, 0.0, 0.004, 0.0, 0.002 + 0.002 * k) for k in range(9)]
    never = ObservedSwitch(900, 1410, 0.0, 0.004, 0.1, None)
    lower = ObservedSwitch(1410, 900, 0.001, 0.006, 0.002, 0.004)

    raised, lowered = calibrated_targets([lower, *quick, never])

    assert (raised.direction, raised.sm_clock_mhz, raised.num_changes, raised.num_unseen) == ("raise", 1410, 10, 1)
    assert raised.median_s == pytest.approx(0.009)
    assert raised.late_s == pytest.approx(0.013)
    assert (raised.longest_s, raised.call_s) == pytest.approx((0.104, 0.004))
    assert (lowered.direction, lowered.sm_clock_mhz, lowered.num_unseen) == ("lower", 900, 0)
    assert lowered.median_s == pytest.approx(0.010)


def test_a_quantile_that_too_few_changes_reached_is_unknown() -> None:
    (only,) = calibrated_targets([ObservedSwitch(900, 1410, 0.0, 0.004, 0.1, None)] * 3)

    assert (only.median_s, only.late_s, only.num_unseen) == (None, None, 3)
