"""Switch latency: the true value is found within the resolution of the readings."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.measurement.switch_calibration import SwitchCalibration
from gpuenergyd.core.pipeline.switching import (
    ENOUGH,
    ClockRegion,
    Direction,
    LatencyBasis,
    ObservedSwitch,
    RegionLatency,
    SwitchLatency,
    constant_latency,
    direction_of,
    latency_quantiles_s,
    region_of,
)
from tests.support.examples import examples

TOP_MHZ = 1410


def looked_at(settle_s: float, look_every_s: float) -> tuple[float, float | None]:
    """Return the last look that did not show the clock and the first that did, of looks at a fixed distance."""
    looks = math.ceil(settle_s / look_every_s)
    return max(0, looks - 1) * look_every_s, looks * look_every_s


def switch(
    from_mhz: int, to_mhz: int, *, settle_s: float, call_s: float = 0.004, look_every_s: float = 0.001
) -> ObservedSwitch:
    return ObservedSwitch(from_mhz, to_mhz, 0.0005, call_s, *looked_at(settle_s, look_every_s))


def calibration(prior_s: float = 0.03) -> SwitchCalibration:
    return SwitchCalibration(TOP_MHZ, constant_latency(prior_s))


def test_changes_of_an_earlier_daemon_count_until_this_one_has_measured_enough() -> None:
    learning = calibration()
    learning.restore([switch(1410, 1110, settle_s=0.0202)] * ENOUGH)

    restored = learning.latency
    news = [learning.observe(switch(1410, 1110, settle_s=0.0202)) for _ in range(ENOUGH)]

    assert (restored.basis, learning.latency.basis) == (LatencyBasis.MEASURED_EARLIER, LatencyBasis.MEASURED)
    assert restored.raise_s == pytest.approx(0.0247, abs=0.0005)
    assert news == [False] * (ENOUGH - 1) + [True]
    assert (learning.num_seen, learning.num_earlier) == (ENOUGH, ENOUGH)


def test_too_few_changes_of_an_earlier_daemon_are_no_estimate_but_count_towards_one() -> None:
    learning = calibration()
    learning.restore([switch(1410, 1110, settle_s=0.0202)] * (ENOUGH - 1))

    before = learning.latency
    assert learning.observe(switch(1410, 1110, settle_s=0.0202))
    assert (before.basis, learning.latency.basis) == (LatencyBasis.ASSUMED, LatencyBasis.MEASURED_EARLIER)


@settings(max_examples=examples(60), deadline=None)
@given(
    raise_s=st.floats(0.002, 0.3),
    lower_s=st.floats(0.002, 0.3),
    look_every_s=st.sampled_from([0.001, 0.002, 0.01, 0.05]),
    seed=st.integers(0, 10**6),
)
def test_the_true_latency_is_found_within_half_the_reading_interval(
    raise_s: float, lower_s: float, look_every_s: float, seed: int
) -> None:
    rng = random.Random(seed)
    learning = calibration()
    for _ in range(80):
        for clocks, settle_s in (((1410, 1110), lower_s), ((1110, 1410), raise_s)):
            true_s = settle_s * rng.uniform(0.9, 1.1)
            learning.observe(switch(*clocks, settle_s=true_s, look_every_s=look_every_s))

    whole = {e.direction: e for e in learning.estimates() if e.from_region is None}
    handed_over_s = 0.0045
    for direction, settle_s in ((Direction.RAISE, raise_s), (Direction.LOWER, lower_s)):
        estimate = whole[direction]
        assert estimate.median_s is not None
        assert estimate.high_s is not None
        reach_s = look_every_s / 2 + 0.05 * settle_s
        assert estimate.median_s - handed_over_s == pytest.approx(settle_s, abs=reach_s)
        assert estimate.high_s - handed_over_s <= 1.1 * settle_s + look_every_s / 2 + 1e-9
        assert estimate.resolution_s == pytest.approx(look_every_s)


def test_latency_is_estimated_by_direction_and_region() -> None:
    learning = calibration()
    for _ in range(30):
        learning.observe(switch(1410, 1200, settle_s=0.002))
        learning.observe(switch(1200, 900, settle_s=0.002))
        learning.observe(switch(900, 1410, settle_s=0.030))
        learning.observe(switch(900, 1200, settle_s=0.008))

    latency = learning.latency
    assert latency.late_s(900, 1410) == pytest.approx(0.0345, abs=0.0006)
    assert latency.late_s(900, 1200) == pytest.approx(0.0125, abs=0.0006)
    assert latency.late_s(1200, 1410) == pytest.approx(0.0345, abs=0.0006)  # never seen: as others to that target
    assert latency.typical_s(1410, 900) == pytest.approx(0.0065, abs=0.0006)
    assert latency.lower_s == pytest.approx(0.0065, abs=0.0006)
    regions = {(e.direction, e.from_region, e.to_region) for e in learning.estimates() if e.from_region is not None}
    assert (Direction.RAISE, ClockRegion.LOW, ClockRegion.HIGH) in regions
    assert len(regions) == 4


@pytest.mark.parametrize("then_s", [0.080, 0.005])
def test_changes_in_a_row_that_contradict_what_is_known_replace_it(then_s: float) -> None:
    learning = calibration()
    for _ in range(200):
        learning.observe(switch(1410, 900, settle_s=0.020))
        learning.observe(switch(900, 1410, settle_s=0.020))

    for _ in range(ENOUGH + 4):
        learning.observe(switch(1410, 900, settle_s=then_s))
        learning.observe(switch(900, 1410, settle_s=then_s))

    assert learning.latency.raise_s == pytest.approx(then_s + 0.0045, abs=0.001)
    assert all(own.late_s == pytest.approx(then_s + 0.0045, abs=0.001) for own in learning.latency.targets)


def test_a_change_whose_bounds_are_narrowed_contradicts_once() -> None:
    learning, num_kept = calibration(), []
    for _ in range(200):
        learning.observe(switch(1410, 900, settle_s=0.02))
    wide = ObservedSwitch(1410, 900, 0.0, 0.004, 0.08, 0.18, clock_age_s=0.1)

    for _ in range(ENOUGH):
        learning.observe(wide)
        learning.observe(switch(1410, 900, settle_s=0.12), in_place_of=wide)
        num_kept.append(len(learning.switches))

    assert num_kept[-2:] == [200 + ENOUGH - 1, ENOUGH]


def test_rare_long_changes_and_clocks_that_are_new_contradict_nothing() -> None:
    learning = calibration()
    for k in range(400):
        learning.observe(switch(1410, 900, settle_s=0.3 if k % 8 == 0 else 0.020))
        learning.observe(switch(900, 1200 + k % 8, settle_s=0.1))

    assert len(learning.switches) == 800


def test_the_excess_is_the_mean_time_of_changes_beyond_their_late_latency() -> None:
    learning = calibration()
    for k in range(400):
        learning.observe(switch(900, 1410, settle_s=0.3155 if k % 100 == 50 else 0.0155))

    assert learning.latency.raise_s == pytest.approx(0.02, abs=0.0006)
    assert learning.latency.excess_s == pytest.approx(0.01 * 0.3, abs=0.001)


def test_changes_of_usual_latency_have_hardly_any_excess() -> None:
    rng, learning = random.Random(3), calibration()
    for _ in range(400):
        learning.observe(switch(900, 1410, settle_s=0.02 * rng.uniform(0.9, 1.1)))

    assert learning.latency.excess_s < 0.0005


def seen(latency_s: float, from_mhz: int = 1000, to_mhz: int = 500) -> ObservedSwitch:
    return ObservedSwitch(from_mhz, to_mhz, 0.0, 0.0, latency_s, latency_s)


def unseen(latency_s: float) -> ObservedSwitch:
    return ObservedSwitch(1000, 500, 0.0, 0.0, latency_s, None)


def test_latency_is_the_sum_of_handover_call_and_settling() -> None:
    one = ObservedSwitch(1000, 500, handover_s=0.1, call_s=0.02, settle_low_s=0.003, settle_high_s=0.005)

    assert one.settle_s == pytest.approx(0.004)
    assert one.latency_s == pytest.approx(0.124)
    assert ObservedSwitch(1000, 500, 0.1, 0.02, 0.003, None).latency_s == pytest.approx(0.123)


def test_bounds_of_clocks_that_are_read_late_are_an_age_apart_unless_readings_were_held_up() -> None:
    bounds_s = [(0.02, 0.125), (0.0, 0.06), (0.0, 0.103), (0.02, 0.2), (0.02, None)]

    found = [ObservedSwitch(1000, 500, 0.0, 0.0, *own, clock_age_s=0.1).bounds_s for own in bounds_s]

    assert found == [(pytest.approx(0.025), 0.125), (0.0, 0.06), (pytest.approx(0.003), 0.103), *bounds_s[3:]]


def test_regions_begin_at_75_and_90_percent_of_the_maximum() -> None:
    assert [region_of(mhz, 1000) for mhz in (1000, 900, 899, 750, 749, 1)] == [
        ClockRegion.HIGH, ClockRegion.HIGH, ClockRegion.MIDDLE, ClockRegion.MIDDLE, ClockRegion.LOW, ClockRegion.LOW,
    ]  # fmt: skip


def test_a_switch_to_the_same_clock_counts_as_lowering() -> None:
    assert [direction_of(500, to) for to in (499, 500, 501)] == [Direction.LOWER, Direction.LOWER, Direction.RAISE]
    assert seen(0.1, 500, 501).direction is Direction.RAISE


def test_without_regions_each_direction_has_its_figures() -> None:
    latency = SwitchLatency(raise_s=0.3, lower_s=0.1, typical_raise_s=0.2, max_sm_clock_mhz=1000)

    assert [latency.late_s(500, to) for to in (499, 500, 501)] == [0.1, 0.1, 0.3]
    assert [latency.typical_s(500, to) for to in (499, 500, 501)] == [0.1, 0.1, 0.2]
    assert SwitchLatency(raise_s=0.3, lower_s=0.1).typical_s(500, 501) == 0.3
    assert constant_latency(0.4).late_s(1, 2) == constant_latency(0.4).late_s(2, 1) == 0.4
    assert constant_latency(0.4).call_s == 0.0


def test_a_region_takes_precedence_over_its_direction() -> None:
    own = RegionLatency(Direction.RAISE, ClockRegion.LOW, ClockRegion.HIGH, typical_s=0.5, late_s=0.7)
    latency = SwitchLatency(0.3, 0.1, max_sm_clock_mhz=1000, regions=(own,))

    assert (latency.typical_s(500, 950), latency.late_s(500, 950)) == (0.5, 0.7)
    assert (latency.typical_s(500, 800), latency.late_s(500, 800)) == (0.3, 0.3)
    assert (latency.typical_s(800, 950), latency.late_s(950, 500)) == (0.3, 0.1)


def test_quantiles_of_latency() -> None:
    ten = [seen(k / 1000) for k in range(1, 11)]

    assert latency_quantiles_s(ten, (0.1, 0.2, 0.5, 0.51, 1.0)) == pytest.approx((0.001, 0.002, 0.005, 0.006, 0.01))


def test_censored_changes_count_with_the_watched_time_and_after_measured_ones() -> None:
    """Kaplan and Meier: of four, one gone unseen after 2 ms leaves 3/4 * 1/2, then nothing."""
    four = [seen(0.001), unseen(0.002), seen(0.003), seen(0.004)]

    assert latency_quantiles_s(four, (0.25, 0.26, 0.625, 0.63)) == (0.001, 0.003, 0.003, 0.004)
    assert latency_quantiles_s([unseen(0.1)], (0.1,)) == latency_quantiles_s([], (0.1,)) == (None,)
    assert latency_quantiles_s([unseen(0.002), seen(0.002)], (0.5,)) == (0.002,)


def calibrated(*switches: ObservedSwitch, prior_s: float = 9.0) -> SwitchCalibration:
    made = SwitchCalibration(1000, constant_latency(prior_s))
    for one in switches:
        made.observe(one)
    return made


def test_an_estimate_requires_twelve_changes_of_one_direction() -> None:
    assert ENOUGH == 12
    known = calibrated(*[seen(0.1)] * 11)
    assert known.latency == constant_latency(9.0)
    assert not known.observe(seen(0.3, 500, 1000))
    assert known.latency.basis is LatencyBasis.ASSUMED  # twelve, but of two directions

    assert known.observe(seen(0.1))
    assert (known.latency.lower_s, known.latency.raise_s, known.latency.typical_raise_s) == (0.1, 0.1, 0.1)
    assert (known.num_seen, known.num_unseen) == (13, 0)


def test_clock_raises_use_the_late_latency_and_reductions_the_typical_one() -> None:
    """Of twelve, six are half and eleven are nine tenths; reductions that were not seen are as slow as raises."""
    latency = calibrated(*[seen(k / 100, 500, 1000) for k in range(1, 13)]).latency

    assert (latency.typical_raise_s, latency.raise_s, latency.lower_s) == (0.06, 0.11, 0.06)
    assert (latency.basis, latency.max_sm_clock_mhz) == (LatencyBasis.MEASURED, 1000)
    assert latency.regions == tuple(
        RegionLatency(Direction.RAISE, region, ClockRegion.HIGH, 0.06, 0.11) for region in ClockRegion
    )


def test_an_unknown_quantile_is_the_longest_observation() -> None:
    known = calibrated(*[seen(0.1)] * 3, *[unseen(0.4)] * 9)

    assert known.latency.lower_s == 0.4
    assert (known.num_seen, known.num_unseen) == (3, 9)
    (whole, region) = known.estimates()
    assert (whole.num_seen, whole.num_unseen, whole.median_s) == (3, 9, None)
    assert (whole.from_region, region.from_region, region.to_region) == (None, ClockRegion.HIGH, ClockRegion.LOW)


def test_an_estimate_includes_call_settling_and_resolution() -> None:
    looks = [ObservedSwitch(1000, 500, 0.0, 0.01 * k, 0.1 * k, 0.1 * k + 0.02 * k) for k in (1, 2, 3)]

    (whole, _) = calibrated(*looks, ObservedSwitch(1000, 500, 0.0, 0.02, 0.5, None)).estimates()

    assert whole.call_s == pytest.approx(0.02)
    assert whole.resolution_s == pytest.approx(0.04)
    assert whole.settle_s == pytest.approx((0.22 + 0.33) / 2)
    (blind, _) = calibrated(unseen(0.5)).estimates()
    assert blind.resolution_s == 0.0
    assert calibrated().estimates() == ()


def test_after_the_first_estimate_every_eighth_change_updates_it() -> None:
    known = calibrated(*[seen(0.1)] * 12)

    news = [known.observe(seen(0.5)) for _ in range(24)]

    assert [k + 1 for k, is_news in enumerate(news) if is_news] == [8, 16]
    assert known.latency.lower_s == 0.5


@pytest.mark.parametrize(("later_s", "is_news"), [(0.124, False), (0.126, True), (0.076, False), (0.074, True)])
def test_a_change_of_25_percent_is_reported_and_smaller_ones_are_known(later_s: float, *, is_news: bool) -> None:
    known = calibrated(*[seen(0.1)] * 12)

    news = [known.observe(seen(later_s)) for _ in range(600)]

    assert any(news) is is_news
    assert known.latency.lower_s == later_s
    assert known.reported.lower_s == pytest.approx(later_s if is_news else 0.1)


def test_a_new_region_is_reported() -> None:
    known = calibrated(*[seen(0.1)] * 16)

    news = [known.observe(seen(0.1, 1000, 800)) for _ in range(12)]

    assert [k + 1 for k, found in enumerate(news) if found] == [12]


def test_the_last_2048_changes_are_kept() -> None:
    known = calibrated(*[unseen(0.9)] * 3, *[seen(0.1)] * 2046)

    (whole, _) = known.estimates()

    assert (whole.num_seen, whole.num_unseen) == (2046, 2)
    assert (known.num_seen, known.num_unseen) == (2046, 3)


def test_a_target_with_enough_changes_has_its_own_latency_and_others_that_of_their_region() -> None:
    slow = [ObservedSwitch(500, 950, 0.0, 0.0, 0.08, 0.08)] * 12
    quick = [ObservedSwitch(500, 990, 0.0, 0.0, 0.01, 0.01)] * 16

    latency = calibrated(*slow, *quick).latency

    assert latency.late_s(500, 950) == latency.typical_s(500, 950) == pytest.approx(0.08)
    assert latency.late_s(500, 990) == pytest.approx(0.01)
    assert latency.late_s(500, 970) == pytest.approx(0.08), "the late one of all to this region"


def test_a_delay_of_reports_moves_every_latency_and_none_below_zero() -> None:
    latency = calibrated(*[ObservedSwitch(500, 990, 0.0, 0.0, 0.01, 0.01)] * 12).latency

    assert latency.delayed(0.02).late_s(500, 990) == pytest.approx(0.03)
    assert latency.delayed(0.02).raise_s == pytest.approx(0.03)
    assert latency.delayed(-1.0).late_s(500, 990) == 0.0
