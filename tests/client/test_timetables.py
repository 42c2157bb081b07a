"""Requests with a timetable: the clocks of a whole replay, counted from its begin on the GPU."""

import socket
from collections.abc import Iterator
from time import monotonic_ns
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.client.clock_sender import ClockSender, ReplayTimetables
from gpuenergyd.client.plans import PreparedPlan, prepare
from gpuenergyd.client.reporter import Reporter
from gpuenergyd.client.timing.recorder import IterationTimes
from gpuenergyd.core.clock_request import MAX_LATER_CLOCKS, ClockRequest, TimedClock
from gpuenergyd.wire.clock_request import (
    MAX_DATAGRAM_BYTES,
    TOKEN_BYTES,
    decode_clock_request,
    pack_clock_request,
    pack_further_clocks,
)
from gpuenergyd.wire.messages import ChangeRow, PlanSlice

MS = 1_000_000


def times_of(*begins_ms: int) -> IterationTimes:
    """Return the times of a replay whose microbatches begin so many ms after it."""
    rows = tuple(("F", k, 0, 5000 * MS + ms * MS, 5000 * MS + ms * MS + MS) for k, ms in enumerate(begins_ms))
    return IterationTimes(5000 * MS, 6000 * MS, 6001 * MS, rows)


def plan_of(*changes: ChangeRow, epoch: int = 4) -> PreparedPlan:
    return prepare(PlanSlice("plan", epoch, 0, changes), bytes(TOKEN_BYTES))


class Sent:
    """A sender whose datagrams are read."""

    def __init__(self) -> None:
        own, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sender = ClockSender()
        self.sender.reporter = cast("Reporter", SimpleNamespace(clock_socket=own))
        self._own = own

    def request(self) -> ClockRequest:
        return decode_clock_request(self._other.recv(MAX_DATAGRAM_BYTES + 1)).request

    def close(self) -> None:
        """Close both ends."""
        self._own.close()
        self._other.close()


@pytest.fixture
def sent() -> Iterator[Sent]:
    made = Sent()
    yield made
    made.close()


PLAN = plan_of(("F", 0, 0, 0, 1410), ("F", 1, 0, 0, 900), ("F", 1, 0, 30 * MS, 1410))


def test_replays_of_the_same_plan_count_before_a_newer_one_of_another() -> None:
    timetables = ReplayTimetables()
    timetables.add_replay(4, times_of(10, 100))
    timetables.add_replay(3, times_of(10, 300))

    assert [clock.at_mono_ns for clock in timetables.clocks(PLAN, 0)] == [10 * MS, 100 * MS, 130 * MS]
    assert [c.at_mono_ns for c in timetables.clocks(plan_of(*[("F", 1, 0, 0, 900)], epoch=9), 0)] == [300 * MS]


def test_before_any_replay_is_known_the_highest_clock_of_the_plan_is_requested() -> None:
    assert ReplayTimetables().clocks(PLAN, 7) == (TimedClock(1410, 7),)


def test_a_request_holds_the_present_clock_and_all_later_ones_to_the_microsecond(sent: Sent) -> None:
    sent.sender.timetables.add_replay(4, times_of(1, 100_000))
    begin_ns = monotonic_ns() - 50 * MS
    sent.sender.request_timetable(PLAN, begin_ns)

    request = sent.request()
    assert (request.sm_clock_mhz, request.plan_epoch) == (1410, 4)
    assert [clock.sm_clock_mhz for clock in request.later] == [900, 1410]
    for clock, at_ms in zip(request.later, (100_000, 100_030), strict=True):
        assert 0 <= clock.at_mono_ns - (begin_ns + at_ms * MS) < 1000


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=MAX_LATER_CLOCKS))
def test_clocks_within_a_microsecond_arrive_in_their_order(delays_ns: list[int]) -> None:
    sent_ns = 1_000_000_007
    first, *further = (TimedClock(900 + k, sent_ns + delay_ns) for k, delay_ns in enumerate(sorted(delays_ns)))
    head = pack_clock_request(1, bytes(16), 4, 1410, first.sm_clock_mhz, first.at_mono_ns, sent_ns)

    request = decode_clock_request(head + pack_further_clocks(further, sent_ns)).request

    assert [clock.sm_clock_mhz for clock in request.later] == [900 + k for k in range(len(delays_ns))]


def test_before_the_first_change_the_last_clock_of_the_iteration_before_is_in_force(sent: Sent) -> None:
    sent.sender.timetables.add_replay(4, times_of(200_000, 300_000))
    sent.sender.request_timetable(plan_of(("F", 0, 0, 0, 1410), ("F", 1, 0, 0, 900)), monotonic_ns())

    request = sent.request()
    assert request.sm_clock_mhz == 900
    assert [clock.sm_clock_mhz for clock in request.later] == [1410, 900]


def test_a_timetable_that_has_passed_is_its_last_clock(sent: Sent) -> None:
    sent.sender.timetables.add_replay(4, times_of(1, 2))
    sent.sender.request_timetable(PLAN, monotonic_ns() - 10_000 * MS)

    request = sent.request()
    assert (request.sm_clock_mhz, request.later, request.plan_epoch) == (1410, (), 4)


def test_the_longest_timetable_fits_into_one_request(sent: Sent) -> None:
    count = 2 * MAX_LATER_CLOCKS
    sent.sender.timetables.add_replay(4, times_of(*(100_000 + 10 * k for k in range(count))))
    changes: list[ChangeRow] = [("F", k, 0, 0, 900 if k % 2 else 1410) for k in range(count)]
    sent.sender.request_timetable(plan_of(*changes), monotonic_ns())

    request = sent.request()
    assert 2 <= len(request.later) <= MAX_LATER_CLOCKS
    assert max(clock.sm_clock_mhz for clock in request.later) == 1410
