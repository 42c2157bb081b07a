"""Registrations and reports are validated where they enter: job length, tags, captured graphs."""

import time
from dataclasses import replace
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from gpuenergyd.core.job.description import JobLength
from gpuenergyd.core.pipeline.reorder import RankMemory, ReorderOffer
from gpuenergyd.daemon.registration import (
    check_texts,
    checked_iteration,
    checked_length,
    checked_slowdown,
    checked_tags,
    reorder_offer,
    single_iterations,
)
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.messages import IterationReport
from tests.support.job_stage import registration, report


def test_a_job_length_is_accepted_and_its_deadline_converted_to_utc() -> None:
    given = replace(registration(0), job_iterations=50, job_hours=1.5, job_deadline="2030-01-31T10:00:00+02:00")

    assert checked_length(given) == JobLength(50, 1.5, datetime(2030, 1, 31, 8, tzinfo=UTC))
    assert checked_length(registration(0)) == JobLength()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"job_iterations": 0}, "job_iterations 0"),
        ({"job_hours": -1.0}, "job_hours -1"),
        ({"job_hours": float("inf")}, "job_hours inf"),
        ({"job_deadline": "soon"}, "'soon'"),
        ({"job_deadline": "2030-01-31T10:00:00"}, "offset"),
    ],
)
def test_an_invalid_job_length_is_refused_with_its_value(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ProtocolError, match=line):
        checked_length(replace(registration(0), **given))


@pytest.mark.parametrize("ratio", [None, 0.0, 0.05, 1.0])
def test_a_permitted_slowdown_up_to_twice_the_time_is_accepted(ratio: float | None) -> None:
    assert checked_slowdown(replace(registration(0), max_slowdown_ratio=ratio)) == ratio


@pytest.mark.parametrize("ratio", [-0.1, 1.5, 5.0, float("nan"), float("inf")])
def test_a_permitted_slowdown_out_of_range_is_refused_with_the_range(ratio: float) -> None:
    with pytest.raises(ProtocolError, match=rf"max_slowdown_ratio {ratio:g}: must be a ratio from 0 to 1"):
        checked_slowdown(replace(registration(0), max_slowdown_ratio=ratio))


@pytest.mark.parametrize("amounts", [(1,), (1, 2, 3, 4), (-1, 2, 3), (1, 2, 2**60)])
def test_memory_out_of_range_is_refused_with_its_value(amounts: tuple[int, ...]) -> None:
    now_ns = time.monotonic_ns()
    given = IterationReport("t", 0, 0, now_ns, now_ns, now_ns, (), memory_bytes=amounts)
    with pytest.raises(ProtocolError, match=rf"memory_bytes \({amounts[0]},"):
        checked_iteration(given, 0)


def test_a_report_either_has_instructions_or_says_whether_they_ran_in_order() -> None:
    now_ns = time.monotonic_ns()
    given = IterationReport("t", 0, 0, now_ns, now_ns, now_ns, (), is_in_order=True)
    assert checked_iteration(given, 0).is_in_order
    assert not checked_iteration(given, 0).is_timed
    assert checked_iteration(replace(given, is_in_order=None), 0).is_timed
    with pytest.raises(ProtocolError, match="is_in_order true: only for reports without instructions, got 1"):
        checked_iteration(replace(given, instructions=(("F", 0, 0, now_ns, now_ns),)), 0)


def test_memory_and_refusals_are_taken_from_reports_and_registrations() -> None:
    now_ns = time.monotonic_ns()
    given = IterationReport("t", 0, 0, now_ns, now_ns, now_ns, (), memory_bytes=(1, 2, 3), reorder_refusal="x" * 1000)
    checked = checked_iteration(given, 0)
    assert checked.memory == RankMemory(1, 2, 3)
    assert checked.reorder_refusal == "x" * 256
    assert checked_iteration(replace(given, memory_bytes=()), 0).memory is None
    asked = replace(registration(0), allow_reorder=True, reorder_refusal="")
    assert reorder_offer(asked) == ReorderOffer(is_allowed=True, refusal="")
    assert reorder_offer(registration(0)) == ReorderOffer()


@pytest.mark.fault(59)
@pytest.mark.parametrize("name", ["job_name", "run_key", "schedule_name", "framework", "policy"])
@pytest.mark.parametrize(
    "text", ["a\x1b[2J", "line one\ngpuenergyd: INFO: saved 99 %", "\x9b31mred", "gpt\u202etxt.exe"]
)
def test_names_with_control_characters_are_refused_in_one_printable_line(name: str, text: str) -> None:
    changed: dict[str, Any] = {name: text}
    with pytest.raises(ProtocolError, match=f"{name} .*only printable characters") as refused:
        check_texts(replace(registration(0), **changed))
    assert str(refused.value).isprintable()


def test_a_name_that_the_history_cannot_keep_is_refused_with_the_limit() -> None:
    with pytest.raises(ProtocolError, match="job_name of 300 characters; at most 256"):
        check_texts(replace(registration(0), job_name="x" * 300))
    check_texts(replace(registration(0), job_name='a"b\\c{d="e"} <b>=1+1 äß 训练'))


def test_a_reason_of_a_training_is_shown_in_one_printable_line() -> None:
    asked = replace(registration(0), reorder_refusal="no\nway\x1b[31m")
    assert reorder_offer(asked).refusal == "no\\nway\\x1b[31m"


