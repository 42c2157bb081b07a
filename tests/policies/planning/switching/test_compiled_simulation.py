"""The compiled simulator of late clocks returns what the plain one does, to the last bit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import DependencyGraph, dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile, with_waiting_power
from gpuenergyd.core.pipeline.switching import Direction, SwitchLatency, TargetLatency
from gpuenergyd.core.pipeline.waiting import WaitingPower
from gpuenergyd_policies.planning.switching.simulation import simulate_switching
from tests.support.examples import examples
from tests.support.plain_switching import simulate_plainly

CLOCKS_MHZ = (900, 700, 500)
BETWEEN_MHZ = (950, 800, 600, 400)
"""Clocks that no instruction was measured at."""
POWER = WaitingPower((400, 700, 900), (20.0, 30.0, 55.0))


@st.composite
def _latencies(draw: st.DrawFn) -> SwitchLatency:
    targets = [
        TargetLatency(Direction.RAISE if draw(st.booleans()) else Direction.LOWER, mhz, typical_s, 2 * typical_s)
        for mhz in CLOCKS_MHZ
        if (typical_s := draw(st.sampled_from([0.0, 0.02, 0.3, 5.0])))
    ]
    return SwitchLatency(
        raise_s=draw(st.sampled_from([0.0, 0.1, 0.5, 4.0])),
        lower_s=draw(st.sampled_from([0.0, 0.2, 1.0, 30.0])),
        call_s=draw(st.sampled_from([0.0, 0.0, 0.05, 0.6])),
        typical_raise_s=draw(st.sampled_from([None, 0.05])),
        targets=tuple(targets),
        stall_s=draw(st.sampled_from([0.0, 0.0, 0.03, 1.5])),
        num_calls=draw(st.integers(1, 3)),
        host=draw(st.sampled_from(["", "a"])),
    )


@st.composite
def _simulated(
    draw: st.DrawFn,
) -> tuple[DependencyGraph, PipelineProfile, list[list[ClockChange]], list[SwitchLatency]]:
    num_ranks = draw(st.integers(1, 4))
    make = draw(st.sampled_from([gpipe, one_forward_one_backward]))
    graph = dependency_graph(
        make(num_ranks, draw(st.integers(1, 5))), communication_latency_s=draw(st.sampled_from([0.0, 0.1]))
    ).with_epilogues([draw(st.sampled_from([0.0, 0.7])) for _ in range(num_ranks)])
    classes = {
        key: instruction_profile(
            [ClockOption(mhz, draw(st.floats(0.2, 3.0)), draw(st.floats(1.0, 90.0))) for mhz in CLOCKS_MHZ],
            where=str(key),
        )
        for key in graph.classes
    }
    profile = PipelineProfile(classes, 10.0)
    if draw(st.booleans()):
        profile = with_waiting_power(profile, POWER)
    changes: list[list[ClockChange]] = [[] for _ in range(num_ranks)]
    offsets_s = st.one_of(st.sampled_from([0.0, 0.1]), st.floats(0.0, 4.0))
    for instruction in graph.instructions:
        for _ in range(draw(st.integers(0, 2))):
            mhz = draw(st.sampled_from(CLOCKS_MHZ + BETWEEN_MHZ))
            changes[instruction.pp_rank].append(ClockChange(instruction, draw(offsets_s), mhz))
    return graph, profile, changes, [draw(_latencies()) for _ in range(num_ranks)]


@settings(max_examples=examples(400), deadline=None)
@given(_simulated(), st.integers(1, 4))
def test_the_compiled_simulator_equals_the_plain_one(
    case: tuple[DependencyGraph, PipelineProfile, list[list[ClockChange]], list[SwitchLatency]], num_iterations: int
) -> None:
    graph, profile, changes, latencies = case

    simulated = simulate_switching(graph, profile, changes, latency=latencies, num_iterations=num_iterations)
    plainly = simulate_plainly(graph, profile, changes, latency=latencies, num_iterations=num_iterations)

    assert simulated == plainly


def test_what_is_compared_has_stalls_waits_for_the_driver_and_clocks_that_reach_into_the_next_iteration() -> None:
    """Each of them changes the result, so that the comparison above would miss none of them."""
    graph = dependency_graph(one_forward_one_backward(2, 4))
    options = [ClockOption(mhz, 500 / mhz, 50.0 + mhz / 10) for mhz in CLOCKS_MHZ]
    profile = PipelineProfile({key: instruction_profile(options, where=str(key)) for key in graph.classes}, 10.0)
    changes: list[list[ClockChange]] = [[], []]
    for k, instruction in enumerate(graph.instructions):
        changes[instruction.pp_rank].append(ClockChange(instruction, 0.1, CLOCKS_MHZ[k % 3]))

    def time_s(**latency: float) -> float:
        own = SwitchLatency(**({"raise_s": 0.1, "lower_s": 0.1} | latency))  # type: ignore[arg-type]  # all are floats
        found = simulate_switching(graph, profile, changes, latency=[own, own])
        assert found == simulate_plainly(graph, profile, changes, latency=[own, own])
        return found.iteration_time_s

    times_s = [time_s(), time_s(stall_s=0.05), time_s(call_s=0.2), time_s(raise_s=30.0)]
    assert len({round(own_s, 6) for own_s in times_s}) == len(times_s)
    charged = simulate_switching(graph, with_waiting_power(profile, POWER), changes, latency=0.1)
    assert charged.waiting_energy_j == pytest.approx(charged.waiting_energy_j)
    assert charged.waiting_energy_j > 0
