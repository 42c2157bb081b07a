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
    constant_latency,
)
from tests.support.examples import examples

TOP_MHZ = 1410


def looked_at(settle_s: float, look_every_s: float, *, watched_s: float = math.inf) -> tuple[float, float | None]:
    """Return the last look that did not show the clock and the first that did, of looks at a fixed distance."""
    looks = math.ceil(settle_s / look_every_s)
    if looks * look_every_s > watched_s:
        return math.floor(watched_s / look_every_s) * look_every_s, None
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