def test_tags_are_sorted_by_name() -> None:
    assert checked_tags([("user", "ada"), ("a", "")]) == (("a", ""), ("user", "ada"))


@pytest.mark.parametrize(
    ("tags", "line"),
    [
        ([(f"t{k}", "") for k in range(33)], "33 tags; at most 32"),
        ([("", "x")], "a name of 1 to 64"),
        ([("n" * 65, "x")], "a name of 1 to 64"),
        ([("n", "x" * 257)], "at most 256 characters"),
        ([("n", "a\nb")], "tag 'n': only printable"),
        ([("n", "1"), ("n", "2")], "two tags have the same name"),
    ],
    ids=["many", "empty", "long name", "long value", "newline", "twice"],
)
def test_invalid_tags_are_refused_in_one_line(tags: list[tuple[str, str]], line: str) -> None:
    with pytest.raises(ProtocolError, match=line):
        checked_tags(tags)


@pytest.mark.fault(60)
def test_tags_are_limited_in_bytes_and_the_largest_is_named() -> None:
    tags = [(f"t{k}", "\N{GREEK SMALL LETTER ALPHA}" * 256) for k in range(7)]
    fitting = checked_tags(tags)
    with pytest.raises(ProtocolError) as refused:
        checked_tags([*tags, ("big", "\N{GRINNING FACE}" * 256)])

    assert len(fitting) == 7
    assert str(refused.value) == (
        "tags of 4625 bytes, the largest of 1027 is 'big'; at most 4096 bytes of names and values are accepted"
    )


def test_a_report_says_how_the_clocks_of_a_captured_graph_were_set_in_known_words() -> None:
    given = report("00", 0, 0, 0)

    for captured in ("", "timetable", "one clock"):
        assert checked_iteration(replace(given, captured=captured), 0).iteration_index == 0
    with pytest.raises(ProtocolError, match="captured 'twice' must be empty or one of one clock, timetable"):
        checked_iteration(replace(given, captured="twice"), 0)


@drawn(st.integers(1, 64), st.integers(0, 10**9), st.integers(0, 10**9), st.booleans())
def test_iterations_that_are_reported_together_follow_each_other_and_last_as_long_as_they_did(
    num_together: int,
    lasted_ns: int,
    gap_ns: int,
    is_last: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    now_ns = time.monotonic_ns()
    begin_ns, end_ns = now_ns - lasted_ns - gap_ns, now_ns - gap_ns
    given = IterationReport("t", 99, 0, begin_ns, end_ns, 0 if is_last else now_ns, (), is_in_order=True)
    given.num_together, given.launched_iteration_index = num_together, 101
    singles = single_iterations(checked_iteration(given, 0), given)

    assert [single.iteration_index for single in singles] == list(range(100 - num_together, 100))
    assert singles[0].begin_ns == begin_ns
    assert (singles[-1].end_ns, singles[-1].next_begin_ns) == (end_ns, 0 if is_last else now_ns)
    for one, following in pairwise(singles):
        assert one.begin_ns <= one.end_ns <= one.next_begin_ns == following.begin_ns
        assert one.launched_iteration_index - one.iteration_index == 2


@pytest.mark.parametrize(
    "changes",
    [{"num_together": 0}, {"num_together": 65}, {"plan_epoch": 1}, {"is_in_order": False}, {"iteration_index": 2}],
)
def test_only_iterations_in_order_and_without_a_plan_may_be_reported_together(changes: dict[str, Any]) -> None:
    now_ns = time.monotonic_ns()
    given = IterationReport("t", 99, 0, now_ns, now_ns, now_ns, (), is_in_order=True, num_together=4)

    with pytest.raises(ProtocolError, match="num_together"):
        checked_iteration(replace(given, **changes), 0)


@drawn(st.lists(st.integers(0, 10**9), min_size=4, max_size=16).filter(lambda drawn: len(drawn) % 2 == 0), st.data())
def test_iterations_reported_together_with_the_times_of_each_keep_these_under_any_plan(
    lasted_ns: list[int], data: st.DataObject
) -> None:
    now_ns = time.monotonic_ns()
    bounds_ns = [now_ns - left_ns for left_ns in accumulate(reversed(lasted_ns))][::-1]
    num_together = len(bounds_ns) // 2
    rows = tuple(("F", k, 0, bounds_ns[2 * k], bounds_ns[2 * k + 1]) for k in range(num_together))
    given = IterationReport("t", 99, 1, bounds_ns[0], bounds_ns[-1], now_ns, rows, is_in_order=True)
    given.num_together = num_together
    singles = single_iterations(checked_iteration(given, 0), given)
    lost = data.draw(st.integers(0, num_together - 1))

    assert [(own.iteration_index, own.plan_epoch) for own in singles] == [
        (100 - k, 1) for k in range(num_together, 0, -1)
    ]
    assert [(own.begin_ns, own.end_ns) for own in singles] == [row[3:] for row in rows]
    assert [own.next_begin_ns for own in singles] == [*bounds_ns[2::2], now_ns]
    assert not any(own.instructions for own in singles)
    for wrong in (rows[:lost] + rows[lost + 1 :], (*rows[:-1], ("F", 0, 0, bounds_ns[-1], bounds_ns[0] - 1))):
        with pytest.raises(ProtocolError, match="num_together"):
            checked_iteration(replace(given, instructions=wrong), 0)
