"""Learns how old a GPU's clock may be when it is read: some drivers return a value for a while, one H200 for 100 ms.

Theory of operation. A value that is kept for some time never changes twice within it. Clocks change seldom, but power
is noisy: readings a few milliseconds apart show for how long power is kept, and clocks are taken to be kept as long.
Each value is refreshed at instants of its own, when it is asked for and old enough, so that a change of power does not
date a clock. What a reading of a clock proves is an interval: the clock was true at some instant since the age before
the reading, and since the reading before, if that one showed another clock.

Clocks contradict the assumption, and are then read as they are, if they change twice within the age, or if equal
changes show after equal times wherever in the age they are called for.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from gpuenergyd.gpu.device import GpuReading
from gpuenergyd.gpu.link.messages import ClockChangeReport

_PAUSE_NS = 2_000_000
_BURST_NS, _STILL_NS = 2_000_000_000, 300_000_000
"""Duration of a burst of readings, and of one in which power does not change."""
_FIRST_REPEAT_NS, _LAST_REPEAT_NS = 10_000_000_000, 640_000_000_000
"""Pauses between the bursts of a GPU whose power has told nothing yet."""
_LEAST_AGE_NS = 45_000_000
"""Shorter ages are ignored: half of one is within the error of latencies that is permitted."""
_NUM_SHORT = 3
"""Times between changes of power that are shorter than that, from which it is known not to be kept."""
_WIDEST_RATIO = 0.15
"""Largest relative error of a time between two changes that is used."""
_NUM_ALIKE, _NUM_ALIKE_IF_BUSY = 6, 16
"""Times between changes, as long as the shortest, that show for how long a value is kept."""
_TIGHT_RATIO, _NUM_TIGHT = 0.06, 3
"""Times that are known as exactly as that, without which more are needed: the host is busy."""
_ALIKE_RATIO = 0.07
"""How far a time may be from a multiple of the age, for each age in it."""
_LEAST_SHARE = 0.25
"""Share of all times between changes that must be alike: now and then a refresh shows the same power."""
_MAX_TIMES = 30
_LEAST_AGE_RATIO = 0.93
"""Shortest time between two refreshes, as a share of the age."""
_CLOSE_RATIO = 0.7
_NUM_CLOSE = 2
"""Changes of a clock closer than that part of the age, which contradict it."""
_APART_RATIO, _MAX_AGES = 0.25, 3.5
"""Two calls are compared that are up to so many ages apart, and no whole number of ages: with regular refreshes they
show after different times."""
_EQUAL_RATIO = 0.125
_NUM_EQUAL = 10
"""Pairs in a row that showed after times equal to that part of the age, although the calls were apart; with refreshes
at chance instants this happens once in two million times."""
_LOOKS_PER_AGE = 24
_FIRST_LOOK_RATIO = 0.6
GOLDEN_RATIO = 0.618034
"""Fractions of its multiples are spread evenly, however many there are."""

Bounds = tuple[int, int]
"""The shortest and the longest time, or the earliest and the latest instant."""


@dataclass(slots=True)
class _Changes:
    """One value, and the bounds of its newest change: the start of the reading before, the end of the one after it."""

    value: float | None = None
    read_ns: int = 0
    """Begin of the last reading."""
    changed_ns: Bounds | None = None

    def observe(self, value: float | None, begin_ns: int, end_ns: int) -> Bounds | None:
        """Process a reading; return the time since the change before, if it shows another one."""
        time_ns = None
        if value is not None:
            if self.value is not None and value != self.value:
                if self.changed_ns is not None:
                    time_ns = self.read_ns - self.changed_ns[1], end_ns - self.changed_ns[0]
                self.changed_ns = self.read_ns, end_ns
            self.value, self.read_ns = value, begin_ns
        return time_ns


@dataclass(slots=True)
class ClockAge:
    """Learns the greatest age of one GPU's clock readings, and dates them."""

    age_ns: int = 0
    """0 where clocks are read as they are, or nothing is known."""
    next_read_ns: int = 0
    """Instant of the next reading that learning needs; 0 for none."""
    _power: _Changes = field(default_factory=_Changes)
    _clock: _Changes = field(default_factory=_Changes)
    _is_known: bool = False
    _burst_begin_ns: int = 0
    """Begin of the present burst of readings; 0 between two bursts."""
    _repeat_ns: int = _FIRST_REPEAT_NS
    _times_ns: deque[Bounds] = field(default_factory=lambda: deque(maxlen=_MAX_TIMES))
    """Bounds of the times between changes of power."""
    _refreshed_ns: Bounds = (0, 0)
    """Bounds of the instant of the refresh that the last reading of the clock shows."""
    _followed_ns: int = 0
    _num_close: int = 0
    _shown_ns: dict[tuple[int | None, int], tuple[int, int]] = field(default_factory=dict)
    """When the last change between two clocks was called for, and after what time it showed, by old and new clock."""
    _num_equal: int = 0
    _num_first_looks: int = 0

    def observe(self, reading: GpuReading) -> int:
        """Process a reading; return the earliest instant at which its clock may have been true."""
        begin_ns, end_ns = reading.read_mono_ns, reading.sm_clock_by_mono_ns or reading.read_mono_ns
        time_ns = self._clock.observe(reading.sm_clock_mhz, begin_ns, end_ns)
        if self.age_ns and time_ns is not None and time_ns[1] < _CLOSE_RATIO * self.age_ns:
            self._num_close += 1
            self._contradict(is_certain=self._num_close >= _NUM_CLOSE)
        if not self._is_known and reading.power_w is not None:
            self._learn(reading.power_w, begin_ns, end_ns)
        if not self.age_ns:
            return begin_ns
        self._follow(begin_ns, end_ns)
        return self._refreshed_ns[0]

    def _follow(self, begin_ns: int, end_ns: int) -> None:
        """Follow the refreshes of the clock: they may be due, or overdue, by the bounds of the last one."""
        (early_ns, late_ns), before_ns = self._refreshed_ns, self._followed_ns
        self._followed_ns = begin_ns
        due_ns = early_ns + round(_LEAST_AGE_RATIO * self.age_ns)
        if self._clock.changed_ns is not None and self._clock.changed_ns[1] == end_ns:
            early_ns, late_ns = self._clock.changed_ns
        elif begin_ns > late_ns + self.age_ns:
            early_ns, late_ns = max(due_ns, before_ns if before_ns < due_ns else 0), end_ns
        elif end_ns >= due_ns:
            late_ns = end_ns
        self._refreshed_ns = max(early_ns, begin_ns - self.age_ns), late_ns

    def first_look_ns(self, returned_ns: int) -> int:
        """Return when to look first for the effect of a change.

        A look may refresh the clock, and then nothing new shows for the age. So the first one comes at another time
        after each change.
        """
        self._num_first_looks += 1
        share = self._num_first_looks * GOLDEN_RATIO % 1.0
        return returned_ns + round(share * _FIRST_LOOK_RATIO * self.age_ns)

    @property
    def look_pause_ns(self) -> int:
        """Pause between further looks: always the same, since a refresh may come at any time."""
        return self.age_ns // _LOOKS_PER_AGE

    def has_shown(self, change: ClockChangeReport, shown_ns: int) -> None:
        """Take the instant at which a change showed that an earlier look had not shown."""
        if not self.age_ns:
            return
        kind = change.previous_sm_clock_mhz, change.requested_sm_clock_mhz
        called_ns, after_ns = change.called_mono_ns, shown_ns - change.called_mono_ns
        known_called_ns, known_after_ns = self._shown_ns.get(kind, (0, 0))
        self._shown_ns[kind] = called_ns, after_ns
        phase_ns = (called_ns - known_called_ns) % self.age_ns
        is_apart = min(phase_ns, self.age_ns - phase_ns) > _APART_RATIO * self.age_ns
        if is_apart and called_ns - known_called_ns < _MAX_AGES * self.age_ns:
            is_equal = abs(after_ns - known_after_ns) < _EQUAL_RATIO * self.age_ns
            self._num_equal = self._num_equal + 1 if is_equal else 0
            self._contradict(is_certain=self._num_equal >= _NUM_EQUAL)

    def _contradict(self, *, is_certain: bool) -> None:
        if is_certain:
            self.age_ns, self._is_known = 0, True

    def _learn(self, power_w: float, begin_ns: int, end_ns: int) -> None:
        """Have readings follow one another for a while, until power has changed often enough."""
        if not self._burst_begin_ns:
            if begin_ns < self.next_read_ns:
                return
            self._burst_begin_ns, self._power = begin_ns, _Changes()
        time_ns = self._power.observe(power_w, begin_ns, end_ns)
        if time_ns is not None:
            self._times_ns.append(time_ns)
            self._conclude()
        passed_ns = end_ns - self._burst_begin_ns
        if self._is_known:
            self.next_read_ns = 0
        elif passed_ns < (_STILL_NS if self._power.changed_ns is None else _BURST_NS):
            self.next_read_ns = end_ns + _PAUSE_NS
        else:
            self._burst_begin_ns, self.next_read_ns = 0, end_ns + self._repeat_ns
            self._repeat_ns = min(2 * self._repeat_ns, _LAST_REPEAT_NS)

    def _conclude(self) -> None:
        """Tell from the times between changes of power for how long it is kept, if they are enough."""
        if sum(longest_ns < _LEAST_AGE_NS for _, longest_ns in self._times_ns) >= _NUM_SHORT:
            self._is_known = True
            return
        exact = [bounds for bounds in self._times_ns if bounds[1] - bounds[0] < _WIDEST_RATIO * bounds[1]]
        shortest_ns = min((longest_ns for _, longest_ns in exact), default=0)
        alike = [bounds for bounds in exact if bounds[0] <= (1 + _ALIKE_RATIO) * shortest_ns]
        is_tight = sum(bounds[1] - bounds[0] < _TIGHT_RATIO * bounds[1] for bounds in alike) >= _NUM_TIGHT
        if len(alike) < max(_NUM_ALIKE if is_tight else _NUM_ALIKE_IF_BUSY, _LEAST_SHARE * len(exact)):
            return
        period_ns = median(sum(bounds) / 2 for bounds in alike)
        if all(_is_multiple(sum(bounds) / 2, period_ns) for bounds in exact):
            self.age_ns, self._is_known = shortest_ns, True


def _is_multiple(time_ns: float, period_ns: float) -> bool:
    num_periods = max(1, round(time_ns / period_ns))
    return abs(time_ns - num_periods * period_ns) <= _ALIKE_RATIO * num_periods * period_ns
