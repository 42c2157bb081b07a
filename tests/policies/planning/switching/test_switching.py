"""Timing of clock requests: raises ahead of need, reductions at the begin, and no time lost to late clocks."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import (
    DependencyGraph,
    Instruction,
    InstructionClass,
    InstructionKind,
    dependency_graph,
    gpipe,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.pipeline.timeline import Timeline, timeline
from gpuenergyd_policies.planning.switching.requests import clock_changes
from gpuenergyd_policies.planning.switching.simulation import simulate_switching
from tests.support.examples import examples

F, B = InstructionKind.F, InstructionKind.B


def _pipeline(
    graph: DependencyGraph, options: dict[InstructionClass, InstructionProfile], clocks: dict[Instruction, int]
) -> tuple[PipelineProfile, list[float]]:
    profile = PipelineProfile(options, blocking_power_w=10.0)
    return profile, [profile[i.instruction_class].at_clock(clocks[i]).time_s for i in graph.instructions]


def _linear(**times_s: float) -> InstructionProfile:
    return instruction_profile(
        [ClockOption(int(mhz[1:]), time_s, 100.0 * time_s) for mhz, time_s in times_s.items()], where="test"
    )


ONE_RANK = dependency_graph(gpipe(1, 4))
ONE_RANK_OPTIONS = {
    InstructionClass(0, F): _linear(c1000=1.0, c900=1.1, c750=1.2, c500=2.0),
    InstructionClass(0, B): _linear(c1000=1.0, c900=1.1, c750=1.2, c500=2.0),
}


def _one_rank_changes(clocks_mhz: list[int], switch_latency_s: float) -> list[tuple[str, float, int]]:
    clocks = dict(zip(ONE_RANK.instructions, clocks_mhz, strict=True))
    _, durations_s = _pipeline(ONE_RANK, ONE_RANK_OPTIONS, clocks)
    (changes,) = clock_changes(timeline(ONE_RANK, durations_s), clocks, latency=switch_latency_s)
    return [(str(c.instruction), round(c.offset_s, 9), c.sm_clock_mhz) for c in changes]


def test_reductions_are_requested_at_the_begin_of_the_slow_instruction_and_raises_a_latency_ahead() -> None:
    changes = _one_rank_changes([1000, 1000, 500, 500, 1000, 1000, 1000, 1000], 0.25)

    assert changes == [("F0@0", 0.0, 1000), ("F2@0", 0.0, 500), ("F3@0", 1.75, 1000)]


def test_a_raise_is_tied_to_the_instruction_that_runs_when_it_is_due() -> None:
    changes = _one_rank_changes([1000, 500, 500, 500, 1000, 1000, 1000, 1000], 2.5)

    assert changes == [("F0@0", 0.0, 1000), ("F1@0", 0.0, 500), ("F2@0", 1.5, 1000)]


def test_a_slow_segment_shorter_than_the_latency_causes_no_switch() -> None:
    changes = _one_rank_changes([1000, 1000, 500, 1000, 1000, 1000, 1000, 1000], 2.5)

    assert changes == [("F0@0", 0.0, 1000)]


def test_the_clock_of_the_next_iteration_is_requested_at_the_end_of_this_one() -> None:
    changes = _one_rank_changes([1000, 500, 500, 500, 500, 500, 500, 500], 0.5)

    assert changes == [("F0@0", 0.0, 1000), ("F1@0", 0.0, 500), ("B3@0", 1.5, 1000)]


def test_a_lead_across_a_bubble_is_an_offset_from_the_previous_instruction() -> None:
    graph = dependency_graph(one_forward_one_backward(2, 1))
    options = {InstructionClass(r, k): _linear(c1000=1.0, c500=2.0) for r in range(2) for k in (F, B)}
    clocks = dict.fromkeys(graph.instructions, 1000)
    clocks[Instruction(0, F, 0)] = 500
    _, durations_s = _pipeline(graph, options, clocks)

    changes = clock_changes(timeline(graph, durations_s), clocks, latency=0.5)

    assert changes[0] == (ClockChange(Instruction(0, F, 0), 0.0, 500), ClockChange(Instruction(0, F, 0), 3.5, 1000))


def test_raises_in_steps_within_one_instruction_are_merged_into_the_first_and_highest() -> None:
    changes = _one_rank_changes([500, 750, 1000, 1000, 1000, 1000, 1000, 1000], 1.5)

    assert changes == [("F0@0", 0.0, 500), ("F0@0", 0.5, 1000)]


def test_a_change_that_may_replace_a_delayed_one_repeats_the_clock_that_is_due() -> None:
    changes = _one_rank_changes([750, 750, 750, 900, 1000, 1000, 1000, 1000], 0.6)

    # F2 asks for 900 MHz late in its run, F3 for 1000: were F3 early, its record would replace the one before
    assert changes[1:] == [("F2@0", 0.6, 900), ("F3@0", 0.0, 900), ("F3@0", 0.5, 1000)]


Case = tuple[DependencyGraph, PipelineProfile, dict[Instruction, int], float, Timeline]


@st.composite
def _planned_pipelines(draw: st.DrawFn) -> Case:
    num_ranks, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    make = draw(st.sampled_from([gpipe, one_forward_one_backward]))
    graph = dependency_graph(
        make(num_ranks, num_microbatches), communication_latency_s=draw(st.sampled_from([0.0, 0.1]))
    )
    graph = graph.with_epilogues([draw(st.sampled_from([0.0, 0.7])) for _ in range(num_ranks)])
    options = {}
    for key in sorted({i.instruction_class for i in graph.instructions}):
        times_s = sorted(draw(st.lists(st.floats(0.2, 3.0), min_size=3, max_size=3)))
        if draw(st.booleans()):
            times_s[1], times_s[2] = times_s[2], times_s[1]  # not monotone, yet the top clock suits all
        options[key] = instruction_profile(
            [ClockOption(mhz, t, 50.0 * t) for mhz, t in zip((900, 700, 500), times_s, strict=True)], where=str(key)
        )
    clocks = {i: draw(st.sampled_from((900, 700, 500))) for i in graph.instructions}
    profile = PipelineProfile(options, 10.0)
    durations_s = [profile[i.instruction_class].at_clock(clocks[i]).time_s for i in graph.instructions]
    return graph, profile, clocks, draw(st.floats(0.01, 4.0)), timeline(graph, durations_s)


@settings(max_examples=examples(150), deadline=None)
@given(_planned_pipelines())
def test_with_lead_and_an_exact_latency_an_iteration_is_never_slower_than_planned(case: Case) -> None:
    graph, profile, clocks, switch_latency_s, planned = case

    changes = clock_changes(planned, clocks, latency=switch_latency_s, profile=profile)

    simulated = simulate_switching(graph, profile, changes, latency=switch_latency_s)
    assert simulated.iteration_time_s <= planned.iteration_time_s * (1 + 1e-9)


@settings(max_examples=examples(100), deadline=None)
@given(_planned_pipelines())
def test_every_rank_has_a_change_at_its_first_instruction_and_at_most_two_per_instruction(case: Case) -> None:
    _, _, clocks, switch_latency_s, planned = case

    changes = clock_changes(planned, clocks, latency=switch_latency_s)

    for pp_rank, rank_changes in enumerate(changes):
        order = [span.instruction for span in planned.rank_spans(pp_rank)]
        assert (rank_changes[0].instruction, rank_changes[0].offset_s) == (order[0], 0.0)
        keys = [(order.index(c.instruction), c.offset_s) for c in rank_changes]
        assert keys == sorted(set(keys))
        assert all(sum(k == n and offset_s > 0.0 for k, offset_s in keys) <= 1 for n in range(len(order)))
        assert all(offset_s >= 0.0 for _, offset_s in keys)
        for before, change in pairwise(rank_changes):
            might_replace = before.offset_s > 0.0 and before.instruction != change.instruction
            assert not might_replace or change.offset_s == 0.0


def test_without_latency_the_simulation_matches_the_plan() -> None:
    clocks = dict(zip(ONE_RANK.instructions, [1000, 500] * 4, strict=True))
    profile, durations_s = _pipeline(ONE_RANK, ONE_RANK_OPTIONS, clocks)
    planned = timeline(ONE_RANK, durations_s)

    simulated = simulate_switching(ONE_RANK, profile, clock_changes(planned, clocks, latency=0.0), latency=0.0)

    assert simulated.iteration_time_s == pytest.approx(12.0)
    assert simulated.energy_j == pytest.approx(1200.0)


def test_a_clock_change_within_an_instruction_changes_its_remaining_speed_and_power() -> None:
    graph = dependency_graph(gpipe(1, 1))
    options = {
        InstructionClass(0, F): _linear(c1000=1.0),
        InstructionClass(0, B): instruction_profile(
            [ClockOption(1000, 1.0, 100.0), ClockOption(500, 2.0, 60.0)], where="B"
        ),
    }
    changes = [[ClockChange(Instruction(0, F, 0), 0.0, 1000), ClockChange(Instruction(0, B, 0), 0.0, 500)]]

    simulated = simulate_switching(graph, PipelineProfile(options, 10.0), changes, latency=0.5)

    assert simulated.iteration_time_s == pytest.approx(1.0 + 0.5 + 0.5 * 2.0)
    assert simulated.energy_j == pytest.approx(100.0 + 0.5 * 100.0 + 0.5 * 60.0)


TWO_RANKS = dependency_graph(gpipe(2, 4))
TWO_RANKS_OPTIONS = {
    InstructionClass(rank, kind): _linear(c1000=1.0, c900=1.1, c750=1.2, c500=2.0)
    for rank in range(2)
    for kind in (F, B)
}
SLOW = {Instruction(0, F, 0), Instruction(0, F, 1), Instruction(1, F, 0)}
TWO_DIPS = {i: 500 if i in SLOW else 1000 for i in TWO_RANKS.instructions}
ALONE = (SwitchLatency(0.5, 0.5),) * 2
QUEUED = (SwitchLatency(0.5, 0.5, call_s=0.3),) * 2
"""While a call of 0.3 s runs, the driver changes no other GPU."""


def _two_dips(latencies: tuple[SwitchLatency, ...]) -> tuple[PipelineProfile, tuple[tuple[ClockChange, ...], ...]]:
    """Return the changes of two ranks that both need their clock back at 4.0 s."""
    profile, durations_s = _pipeline(TWO_RANKS, TWO_RANKS_OPTIONS, TWO_DIPS)
    return profile, clock_changes(timeline(TWO_RANKS, durations_s), TWO_DIPS, latency=latencies, profile=profile)


def test_a_raise_that_waits_for_another_gpus_driver_call_is_requested_earlier_by_that_wait() -> None:
    _, alone = _two_dips(ALONE)
    _, queued = _two_dips(QUEUED)

    assert alone[1][-1] == ClockChange(Instruction(1, F, 0), 1.5, 1000)
    assert queued[0] == alone[0]
    assert queued[1][:-1] == alone[1][:-1]
    assert queued[1][-1].instruction == alone[1][-1].instruction
    assert queued[1][-1].offset_s == pytest.approx(1.2)


def test_in_simulation_a_raise_waits_for_another_gpus_call_unless_requested_earlier() -> None:
    profile, unaware = _two_dips(ALONE)
    _, aware = _two_dips(QUEUED)

    def simulated_s(changes: tuple[tuple[ClockChange, ...], ...], latencies: tuple[SwitchLatency, ...]) -> float:
        return simulate_switching(TWO_RANKS, profile, changes, latency=latencies).iteration_time_s

    assert simulated_s(unaware, ALONE) == pytest.approx(11.5)
    assert simulated_s(unaware, QUEUED) == pytest.approx(11.65)
    assert simulated_s(aware, QUEUED) == pytest.approx(11.5)


def test_the_simulation_reports_the_time_of_calls_and_the_shortest_time_between_changes() -> None:
    profile, changes = _two_dips(QUEUED)

    simulated = simulate_switching(TWO_RANKS, profile, changes, latency=QUEUED)

    num_calls = sum(map(len, changes))
    assert num_calls == 4
    assert simulated.driver_busy_s == pytest.approx(num_calls * 0.3)
    # Rank 1 is lowered when its first instruction begins, at 2.0 s, and raised 1.2 s later.
    assert simulated.shortest_dwell_ratio == pytest.approx(1.2 / 0.5)


def test_without_a_clock_change_no_clock_is_held_too_short() -> None:
    profile, _ = _two_dips(ALONE)

    simulated = simulate_switching(TWO_RANKS, profile, ((), ()), latency=QUEUED)

    assert (simulated.driver_busy_s, simulated.shortest_dwell_ratio) == (0.0, math.inf)


STALLING = (SwitchLatency(0.5, 0.5, stall_s=0.2),) * 2


def test_a_call_stops_the_instruction_under_way_at_the_power_of_waiting() -> None:
    profile, changes = _two_dips(ALONE)
    without = simulate_switching(TWO_RANKS, profile, changes, latency=ALONE)
    with_stalls = simulate_switching(TWO_RANKS, profile, changes, latency=STALLING)

    assert with_stalls.iteration_time_s > without.iteration_time_s
    assert with_stalls.iteration_time_s <= without.iteration_time_s + 0.2 * sum(map(len, changes)) + 1e-9


def test_a_raise_is_requested_early_enough_for_a_long_stall_to_end_before_it_is_needed() -> None:
    long = (SwitchLatency(0.5, 0.5, stall_s=0.8),) * 2
    _, changes = _two_dips(long)
    _, short = _two_dips(ALONE)

    assert changes[1][-1].offset_s == pytest.approx(short[1][-1].offset_s - 0.3)
