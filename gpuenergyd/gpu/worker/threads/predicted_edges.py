"""Updates of an energy counter that costs much to read: they are predicted, and read about once a second.

Theory of operation. Such a counter moves on a steady grid (on an H200 every 100.00 ms), while a reading takes 2 to
20 ms of CPU time. Where the grid is known, one reading well between two updates is enough: it shows the value at the
update before, whose instant is predicted. So the grid is kept as bounds that contain it for certain: of the instant of
one update, and of the period. A reading that shows the old value began before the update, one that shows the new ended
after it. The bounds of the instant widen with those of the period, until they are confirmed: readings follow one
another across a predicted update until the value has changed. The longer a grid has been followed the narrower are the
bounds of its period, so that confirmations become rare, one in half a minute. A grid that is not where it is predicted
is lost; then the period is learned again.

Readings cost a part of a core, whose share is limited: one a second is always made, more are made on request while the
share is not used up.
"""

import math
from dataclasses import dataclass, field, replace

DATE_EVERY_NS = 900_000_000
"""Time between dated updates; with the wait for a sample it is below the 1.3 s that the daemon waits for energy."""
_AFTER_RATIO = 0.05
"""Part of a period after the last instant at which an update is expected, from which it is read: its value is fresh,
and a long call ends before the next one."""
_CONFIRMED_EVERY_NS = 30_000_000_000
_CONFIRMED_AT_RATIO = 0.2
"""Width of the bounds, as a part of a period, at which the grid is confirmed earlier."""
_DRIFT_RATIO = 50e-6
"""How much the period of a counter may change, as the host's clock sees it."""
_AWAITED_RATIO = 0.15
"""Part of a period after the last instant at which an update is expected, up to which it is awaited."""
_WIDEST_RATIO = 0.3
"""Part of a period: an update within wider bounds confirms nothing."""
_MAX_MISSED = 3
"""Updates that did not come when expected, after which the grid is lost."""
_MAX_WIDTH_RATIO = 0.7
"""Part of a period: with wider bounds nothing can be dated, and the grid is lost."""
_LEAD_NS = 1_000_000
"""How long before the earliest expected instant a confirmation begins, in addition to the duration of a call."""
UNEVEN_NS = 2_000_000
"""How far a single update may be from the grid."""
_WIDENED_NS, _WIDENED_RATIO = 5_000_000, 0.005
"""Margins added to the bounds of instant and period after an update that did not come when expected."""
_MAX_AVERAGED = 10
"""Confirmations whose mean is the likely instant of an update."""
_EXTRA_PAUSE_NS = 150_000_000
_MAX_CPU_RATIO = 0.0095
"""Share of a core for one counter's readings; while less is used, extra readings are made."""
_MAX_SAVED_NS = 60_000_000
_MAX_OVERDRAWN_NS = 8_000_000
"""Largest debt of CPU time of confirmations; more is forgiven, since they become rare then."""
_TOOK_WEIGHT = 8


@dataclass(frozen=True, slots=True)
class _ExpectedUpdate:
    """An update that is being looked for, and the last reading before it."""

    number: int
    """Number of periods since the last confirmed update."""
    give_up_ns: int
    is_sure: bool
    """Whether the first reading has surely shown the old value."""
    called_ns: int
    energy_j: float


