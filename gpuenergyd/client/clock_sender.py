"""Sends a rank's clock requests to the daemon: one datagram each, without waiting."""

import itertools
import socket
from collections import deque
from time import monotonic_ns

from gpuenergyd.client.plans import PlannedClocks, PreparedPlan
from gpuenergyd.client.reporter import Reporter
from gpuenergyd.client.timing.recorder import IterationTimes
from gpuenergyd.client.timing.stream_requests import Datagram
from gpuenergyd.core.clock_request import MAX_LATER_CLOCKS, TimedClock
from gpuenergyd.core.pipeline.timetable import InstructionKey, TimetableEntry, replay_timetable
from gpuenergyd.wire.clock_request import fill_clock_request, pack_clock_request, pack_further_clocks

_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class PlannedClockRequest:
    """The clock request that a plan contains for one instruction; call it to send it."""

    __slots__ = ("_data", "_later_delay_ns", "_sender")

    def __init__(self, sender: "ClockSender", plan: PreparedPlan, clocks: PlannedClocks) -> None:
        """Pack the datagram, all but its number and instants, as sending it must take little time."""
        self._sender = sender
        sm_clock_mhz, later_sm_clock_mhz, later_delay_ns, further = clocks
        self._later_delay_ns = later_delay_ns if later_sm_clock_mhz else 0
        self._data = pack_clock_request(0, plan.token, plan.plan_epoch, sm_clock_mhz, later_sm_clock_mhz, 0, 0)
        if further:
            self._data += pack_further_clocks([TimedClock(mhz, delay_ns) for mhz, delay_ns in further], 0)

    def __call__(self) -> None:
        if (datagram := self.datagram()) is not None:
            data, sequence, later_delay_ns, _ = datagram
            now_mono_ns = monotonic_ns()
            later_at_mono_ns = now_mono_ns + later_delay_ns if later_delay_ns else 0
            self._sender.send(fill_clock_request(data, sequence, later_at_mono_ns, now_mono_ns))

    def datagram(self) -> Datagram | None:
        """Return the datagram to send when the instruction begins; None if nothing can be sent."""
        sender = self._sender
        reporter = sender.reporter
        clock_socket = None if reporter is None else reporter.clock_socket
        if clock_socket is None:
            sender.num_dropped += 1
            return None
        return self._data, sender.next_sequence() & 0xFFFFFFFF, self._later_delay_ns, clock_socket

    def give_up_socket(self) -> None:
        """Use a new connection for later requests."""
        if self._sender.reporter is not None:
            self._sender.reporter.retire_clock_socket()


class ClockSender:
    """Sends the requests of one rank through its reporter's socket; `reporter` is None before registration."""

    def __init__(self) -> None:
        self.reporter: Reporter | None = None
        self.timetables = ReplayTimetables()
        self.num_dropped = 0
        """Number of requests since the last report that could not be sent."""
        self.next_sequence = itertools.count(1).__next__
        """Returns the number of the next request."""

    @property
    def can_send(self) -> bool:
        """Whether a socket to the daemon is open."""
        return self.reporter is not None and self.reporter.clock_socket is not None

    def request_timetable(self, plan: PreparedPlan, begin_mono_ns: int) -> None:
        """Request all clocks of a replay that began at an instant."""
        now_mono_ns = monotonic_ns()
        clocks = self.timetables.clocks(plan, begin_mono_ns)
        later = [clock for clock in clocks if clock.at_mono_ns > now_mono_ns]
        # Before the first change, the last clock of the previous iteration is in force, which is this iteration's, too.
        present = clocks[len(clocks) - len(later) - 1]
        first = later[0] if later else TimedClock(0, 0)
        sequence, clocks_mhz = self.next_sequence() & 0xFFFFFFFF, (present.sm_clock_mhz, first.sm_clock_mhz)
        head = pack_clock_request(sequence, plan.token, plan.plan_epoch, *clocks_mhz, first.at_mono_ns, now_mono_ns)
        self.send(head + pack_further_clocks(later[1:], now_mono_ns))

    def send(self, datagram: bytes) -> None:
        """Send a datagram, without waiting; count it if that is not possible."""
        clock_socket = self.reporter.clock_socket if self.reporter is not None else None
        if clock_socket is None:
            self.num_dropped += 1
            return
        try:
            clock_socket.send(datagram, _SEND_FLAGS)
        except BlockingIOError:
            self.num_dropped += 1
        except OSError:
            self.num_dropped += 1
            if self.reporter is not None:
                self.reporter.retire_clock_socket()


_NUM_REPLAYS = 5
"""Few enough to follow a drift, and enough for a timetable to cover the usual variation."""


class ReplayTimetables:
    """Instruction times of one rank's recent graph replays; used only by the timer's thread."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, dict[InstructionKey, int]]] = deque(maxlen=_NUM_REPLAYS)

    def add_replay(self, plan_epoch: int, times: IterationTimes) -> None:
        begins = {(kind, m, chunk): begin - times.begin_mono_ns for kind, m, chunk, begin, _ in times.instructions}
        self._recent.append((plan_epoch, begins))

    def clocks(self, plan: PreparedPlan, begin_mono_ns: int) -> tuple[TimedClock, ...]:
        """Return the clocks of a replay that begins at an instant; the plan's highest clock if no replay is known.

        Instruction times come from replays under the same plan, else from the newest replay.
        """
        same_plan = [begins for epoch, begins in self._recent if epoch == plan.plan_epoch]
        replays = same_plan or [begins for _, begins in self._recent][-1:]
        entries = replay_timetable(plan.changes, replays, max_entries=MAX_LATER_CLOCKS)
        if not entries:
            entries = (TimetableEntry(0, max(change.sm_clock_mhz for change in plan.changes)),)
        return tuple(TimedClock(mhz, begin_mono_ns + offset_ns) for offset_ns, mhz in entries)
