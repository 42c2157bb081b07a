"""Steps of timing clock requests and of simulating them, on small cases solved by hand."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import Instruction, InstructionClass, InstructionKind, dependency_graph, gpipe
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.pipeline.switching import ClockRegion, Direction, RegionLatency, SwitchLatency, TargetLatency
from gpuenergyd.core.pipeline.timeline import Span, timeline
from gpuenergyd_plan.offline.clock_changes import naive_changes
from gpuenergyd_policies.planning.switching.requests import (
    RequestedBy,
    TimedRequest,
    clock_changes,
    fast_enough_clock,
    leads_without_replaced_raises_s,
    longest_lead_s,
    longest_raise_waits_s,
    merge_per_instruction,
    raise_leads_s,
    rank_latencies,
)
from gpuenergyd_policies.planning.switching.simulation import simulate_switching
from tests.support.examples import examples
from tests.support.plain_switching import PlainRankClock

F, B = InstructionKind.F, InstructionKind.B
LATENCY = SwitchLatency(raise_s=0.5, lower_s=0.25, call_s=0.1)


def _table(*options: tuple[int, float]) -> InstructionProfile:
    """Return clocks with times; each draws a watt per 10 MHz."""
    return InstructionProfile(tuple(ClockOption(mhz, time_s, time_s * mhz / 10) for mhz, time_s in options))


PLAIN = _table((1000, 1.0), (500, 2.0))
ONE, TWO = dependency_graph(gpipe(1, 2)), dependency_graph(gpipe(2, 1))
F0, F1, B0, B1 = ONE.instructions
PROFILE = PipelineProfile({InstructionClass(r, kind): PLAIN for r in (0, 1) for kind in (F, B)}, 10.0)


def _spans(rank: int, starts_s: list[float]) -> list[Span]:
    return [Span(Instruction(rank, F, k), start_s, start_s + 1.0, 0.0) for k, start_s in enumerate(starts_s)]


def _changes(rank: int, *changes: tuple[int, float, int]) -> list[ClockChange]:
    return [ClockChange(Instruction(rank, F, k), offset_s, mhz) for k, offset_s, mhz in changes]


def test_a_raise_waits_for_driver_calls_of_other_gpus_and_reductions_do_not_count() -> None:
    """Rank 0 raises at 2.5; rank 1 lowers at 2.45, raises at 4 and repeats what is in force, which is no call."""
    spans = [_spans(0, [0.0, 2.0]), _spans(1, [0.0, 2.45, 3.5])]
    changes = [
        _changes(0, (0, 0.0, 500), (1, 0.5, 1000)),
        _changes(1, (0, 0.2, 900), (1, 0.0, 400), (1, 0.8, 400), (2, 0.5, 900)),
    ]

    assert longest_raise_waits_s(spans, changes, [LATENCY] * 2) == pytest.approx([0.05, 0.0])
    assert longest_raise_waits_s(spans, changes, [SwitchLatency(0.5, 0.25)] * 2) == [0.0, 0.0]
    assert longest_raise_waits_s(spans, [[], changes[1]], [LATENCY] * 2) == [0.0, 0.0]


def test_the_longest_wait_counts_with_each_gpus_own_call_duration() -> None:
    slow = SwitchLatency(raise_s=0.5, lower_s=0.25, call_s=0.4)
    spans = [_spans(0, [0.0, 2.0, 4.0, 6.0]), _spans(1, [0.0, 1.9, 5.7])]
    changes = [
        _changes(0, (0, 0.0, 500), (1, 0.0, 1000), (2, 0.0, 500), (3, 0.0, 1000)),
        _changes(1, (0, 0.0, 500), (1, 0.0, 300), (2, 0.0, 200), (2, 5.0, 500)),
    ]

    assert longest_raise_waits_s(spans, changes, [LATENCY, slow]) == pytest.approx([0.3, 0.0])


def test_the_lead_grows_by_the_longest_wait_for_the_driver() -> None:
    """Two ranks whose raises fall together: the second waits for one call, so it is requested one call earlier."""
    graph = dependency_graph(gpipe(2, 3))
    order = {rank: [i for i in graph.instructions if i.pp_rank == rank] for rank in (0, 1)}
    clocks = dict.fromkeys(graph.instructions, 500)
    clocks |= {order[0][3]: 1000, order[1][2]: 1000}
    durations_s = [2.0 if clocks[i] == 500 else 1.0 for i in graph.instructions]
    planned = timeline(graph, durations_s)
    spans_of = [planned.rank_spans(rank) for rank in (0, 1)]

    alone = clock_changes(planned, clocks, latency=[SwitchLatency(0.5, 0.25)] * 2)
    shared = clock_changes(planned, clocks, latency=[LATENCY] * 2)

    waits_s = longest_raise_waits_s(spans_of, alone, [LATENCY] * 2)
    assert [max(own, key=lambda c: c.sm_clock_mhz).sm_clock_mhz for own in alone] == [1000, 1000]
    for rank, wait_s in enumerate(waits_s):
        raises_at_s = [
            next(s.start_s for s in spans_of[rank] if s.instruction == c.instruction) + c.offset_s
            for changes in (alone, shared)
            for c in changes[rank]
            if c.sm_clock_mhz == 1000
        ]
        assert raises_at_s[0] - raises_at_s[1] == pytest.approx(wait_s)


def test_the_lead_is_the_longest_of_any_raise_between_the_clocks_of_a_rank() -> None:
    assert longest_lead_s(LATENCY, {500, 700, 900}) == 0.5
    assert longest_lead_s(LATENCY, {500}) == 0.5
    assert longest_lead_s(LATENCY, ()) == 0.5
    assert rank_latencies([LATENCY, LATENCY], 2) == (LATENCY, LATENCY)
    assert [own.raise_s for own in rank_latencies(0.3, 3)] == [0.3] * 3


def test_naive_changes_are_made_where_the_clock_differs_from_the_previous_one() -> None:
    clocks = {F0: 500, F1: 500, B0: 1000, B1: 500}

    assert naive_changes(ONE, clocks) == (
        (ClockChange(F0, 0.0, 500), ClockChange(B0, 0.0, 1000), ClockChange(B1, 0.0, 500)),
    )
    assert naive_changes(ONE, dict.fromkeys(clocks, 700)) == ((ClockChange(F0, 0.0, 700),),)


@pytest.mark.parametrize(
    ("first", "until_s", "window"),
    [
        (0, 0.0, [0]),
        (0, 1.99, [0]),
        (0, 2.0, [0, 1]),
        (0, 5.0, [0, 1, 2]),
        (2, 9.9, [2]),
        (2, 10.0, [2, 0]),  # the next iteration begins after ten seconds
        (2, 12.0, [2, 0, 1]),
        (1, 99.0, [1, 2, 0]),  # each instruction once
    ],
)
def test_a_window_holds_the_instructions_that_begin_by_its_end_across_iterations(
    first: int, until_s: float, window: list[int]
) -> None:
    assert RequestedBy([0.0, 2.0, 4.0], [0.0] * 3, iteration_time_s=10.0).positions(first, until_s) == window


def planned(clocks: Mapping[Instruction, int]) -> frozenset[tuple[InstructionClass, int]]:
    return frozenset((instruction.instruction_class, mhz) for instruction, mhz in clocks.items())


def test_a_fast_enough_clock_is_the_lowest_at_which_nothing_is_slower_than_planned() -> None:
    """Backwards are throttled at 1000 MHz and fastest at 800; forwards get ever faster."""
    tables = {
        InstructionClass(0, F): _table((1000, 1.0), (800, 1.1), (600, 1.5), (400, 2.0)),
        InstructionClass(0, B): _table((1000, 1.4), (800, 1.2), (600, 1.3), (400, 2.0)),
    }
    profile = PipelineProfile(tables, 0.0)

    def fast_enough(clocks: dict[Instruction, int], *, known: bool = True) -> int:
        return fast_enough_clock(planned(clocks), profile if known else None)

    assert fast_enough({F0: 600, B0: 400}) == 600
    assert fast_enough({F0: 600, B0: 800}) == 800
    assert fast_enough({F0: 400, B0: 1000}) == 1000
    assert fast_enough({F0: 1000, B0: 400}) == 1000
    assert fast_enough({F0: 1000, B0: 800}) == 800  # none suits both: 1.17 times B at 1000, 1.1 times F at 800
    assert fast_enough({F0: 1000, B0: 800}, known=False) == 1000
    assert fast_enough({F0: 600, F1: 600}) == 600
    assert fast_enough({F0: 600, B0: 400}, known=False) == 600


def test_the_lowest_fast_enough_clock_is_used_where_the_highest_planned_one_is_too_slow() -> None:
    tables = {
        InstructionClass(0, F): _table((1000, 1.0), (800, 1.0), (600, 1.0), (400, 1.1)),
        InstructionClass(0, B): _table((1000, 2.0), (800, 1.0), (600, 0.9), (400, 0.9)),
    }
    profile = PipelineProfile(tables, 0.0)

    assert fast_enough_clock(planned({F0: 1000, B0: 800}), profile) == 600
    assert fast_enough_clock(planned({F0: 800, B0: 1000}), profile) == 1000


def test_an_instruction_keeps_one_immediate_and_one_delayed_request() -> None:
    later = [
        TimedRequest(0, 0.0, 500),
        TimedRequest(0, 0.4, 700),
        TimedRequest(0, 0.9, 900),
        TimedRequest(1, 0.3, 1000),
    ]

    assert merge_per_instruction(later) == [
        TimedRequest(0, 0.0, 500),
        TimedRequest(0, 0.4, 900),
        TimedRequest(1, 0.0, 900),  # repeats the clock that is due by then
        TimedRequest(1, 0.3, 1000),
    ]
    assert merge_per_instruction([TimedRequest(0, 0.0, 500), TimedRequest(2, 0.3, 900)]) == [
        TimedRequest(0, 0.0, 500),
        TimedRequest(2, 0.3, 900),
    ]


def test_a_request_cancels_pending_ones_that_would_come_later_and_repeats_have_no_effect() -> None:
    clock = PlainRankClock(1000, LATENCY)

    assert clock.request(0.0, 500, wait_s=0.0) == 1000  # there at 0.25
    assert clock.request(0.1, 500, wait_s=0.0) == 500  # requested already
    assert clock.request(0.2, 900, wait_s=0.0) == 500  # a raise: there at 0.7
    assert clock.request(0.3, 700, wait_s=0.0) == 900  # a reduction, there at 0.55: the raise never comes
    assert clock.run(_table((1000, 1.0), (700, 1.0), (500, 1.0)), 0.0) == pytest.approx(
        (1.0, 0.25 * 100 + 0.3 * 50 + 0.45 * 70)
    )


def test_a_wait_for_the_driver_delays_a_clock_even_into_the_next_iteration() -> None:
    clock = PlainRankClock(1000, LATENCY)

    clock.request(1.0, 500, wait_s=0.5)
    assert clock.run(PLAIN, 0.5) == pytest.approx((1.5, 100.0))
    clock.next_iteration(1.5)

    # a quarter of a second at 1000 MHz is left, then three quarters of the work at half the speed
    assert clock.run(PLAIN, 0.0) == pytest.approx((0.25 + 0.75 * 2.0, 0.25 * 100 + 1.5 * 50))


def test_a_clock_that_took_effect_before_an_instruction_holds_from_its_begin() -> None:
    clock = PlainRankClock(1000, LATENCY)
    clock.request(0.0, 500, wait_s=0.0)

    assert clock.run(PLAIN, 0.25) == pytest.approx((2.25, 100.0))


def test_the_last_iteration_is_reported_and_late_requests_reach_into_the_next() -> None:
    """Every iteration requests 500 MHz at its last begin and 1000 MHz at its first; both take effect 1 s later."""
    changes = [[ClockChange(F0, 0.0, 1000), ClockChange(B1, 0.5, 500)]]
    latency = SwitchLatency(raise_s=1.0, lower_s=1.0)

    first, second, third = (
        simulate_switching(ONE, PROFILE, changes, latency=[latency], num_iterations=num) for num in (1, 2, 3)
    )

    assert (first.iteration_time_s, first.energy_j) == pytest.approx((4.0, 400.0))
    # 1000 MHz until 0.5, then 500 until 1.0: half a second lost a quarter of an instruction
    assert second.iteration_time_s == pytest.approx(4.25)
    assert second.energy_j == pytest.approx(3.75 * 100 + 0.5 * 50)
    assert third == second


@pytest.mark.parametrize(
    ("calls_s", "time_s", "energy_j"),
    [
        ((0.0, 0.0), 5.5, 455.0),
        ((2.0, 0.0), 5.5, 455.0),  # one GPU alone never waits for the driver
        # forward 1 is over when its reduction comes; backward 1 waits a second for its raise and backward 0 two
        ((2.0, 2.0), 6.0, 460.0),
    ],
)
def test_a_second_simulation_applies_the_driver_waits_that_the_first_one_shows(
    calls_s: tuple[float, float], time_s: float, energy_j: float
) -> None:
    """Rank 0 lowers at 0.5, rank 1 at 1.5; rank 1 raises at 3.5, rank 0 at 4.5; each call takes two seconds."""
    first, backward = ({i.pp_rank: i for i in TWO.instructions if i.kind is kind} for kind in (F, B))
    changes = [
        [ClockChange(first[0], 0.5, 500), ClockChange(backward[0], 0.0, 1000)],
        [ClockChange(first[1], 0.0, 500), ClockChange(backward[1], 0.0, 1000)],
    ]
    latencies = [SwitchLatency(raise_s=0.0, lower_s=0.0, call_s=call_s) for call_s in calls_s]

    done = simulate_switching(TWO, PROFILE, changes, latency=latencies, num_iterations=1)

    assert (done.iteration_time_s, done.energy_j) == pytest.approx((time_s, energy_j))


def _one_rank_requests(latency: SwitchLatency, clocks_mhz: Sequence[int]) -> list[tuple[float, int]]:
    """Return (instant, clock) of the requests of a rank whose instructions take 1 s each."""
    graph = dependency_graph(gpipe(1, len(clocks_mhz) // 2))
    clocks = dict(zip(graph.instructions, clocks_mhz, strict=True))
    planned = timeline(graph, [1.0] * len(clocks_mhz))
    start_s = {span.instruction: span.start_s for span in planned.rank_spans(0)}
    (changes,) = clock_changes(planned, clocks, latency=[latency])
    return [(round(start_s[c.instruction] + c.offset_s, 6), c.sm_clock_mhz) for c in changes]


def _by_target(**late_s: float) -> SwitchLatency:
    targets = tuple(TargetLatency(Direction.RAISE, int(key[1:]), s, s) for key, s in late_s.items())
    return SwitchLatency(raise_s=0.5, lower_s=0.1, targets=targets)


def test_each_clock_is_requested_by_its_own_latency_ahead() -> None:
    clocks = [500, 500, 800, 800, 500, 500, 900, 900]

    requests = _one_rank_requests(_by_target(c800=0.25, c900=0.75), clocks)

    assert requests == [(0.0, 500), (1.75, 800), (4.0, 500), (5.25, 900)]


def test_a_raise_that_a_higher_one_would_replace_before_it_takes_effect_gives_way_to_it() -> None:
    """900 MHz is needed at 3.0 and requested at 1.75, while 800 MHz, requested at 1.6, is still to come at 2.0."""
    clocks = [500, 500, 800, 900, 900, 900, 500, 500]

    requests = _one_rank_requests(_by_target(c800=0.4, c900=1.25), clocks)

    assert requests == [(0.0, 500), (0.75, 900), (6.0, 500)]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 2.0), st.sampled_from([500, 700, 900])), min_size=1, max_size=12),
    st.fixed_dictionaries({mhz: st.floats(0.0, 6.0) for mhz in (500, 700, 900)}),
)
def test_leads_are_those_that_a_look_at_all_of_them_finds(
    gaps: list[tuple[float, int]], leads_s: dict[int, float]
) -> None:
    """The longest lead is kept up to date instead of searched; here it is searched at each step."""
    starts_s = list(accumulate((gap_s for gap_s, _ in gaps), initial=0.0))
    spans, iteration_time_s = _spans(0, starts_s[:-1]), starts_s[-1]
    clocks = [mhz for _, mhz in gaps]
    n = len(clocks)
    expected_s = [leads_s[mhz] for mhz in clocks]
    for k in range(n - 1, -1, -1):
        needed_s = spans[k].start_s
        for at in range(k + 1, k + n) if clocks[k] > clocks[k - 1] else ():
            j = at % n
            start_s = spans[j].start_s + (iteration_time_s if at >= n else 0.0)
            if start_s - max(expected_s) >= needed_s:
                break
            if clocks[j] > clocks[k] and needed_s - expected_s[k] < start_s - expected_s[j] < needed_s:
                expected_s[j] = start_s - needed_s + leads_s[clocks[j]]

    assert leads_without_replaced_raises_s(spans, clocks, leads_s, iteration_time_s=iteration_time_s) == expected_s


def test_a_raise_has_the_longest_lead_of_those_from_any_lower_clock() -> None:
    clocks = (600, 700, 800, 850, 900, 1000)
    regions = [(ClockRegion.LOW, 0.2), (ClockRegion.MIDDLE, 0.4), (ClockRegion.HIGH, 0.1)]
    latency = SwitchLatency(
        raise_s=0.3,
        lower_s=0.3,
        max_sm_clock_mhz=1000,
        regions=tuple(RegionLatency(Direction.RAISE, own, ClockRegion.HIGH, late_s, late_s) for own, late_s in regions),
        targets=(TargetLatency(Direction.RAISE, 850, 0.05, 0.05),),
    )

    leads_s = raise_leads_s(latency, clocks)

    raises_s = {high: max(latency.late_s(low, high) for low in clocks if low < high) for high in clocks[1:]}
    assert leads_s == {600: 0.4} | raises_s
    assert raises_s == {700: 0.3, 800: 0.3, 850: 0.05, 900: 0.4, 1000: 0.4}