@dataclass(slots=True)
class PredictedEdges:
    """The grid of one counter's updates, the newest dated one, and the instant of the next reading."""

    early_ns: int
    late_ns: int
    """Bounds of the instant of an update."""
    shortest_ns: float
    longest_ns: float
    """Bounds of the period."""
    edge_mono_ns: int | None = None
    edge_energy_j: float | None = None
    next_read_ns: int = 0
    is_lost: bool = False
    """Whether updates are no longer where they are predicted, or the counter has restarted."""
    _anchor_ns: tuple[int, int] = field(init=False)
    """Bounds of the first update of the grid."""
    _edge_ns: float = field(init=False)
    """The likely instant of the update within its bounds."""
    _num_confirmed: int = 0
    _confirm_ns: int = field(init=False)
    """Instant from which the grid is to be confirmed."""
    _target: int = 0
    """Number of the update that the next reading is the first to look for; 0 if it only dates one."""
    _awaited: _ExpectedUpdate | None = None
    _num_missed: int = 0
    _took_ns: int = 0
    _last_j: float | None = None
    _saved_ns: int = 0
    """CPU time that may be used and has not been; negative if more was used."""
    _saved_at_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self._anchor_ns = self.early_ns, self.late_ns
        self._edge_ns = (self.early_ns + self.late_ns) / 2
        self._confirm_ns = self._due_for_confirmation_ns()
        self._saved_at_ns = self.late_ns
        self._plan(self.late_ns)

    @property
    def period_ns(self) -> float:
        return (self.shortest_ns + self.longest_ns) / 2

    def read_soon(self, now_ns: int) -> None:
        """Read the counter at the next good instant, a while after the last one, while the share is not used up."""
        if self._awaited is None and self._available_ns(now_ns) > 0:
            dated_ns = self.edge_mono_ns or 0
            read_ns = self._between_updates(max(now_ns, dated_ns + _EXTRA_PAUSE_NS))
            if read_ns < self.next_read_ns:
                self.next_read_ns, self._target = read_ns, 0

    def observe(self, called_ns: int, returned_ns: int, energy_j: float, *, cpu_ns: int) -> None:
        """Process one reading: a call between two instants, which used CPU time."""
        self._saved_ns = max(self._available_ns(returned_ns) - cpu_ns, -_MAX_OVERDRAWN_NS)
        self._saved_at_ns = returned_ns
        took_ns = returned_ns - called_ns
        self._took_ns += (took_ns - self._took_ns) // (_TOOK_WEIGHT if self._took_ns else 1)
        before_j, self._last_j = self._last_j, energy_j
        if before_j is not None and energy_j < before_j:
            self.edge_mono_ns = self.edge_energy_j = None
            self.is_lost = True
        elif self._awaited is not None:
            self._look(self._awaited, called_ns, returned_ns, energy_j)
        elif self._target and called_ns < self._earliest_ns(self._target):
            is_sure = returned_ns <= self._earliest_ns(self._target)
            give_up_ns = self._latest_ns(self._target) + round(_AWAITED_RATIO * self.period_ns)
            self._awaited = _ExpectedUpdate(self._target, give_up_ns, is_sure, called_ns, energy_j)
            self.next_read_ns = returned_ns
        else:
            self._date(called_ns, returned_ns, energy_j)
            self._plan(returned_ns)

    def _look(self, awaited: _ExpectedUpdate, called_ns: int, returned_ns: int, energy_j: float) -> None:
        """See whether the update has come between two readings that follow one another."""
        has_come = energy_j > awaited.energy_j
        if not has_come and called_ns <= awaited.give_up_ns:
            self._awaited = replace(awaited, called_ns=called_ns, energy_j=energy_j)
            self.next_read_ns = returned_ns
            return
        self._awaited = None
        number = awaited.number
        early_ns = max(awaited.called_ns - UNEVEN_NS, self._earliest_ns(number))
        late_ns = min(returned_ns + UNEVEN_NS, self._latest_ns(number))
        is_before_next = returned_ns < self._earliest_ns(number + 1)
        was_interrupted = has_come and returned_ns - awaited.called_ns > _WIDEST_RATIO * self.period_ns
        if has_come and not was_interrupted and is_before_next and early_ns <= late_ns:
            likely_ns = self._edge_ns + number * self.period_ns
            self._confirm(early_ns, late_ns, likely_ns, (awaited.called_ns + returned_ns) / 2)
            self.edge_mono_ns, self.edge_energy_j = round(self._edge_ns), energy_j
        elif awaited.is_sure and is_before_next and not was_interrupted:
            self._miss(returned_ns)
        self._plan(returned_ns)

    def _miss(self, now_ns: int) -> None:
        """Look for the next update at once, within wider bounds, unless that was in vain too often."""
        self._num_missed += 1
        self.is_lost = self._num_missed >= _MAX_MISSED
        self.early_ns, self.late_ns = self.early_ns - _WIDENED_NS, self.late_ns + _WIDENED_NS
        self.shortest_ns, self.longest_ns = (
            self.shortest_ns * (1 - _WIDENED_RATIO),
            self.longest_ns * (1 + _WIDENED_RATIO),
        )
        self._confirm_ns = now_ns

    def _confirm(self, early_ns: int, late_ns: int, likely_ns: float, seen_ns: float) -> None:
        """Narrow the bounds of the grid by those of an update, which is likely where most updates were seen."""
        self._num_confirmed = min(self._num_confirmed + 1, _MAX_AVERAGED)
        likely_ns += (seen_ns - likely_ns) / self._num_confirmed
        self._edge_ns = min(max(likely_ns, early_ns), late_ns)
        drift_ns = _DRIFT_RATIO * self.period_ns
        total = round((early_ns + late_ns - sum(self._anchor_ns)) / 2 / self.period_ns)
        shortest_ns = max(self.shortest_ns, (early_ns - self._anchor_ns[1]) / total) - drift_ns
        longest_ns = min(self.longest_ns, (late_ns - self._anchor_ns[0]) / total) + drift_ns
        if shortest_ns < longest_ns:
            self.shortest_ns, self.longest_ns = shortest_ns, longest_ns
        self.early_ns, self.late_ns = early_ns, late_ns
        self._num_missed = 0
        self._confirm_ns = self._due_for_confirmation_ns()

    def _due_for_confirmation_ns(self) -> int:
        """Return when the bounds will be so wide that the grid is to be confirmed."""
        left_ns = _CONFIRMED_AT_RATIO * self.period_ns - (self.late_ns - self.early_ns)
        num_periods = max(0.0, left_ns / max(1.0, self.longest_ns - self.shortest_ns))
        pause_ns = max(DATE_EVERY_NS, num_periods * self.period_ns)
        return round(self.late_ns + min(_CONFIRMED_EVERY_NS, pause_ns))

    def _date(self, called_ns: int, returned_ns: int, energy_j: float) -> None:
        """Date the update before a reading that surely lies between two updates."""
        number = math.floor((called_ns - self._edge_ns) / self.period_ns)
        is_between = self._latest_ns(number) <= called_ns and returned_ns <= self._earliest_ns(number + 1)
        if is_between and self._num_confirmed and not self._num_missed:
            self.edge_mono_ns, self.edge_energy_j = round(self._edge_ns + number * self.period_ns), energy_j

    def _plan(self, now_ns: int) -> None:
        """Choose the next reading: one between two updates, or the first of a confirmation."""
        due_ns = now_ns
        if not self._num_confirmed:  # nothing is dated before
            due_ns = max(now_ns, self._confirm_ns)
        elif self.edge_mono_ns is not None:
            due_ns = max(now_ns, min(self.edge_mono_ns + DATE_EVERY_NS, self._confirm_ns))
            if self._available_ns(now_ns) < 0:  # what could not be dated is not read again at once
                due_ns = max(due_ns, now_ns + _EXTRA_PAUSE_NS)
        number = math.floor((due_ns - self._edge_ns) / self.period_ns) + 1
        if self._latest_ns(number) - self._earliest_ns(number) > _MAX_WIDTH_RATIO * self.period_ns:
            self.is_lost = True
        if due_ns < self._confirm_ns:
            self.next_read_ns, self._target = self._between_updates(due_ns), 0
            return
        lead_ns = self._took_ns + _LEAD_NS
        if self._earliest_ns(number) - lead_ns < due_ns:
            number += 1
        self.next_read_ns, self._target = self._earliest_ns(number) - lead_ns, number

    def _between_updates(self, after_ns: int) -> int:
        """Return the next instant after another at which an update has come and the next is far."""
        margin_ns = round(_AFTER_RATIO * self.period_ns)
        number = math.floor((after_ns - self._edge_ns) / self.period_ns)
        while self._latest_ns(number) + margin_ns < after_ns:
            number += 1
        return self._latest_ns(number) + margin_ns

    def _earliest_ns(self, number: int) -> int:
        return math.floor(self.early_ns + number * self.shortest_ns)

    def _latest_ns(self, number: int) -> int:
        return math.ceil(self.late_ns + number * self.longest_ns)

    def _available_ns(self, now_ns: int) -> int:
        """Return the CPU time that may be used now."""
        earned_ns = round(_MAX_CPU_RATIO * (now_ns - self._saved_at_ns))
        return min(_MAX_SAVED_NS, self._saved_ns + earned_ns)
