"""Start, end, slack, critical instructions and energy of pipelines that are solved by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionKind, dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.timeline import iteration_energy_j, makespan_s, timeline
from gpuenergyd.core.pipeline.timetable import PlannedChange, TimetableEntry, replay_timetable

F, B = InstructionKind.F, InstructionKind.B
F0, F1, B0, B1 = ("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)
LIMIT = 64


def test_balanced_1f1b_takes_m_plus_r_minus_one_rounds() -> None:
    graph = dependency_graph(one_forward_one_backward(3, 4))

    planned = timeline(graph, [1.0 if i.kind is F else 2.0 for i in graph.instructions])

    assert planned.iteration_time_s == 3.0 * (4 + 3 - 1)


def test_short_stage_has_slack_and_long_stage_is_critical() -> None:
    graph = dependency_graph(gpipe(2, 2))
    planned = timeline(graph, [1.0 if i.pp_rank == 0 else 3.0 for i in graph.instructions])

    starts = {str(span.instruction): (span.start_s, span.end_s, span.slack_s) for span in planned.spans}

    # rank 1 works from 1 to 13 without a pause; rank 0 waits for its gradients at 10 and 13
    assert starts["F0@0"] == (0.0, 1.0, 0.0)
    assert starts["F1@0"] == (1.0, 2.0, 2.0)
    assert starts["B1@1"] == (10.0, 13.0, 0.0)
    assert starts["B0@0"] == (10.0, 11.0, 2.0)
    assert planned.iteration_time_s == 14.0
    critical = {str(span.instruction) for span in planned.spans if span.is_critical}
    assert critical == {"F0@0", "F0@1", "F1@1", "B0@1", "B1@1", "B1@0"}


def test_communication_latency_delays_the_receiver_and_reduces_slack() -> None:
    graph = dependency_graph(gpipe(2, 1), communication_latency_s=0.5)

    planned = timeline(graph, [1.0] * 4)

    assert planned.iteration_time_s == 5.0
    assert all(span.is_critical for span in planned.spans)


def test_an_epilogue_lengthens_the_iteration_and_adds_slack_to_other_ranks() -> None:
    graph = dependency_graph(gpipe(2, 1)).with_epilogues([0.0, 1.5])

    planned = timeline(graph, [1.0] * 4)

    # rank 1 ends at 3 and is done at 4.5; rank 0, which gets its gradient at 3, ends at 4
    assert planned.iteration_time_s == makespan_s(graph, [1.0] * 4) == 4.5
    assert {str(span.instruction): span.slack_s for span in planned.spans if span.slack_s} == {"B0@0": 0.5}


def test_energy_counts_waiting_of_every_rank_at_blocking_power() -> None:
    energy_j = iteration_energy_j(
        energies_j=[100.0, 50.0], durations_s=[2.0, 1.0], iteration_time_s=4.0, num_ranks=2, blocking_power_w=10.0
    )

    assert energy_j == 150.0 + 10.0 * (2 * 4.0 - 3.0)


@given(st.data())
def test_using_up_the_slack_of_one_instruction_never_lengthens_the_iteration_and_more_always_does(
    data: st.DataObject,
) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    graph = dependency_graph(one_forward_one_backward(num_ranks, data.draw(st.integers(1, 5))))
    graph = graph.with_epilogues([data.draw(st.sampled_from([0.0, 0.5, 9.0])) for _ in range(num_ranks)])
    durations_s = [data.draw(st.floats(0.1, 3.0)) for _ in graph.instructions]
    planned = timeline(graph, durations_s)
    node = data.draw(st.integers(0, len(durations_s) - 1))

    stretched = durations_s.copy()
    stretched[node] += planned.spans[node].slack_s
    assert timeline(graph, stretched).iteration_time_s == pytest.approx(planned.iteration_time_s)
    stretched[node] += 0.5
    assert timeline(graph, stretched).iteration_time_s == pytest.approx(planned.iteration_time_s + 0.5)


def test_spans_of_all_ranks_are_those_of_each_rank() -> None:
    graph = dependency_graph(one_forward_one_backward(3, 4))
    planned = timeline(graph, [1.0 if i.kind is F else 2.0 for i in graph.instructions])

    assert planned.spans_of_ranks() == tuple(planned.rank_spans(pp_rank) for pp_rank in range(3))
    assert all(planned.spans_of_ranks())


def test_changes_follow_the_begins_of_the_last_replay() -> None:
    changes = [PlannedChange(F0, 0, 1410), PlannedChange(F1, 0, 900), PlannedChange(F1, 40, 1410)]

    assert replay_timetable(changes, [{F0: 10, F1: 100, B0: 200}], max_entries=LIMIT) == (
        TimetableEntry(10, 1410),
        TimetableEntry(100, 900),
        TimetableEntry(140, 1410),
    )


def test_a_clock_rises_by_the_earliest_and_falls_by_the_latest_of_recent_replays() -> None:
    changes = [PlannedChange(F0, 0, 900), PlannedChange(B0, 0, 1410)]
    replays = [{F0: 10, B0: 210}, {F0: 14, B0: 200}, {F0: 12, B0: 220}]

    assert replay_timetable(changes, replays, max_entries=LIMIT) == (TimetableEntry(14, 900), TimetableEntry(200, 1410))


def test_a_slow_segment_shorter_than_its_uncertainty_is_left_out() -> None:
    changes = [PlannedChange(F0, 0, 1410), PlannedChange(F1, 0, 900), PlannedChange(B0, 0, 1410)]
    replays = [{F0: 0, F1: 50, B0: 60}, {F0: 0, F1: 80, B0: 90}]

    assert replay_timetable(changes, replays, max_entries=LIMIT) == (TimetableEntry(0, 1410),)


def test_without_a_replay_that_shows_every_instruction_there_is_no_timetable() -> None:
    changes = [PlannedChange(F0, 0, 900), PlannedChange(B1, 0, 1410)]

    assert replay_timetable(changes, [], max_entries=LIMIT) == ()
    assert replay_timetable(changes, [{F0: 0}], max_entries=LIMIT) == ()
    assert replay_timetable([], [{F0: 0}], max_entries=LIMIT) == ()


def test_the_shortest_slow_segments_are_left_out_where_there_are_too_many() -> None:
    keys = [("F", k, 0) for k in range(6)]
    changes = [PlannedChange(key, 0, 1410 if k % 2 == 0 else 900) for k, key in enumerate(keys)]
    begins = dict(zip(keys, (0, 100, 130, 200, 290, 400), strict=True))

    assert replay_timetable(changes, [begins], max_entries=4) == (
        TimetableEntry(0, 1410),
        TimetableEntry(200, 900),
        TimetableEntry(290, 1410),
        TimetableEntry(400, 900),
    )


def clock_at(entries: list[tuple[int, int]], at_ns: int) -> int:
    """Return the clock in force at an instant of an iteration that follows one like it."""
    return next((mhz for offset, mhz in reversed(entries) if offset <= at_ns), entries[-1][1])


clocks = st.sampled_from((600, 900, 1200, 1410))
gaps = st.lists(st.integers(1, 100), min_size=1, max_size=12)


@given(gaps, st.data(), st.integers(1, LIMIT))
def test_the_timetable_is_in_order_and_for_equal_replays_never_slower_than_the_plan(
    durations: list[int], data: st.DataObject, max_entries: int
) -> None:
    begins, at_ns = {}, 0
    for k, duration in enumerate(durations):
        begins["F", k, 0] = at_ns
        at_ns += duration
    changes = [
        PlannedChange(key, data.draw(st.integers(0, durations[k] - 1)), data.draw(clocks))
        for k, key in enumerate(begins)
    ]
    planned = [(begins[c.instruction] + c.delay_ns, c.sm_clock_mhz) for c in changes]

    entries = replay_timetable(changes, [begins] * 3, max_entries=max_entries)

    offsets = [entry.offset_ns for entry in entries]
    assert offsets == sorted(set(offsets))
    assert 1 <= len(entries) <= max_entries
    for instant in range(planned[0][0], at_ns):
        assert clock_at(list(entries), instant) >= clock_at(planned, instant)
        if len(planned) <= max_entries:
            assert clock_at(list(entries), instant) == clock_at(planned, instant)


@given(gaps, st.lists(st.integers(-30, 30), min_size=2, max_size=5), st.data())
def test_with_replays_that_differ_no_raise_is_later_than_in_any_of_them(
    durations: list[int], shifts: list[int], data: st.DataObject
) -> None:
    keys = [("F", k, 0) for k in range(len(durations))]
    replays = []
    for shift in shifts:
        at_ns, begins = 100 + shift, {}
        for key, duration in zip(keys, durations, strict=True):
            begins[key] = at_ns
            at_ns += duration
        replays.append(begins)
    changes = [PlannedChange(key, 0, data.draw(clocks)) for key in keys]

    entries = list(replay_timetable(changes, replays, max_entries=LIMIT))

    for replay in replays:
        planned = [(replay[c.instruction], c.sm_clock_mhz) for c in changes]
        for instant in range(planned[0][0] + 60, at_ns):
            assert clock_at([*entries], instant) >= clock_at(planned, instant) or entries[0][0] > instant
