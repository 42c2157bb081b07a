"""The price of set calls is found with the curves of times, and no price where there is none."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.measurement.observation import CallSample, ClockShare, InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd_policies.learning.calls import CallCost, call_cost
from gpuenergyd_policies.learning.curves import CurveModel
from gpuenergyd_policies.learning.deviations import TIME
from gpuenergyd_policies.learning.evidence import times_seen
from gpuenergyd_policies.learning.seen import ClassAtFullSpeed
from gpuenergyd_policies.learning.shape import GENERIC

TOP_MHZ = 1410
LOW_MHZ = (1215, 1080, 930)
LATENCY_S = 0.008
KEY = InstructionClass(0, InstructionKind.F)
OF_TIME = CurveModel(GENERIC.time, TIME)


def time_s(sm_clock_mhz: int) -> float:
    return 0.012 + 0.038 * TOP_MHZ / sm_clock_mhz


CLASSES = [ClassAtFullSpeed(KEY, tuple(range(TOP_MHZ, 780, -15)), time_s(TOP_MHZ), float(TOP_MHZ))]


def sample_with_call(before_mhz: int, after_mhz: int, cost: CallCost, noise: float) -> IterationObservation:
    """Return an iteration of instructions in which a call comes first: it stops them, then the clock changes."""
    left = (1 + noise) - (LATENCY_S - cost.stall_s) / time_s(before_mhz)
    before = ClockShare(before_mhz, LATENCY_S - cost.delay_s)
    after = ClockShare(after_mhz, left * time_s(after_mhz) + cost.delay_s)
    shares = tuple(sorted((before, after), key=lambda share: -share.sm_clock_mhz))
    call = CallSample(KEY, before, after, 8)
    sample = InstructionSample(0, InstructionKind.F, shares, 8, num_calls=1.0)
    return IterationObservation(0, "tuned-1", 1.0, (sample,), (), call_samples=(call,))


def found(cost: CallCost, *, noise_ratio: float = 0.0, seed: int = 0, num_alone: int = 2) -> CallCost:
    """Return what is found from iterations with and without calls."""
    draws = random.Random(seed)

    def noise() -> float:
        return draws.gauss(0.0, noise_ratio)

    changes = [(low, TOP_MHZ) for low in LOW_MHZ] * 2 + [(TOP_MHZ, low) for low in LOW_MHZ]
    seen = [sample_with_call(before, after, cost, noise()) for before, after in changes]
    for low in LOW_MHZ:
        share = ClockShare(low, time_s(low) * (1 + noise()))
        alone = InstructionSample(0, InstructionKind.F, (share,), 8)
        seen += [IterationObservation(0, "tuned-1", 1.0, (alone,), ())] * num_alone
    return call_cost(CLASSES, times_seen(seen), OF_TIME)


@given(stall_ms=st.sampled_from([0.5, 1.0, 3.0]), delay_ms=st.sampled_from([-2.0, 2.0, 4.0]))
def test_stall_and_delay_are_found(stall_ms: float, delay_ms: float) -> None:
    cost = CallCost(stall_ms / 1000, delay_ms / 1000)

    known = found(cost)

    assert known.stall_s == pytest.approx(cost.stall_s, rel=0.15, abs=2e-4)
    assert known.delay_s == pytest.approx(cost.delay_s, rel=0.15, abs=6e-4)


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_no_price(seed: int) -> None:
    known = found(CallCost.none(), noise_ratio=0.003, seed=seed)

    assert known.stall_s == 0.0
    assert abs(known.delay_s) < 0.002


def test_stalls_are_found_where_no_instruction_runs_without_a_call() -> None:
    assert found(CallCost(0.003, 0.0), num_alone=0).stall_s == pytest.approx(0.003, rel=0.3)


def test_a_few_calls_show_no_price() -> None:
    few = [sample_with_call(1080, TOP_MHZ, CallCost(0.003, 0.0), 0.0)]

    assert call_cost(CLASSES, times_seen(few), OF_TIME) == CallCost.none()
