"""Ramps of a host in virtual time: at start, stall, checkpoint and a known end, with GPUs that follow known laws."""

from bisect import bisect_right
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.clock_request import Ceiling
from gpuenergyd_power.rules.backstop import GpuPower
from gpuenergyd_power.rules.ramp import RampJob, RampLimiter, RampStage
from tests.plugins.power.ramped_host import (
    CLOCKS_MHZ,
    ITERATION_S,
    NUM_GPUS,
    RampedHost,
    steady_after,
    waiting_w,
    working_w,
)
from tests.support.examples import examples


def _wave_of_pipeline(now_s: float) -> float:
    """Return the share of the GPUs of a pipeline that work: bubbles at both ends of each iteration."""
    place = (now_s % ITERATION_S) / ITERATION_S
    return 0.0 if now_s < 5 else min(1.0, 0.25 + 3 * min(place, 1 - place))


@pytest.mark.parametrize("ramp_w_per_s", [60.0, 150.0, 400.0])
def test_the_start_of_a_job_rises_no_faster_than_asked(ramp_w_per_s: float) -> None:
    host = RampedHost(RampLimiter(ramp_w_per_s), steady_after(5.0))
    host.run(10.0 + 3000 / ramp_w_per_s + 60)
    assert host.stage is RampStage.FREE
    assert host.clocks_mhz[-1] == 1410
    least_w = NUM_GPUS * (0.9 * working_w(210) + 0.1 * waiting_w(210) - waiting_w(210))
    assert host.steepest_w() <= max(ramp_w_per_s, least_w) * 1.05
    full = RampedHost(None, steady_after(5.0))
    full.run(20.0)
    assert full.steepest_w() > 1200, "without the limit it is a step"


def test_a_ramp_takes_no_more_than_a_few_times_what_it_must() -> None:
    host = RampedHost(RampLimiter(150.0), steady_after(5.0))
    host.run(60.0)
    reached_s = next(at_s for (at_s, _), mhz in zip(host.trace, host.clocks_mhz, strict=True) if mhz == 1410)
    must_s = NUM_GPUS * 0.9 * (working_w(1410) - working_w(210)) / 150.0
    assert must_s <= reached_s - 5.0 <= 4 * must_s


@pytest.mark.parametrize("stall_s", [4.0, 12.0, 40.0])
@pytest.mark.parametrize("is_reported", [True, False])
def test_work_that_comes_back_after_a_stall_or_checkpoint_rises_no_faster(stall_s: float, *, is_reported: bool) -> None:
    host = RampedHost(
        RampLimiter(200.0), lambda now_s: 0.9 if 5 <= now_s < 80 or now_s >= 80 + stall_s else 0.0, is_reported
    )
    host.run(81.0)
    assert host.stage is RampStage.FREE
    host.run(stall_s + 60)
    assert RampStage.FREE is host.stage
    assert host.clocks_mhz[-1] == 1410
    assert host.steepest_w(82.0) <= 200.0 * 1.05
    assert min(mhz for (at_s, _), mhz in zip(host.trace, host.clocks_mhz, strict=True) if at_s > 80) == 210


