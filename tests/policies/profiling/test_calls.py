"""The price of set calls is found from the instructions in which they began, and no price where there is none."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.measurement.observation import (
    CallSample,
    ClockShare,
    InstructionSample,
    IterationObservation,
)
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd_policies.profiling.calls import CallCost, fit_call_cost, fit_times_and_calls
from gpuenergyd_policies.profiling.times import fit_times

TOP_MHZ = 1410
CLOCKS_MHZ = (1410, 1215, 1080, 930)
LATENCY_S = 0.008
F = InstructionKind.F


def time_s(sm_clock_mhz: int) -> float:
    return 0.012 + 0.038 * TOP_MHZ / sm_clock_mhz


def with_call(before_mhz: int, after_mhz: int, cost: CallCost, noise: float = 0.0) -> tuple[float, float]:
    """Return the reported times at both clocks: the stall comes first, the report before the effect by the delay."""
    left = (1 + noise) - (LATENCY_S - cost.stall_s) / time_s(before_mhz)
    after_s = left * time_s(after_mhz)
    return LATENCY_S - cost.delay_s, after_s + cost.delay_s


def observations(cost: CallCost, *, noise_ratio: float = 0.0, seed: int = 0) -> list[IterationObservation]:
    draws = random.Random(seed)

    def noise() -> float:
        return draws.gauss(0.0, noise_ratio)

    key = InstructionClass(0, F)
    made = []
    for k in range(8):
        share = ClockShare(TOP_MHZ, time_s(TOP_MHZ) * (1 + noise()))
        made.append(IterationObservation(k, "baseline", 1.0, (InstructionSample(0, F, (share,), 8),), ()))
    for k, (before_mhz, after_mhz) in enumerate(
        [(low, TOP_MHZ) for low in CLOCKS_MHZ[1:]] * 2 + [(TOP_MHZ, low) for low in CLOCKS_MHZ[1:]]
    ):
        before_s, after_s = with_call(before_mhz, after_mhz, cost, noise())
        shares = (ClockShare(before_mhz, before_s), ClockShare(after_mhz, after_s))
        made.append(
            IterationObservation(
                8 + k,
                f"profile-{k}",
                1.0,
                (InstructionSample(0, F, tuple(sorted(shares, key=lambda s: -s.sm_clock_mhz)), 8, num_calls=1.0),),
                (),
                call_samples=(CallSample(key, *shares, 8),),
            )
        )
    return made


@given(stall_ms=st.sampled_from([0.5, 1.0, 3.0]), delay_ms=st.sampled_from([-2.0, 2.0, 4.0]))
def test_stall_and_delay_are_found(stall_ms: float, delay_ms: float) -> None:
    cost = CallCost(stall_ms / 1000, delay_ms / 1000)
    _, found = fit_times_and_calls(observations(cost))
    assert found.stall_s == pytest.approx(cost.stall_s, rel=0.1, abs=1e-4)
    assert found.delay_s == pytest.approx(cost.delay_s, rel=0.1, abs=2e-4)


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_no_price(seed: int) -> None:
    seen = observations(CallCost(), noise_ratio=0.003, seed=seed)
    found = fit_call_cost(seen, fit_times(seen))
    assert found.stall_s == 0.0
    assert abs(found.delay_s) < 0.002


def test_corrected_observations_have_the_times_without_calls() -> None:
    cost = CallCost(0.003, 0.002)
    seen = [cost.corrected(observation) for observation in observations(cost)]
    (curve,) = fit_times(seen).values()
    for clock, fitted_s in zip(CLOCKS_MHZ, curve.times_s(CLOCKS_MHZ), strict=True):
        assert fitted_s == pytest.approx(time_s(clock), rel=2e-3)


def test_instructions_that_end_before_the_clock_takes_effect_show_the_stall() -> None:
    key, stall_s = InstructionClass(0, F), 0.002
    seen = [
        replace(
            observation,
            call_samples=(
                CallSample(key, ClockShare(TOP_MHZ, time_s(TOP_MHZ) + stall_s), ClockShare(TOP_MHZ, 0.0), 8),
            ),
        )
        for observation in observations(CallCost())[:8]
    ]
    found = fit_call_cost(seen, fit_times(seen))
    assert found.stall_s == pytest.approx(stall_s, rel=0.02)
    assert found.delay_s == 0.0


def test_too_few_calls_show_nothing() -> None:
    seen = observations(CallCost(0.003))[:12]
    assert fit_call_cost(seen, fit_times(seen)).is_none


def test_a_clock_that_was_reported_but_replaced_before_its_effect_leaves_no_time_at_it() -> None:
    """The driver reports 20 ms early: a clock shown for the last 15 ms of an instruction was never in effect."""
    key, top_s = InstructionClass(0, F), time_s(TOP_MHZ)
    shares = (ClockShare(TOP_MHZ, top_s - 0.015), ClockShare(930, 0.015))
    seen = IterationObservation(
        0,
        "profile-0",
        1.0,
        (InstructionSample(0, F, shares, 4, num_calls=1.0),),
        (),
        call_samples=(CallSample(key, *shares, 4),),
    )

    (sample,) = CallCost(0.0, 0.02).corrected(seen).instruction_samples

    assert [(s.sm_clock_mhz, round(s.time_s, 9)) for s in sample.shares] == [(TOP_MHZ, round(top_s, 9))]


def test_the_delay_moves_time_to_the_clock_before_even_where_that_is_the_longer_one() -> None:
    key = InstructionClass(0, F)
    shares = (ClockShare(TOP_MHZ, 0.030), ClockShare(930, 0.025))
    seen = IterationObservation(
        0,
        "profile-0",
        1.0,
        (InstructionSample(0, F, shares, 4, num_calls=1.0),),
        (),
        call_samples=(CallSample(key, *shares, 4),),
    )

    (sample,) = CallCost(0.002, 0.01).corrected(seen).instruction_samples

    assert [(s.sm_clock_mhz, round(s.time_s, 9)) for s in sample.shares] == [(TOP_MHZ, 0.038), (930, 0.015)]