@settings(max_examples=examples(15), deadline=None)
@given(
    parts=st.lists(st.tuples(st.floats(0.3, 30.0), st.floats(0.3, 30.0), st.floats(0.5, 1.0)), min_size=1, max_size=5),
    ramp_w_per_s=st.floats(160.0, 500.0),
    is_reported=st.booleans(),
)
def test_work_that_comes_and_goes_never_rises_faster_once_it_has_rested(
    *, parts: list[tuple[float, float, float]], ramp_w_per_s: float, is_reported: bool
) -> None:
    """Gaps below the time to a rest are part of the wave: after those power may return at once."""
    until = list(accumulate((length for pause_s, work_s, _ in parts for length in (pause_s, work_s)), initial=3.0))

    def load(now_s: float) -> float:
        place = bisect_right(until, now_s) - 1
        return parts[place // 2][2] if 0 <= place < 2 * len(parts) and place % 2 else 0.0

    host = RampedHost(RampLimiter(ramp_w_per_s), load, is_reported)
    host.run(until[-1] + 1)
    begins_s = [until[2 * k + 1] for k, (pause_s, _, _) in enumerate(parts) if pause_s > 2 * ITERATION_S + 2.5]
    for begin_s in begins_s:
        rise = [(at_s, w) for at_s, w in host.trace if begin_s - 2 <= at_s <= begin_s + 0.3 + 2]
        part = RampedHost(None, load, trace=rise)
        assert part.steepest_w() <= ramp_w_per_s * 1.05


def test_the_wave_of_a_pipeline_and_an_evaluation_are_no_rest() -> None:
    host = RampedHost(RampLimiter(200.0), _wave_of_pipeline)
    host.run(60.0)
    assert host.stage is RampStage.FREE
    host.run(60.0)
    host.is_reported = False
    host.load = lambda _: 0.7
    host.run(60.0)
    assert set(host.clocks_mhz[-1000:]) == {1410}


def test_a_plan_that_draws_far_less_is_no_rest_while_iterations_are_reported() -> None:
    host = RampedHost(RampLimiter(200.0), steady_after(5.0))
    host.run(60.0)
    assert host.stage is RampStage.FREE
    host.load = lambda _: 0.05
    host.run(60.0)
    assert set(host.clocks_mhz[-550:]) == {1410}
    host.load = lambda _: 0.0
    host.run(10.0)
    assert host.stage.value == "resting", "without iterations it is"


def test_a_job_of_known_length_is_lowered_before_its_end() -> None:
    host = RampedHost(RampLimiter(200.0), steady_after(5.0), total=60)
    host.run(200.0)
    assert host.done >= 60
    ended_s = next(at_s for at_s, power_w in host.trace if at_s > 60 and power_w < NUM_GPUS * 53)
    assert host.steepest_w(40.0, is_rise=False) <= 200.0 * 1.05
    unlimited = RampedHost(None, steady_after(5.0), total=60)
    unlimited.run(200.0)
    assert unlimited.steepest_w(40.0, is_rise=False) > 1200
    first_s = next(at_s for at_s, power_w in unlimited.trace if at_s > 60 and power_w < NUM_GPUS * 53)
    assert ended_s - first_s < 60, "it ends later by about the time of both ramps"


def test_a_job_that_goes_on_beyond_its_announced_end_is_raised_again() -> None:
    host = RampedHost(RampLimiter(200.0), steady_after(5.0), total=40)
    host.run(70.0)
    assert host.stage is RampStage.ENDING
    host.total = None
    host.run(60.0)
    assert (host.stage, host.clocks_mhz[-1]) == (RampStage.FREE, 1410)
    assert host.steepest_w() <= 200.0 * 1.05


def test_a_running_job_is_free_when_the_daemon_starts_and_unknown_power_raises_nothing() -> None:
    limiter = RampLimiter(200.0)
    reading = GpuPower(None, 1410, CLOCKS_MHZ, None)
    assert not limiter.observe(0.0, {"GPU-0": reading}, [RampJob("old", ("GPU-0",), 17, 1.0)])
    assert limiter.ceilings == {}
    for k in range(100):
        limiter.observe(0.1 * k, {"GPU-0": reading}, [RampJob("new", ("GPU-0",), 0 if k < 50 else 1)])
    assert limiter.jobs["new"].stage is RampStage.RISING
    assert limiter.ceilings == {"GPU-0": Ceiling(210)}
    limiter.observe(20.0, {}, [])
    assert (limiter.ceilings, limiter.jobs) == ({}, {})


def test_gpus_that_cannot_be_set_or_have_one_clock_have_no_ceiling() -> None:
    limiter = RampLimiter(200.0)
    readings = {
        "GPU-0": GpuPower(50.0, 1410, CLOCKS_MHZ, None, can_change=False),
        "GPU-1": GpuPower(50.0, 1410, (1410,), None),
        "GPU-2": GpuPower(50.0, 1410, CLOCKS_MHZ, None, can_set_clocks=False),
    }
    limiter.observe(0.0, readings, [RampJob("job", (*readings, "GPU-9"), 0)])
    assert limiter.ceilings == {}
