"""Update instants of an energy counter, found by reading near the expected ones. Time is an argument.

Theory of operation. An energy counter moves in steps: two readings give the energy between two updates, not between
the readings. So both ends of a window must be updates at known instants. First the period is learned by reading often
for a moment. From then on the updates are expected on a grid; a reading shortly before and one shortly after an
expected update confirm it or show in which direction it drifted. A change between two readings belongs to the last
update between them. Where that is ambiguous (the last update is at the very edge of a long interval that contains
several), the change is left out, since a wrong assignment would cost a whole step of energy.

A reading takes `took_ns`, milliseconds with some drivers; its instant is the middle of the call. A counter that is
updated about as often as it can be read is not tracked: each reading shows an update at most one period old, so it is
dated half a period back. That is the same at both ends of a window, so that the energy between them is right.
"""

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

_LEARN_POLL_NS = 1_000_000
_LEARN_NUM_EDGES = 5
_LEARN_MIN_EDGES = 3
_LEARN_LIMIT_NS = 1_500_000_000
_LEARN_AGAIN_NS = 10_000_000_000
_LEARN_SOON_NS = 2_000_000_000
"""Pause of a counter that had to wait for another one, or that moved while a busy host read it too rarely."""
_TRACK_EVERY_NS = 1_000_000_000
_DATE_EVERY_NS = 300_000_000
_MARGIN_NS = 700_000
_LATE_POLL_NS = 1_000_000
_NARROW_NS = 4_000_000
_MAX_LATE_POLLS = 8
_GUARD_NS = 3_000_000
_SURE_NS = 6_000_000
"""Part of a period in which readings are surely after one update and before the next."""
_MAX_DRIFTS = 12
_NEW_ANCHOR_NS = 60_000_000_000
_GAP_TO_CALL = 10
"""Gaps below this many calls are inexact: a call looks at the counter at some instant within it."""
_SPAN_TO_CALL = 60
"""Calls over which the period is learned at least."""
_MAX_READS_PER_PERIOD = 1.5
"""A counter whose period is at most this many intervals between readings is fast."""
_MAX_UNCHANGED = 8
"""Readings of a fast counter without a change, after which its period is learned again."""


@dataclass(slots=True)
class EnergyEdges:
    """Tracks one counter: from each reading, the newest update and the instant of the next reading."""

    edge_mono_ns: int | None = None
    edge_energy_j: float | None = None
    period_ns: int = 0
    next_read_ns: int = 0
    """Instant of the next extra reading; 0 when the periodic readings are enough."""
    is_fast: bool = False
    """Whether the counter is updated about as often as it can be read."""
    _took_ns: int = 0
    _polled_ns: int = 0
    _num_polls: int = 0
    _num_unchanged: int = 0
    _last_j: float | None = None
    _last_read_ns: int = 0
    _since_ns: int = 0
    _again_ns: int = 0
    """Instant at which learning starts over if the period is not known by then."""
    _num_changes: int = 0
    """Number of updates seen since learning began, dated or not."""
    _seen_ns: tuple[int, ...] = ()
    _grid_ns: int = 0
    _anchor_ns: int = 0
    _target_ns: int = 0
    _late_polls: int = 0
    _has_dated_by_period: bool = False
    _reads_half_way: bool = False
    _num_drifts: int = 0

    @property
    def is_learning(self) -> bool:
        """Whether the period is being learned, which needs readings a millisecond apart."""
        return self.next_read_ns > 0 and not self.period_ns

    def postpone_learning(self, now_ns: int) -> None:
        """Begin to learn the period a little later: another counter is being read often now."""
        self._start_learning(now_ns)
        self._again_ns = now_ns + _LEARN_SOON_NS
        self.next_read_ns = 0

    def observe(self, read_mono_ns: int, total_energy_j: float | None, *, took_ns: int = 0) -> None:
        """Process one reading, a call of `took_ns` around the instant."""
        if total_energy_j is None:
            self.next_read_ns = 0
            return
        self._took_ns = took_ns
        before_j, before_ns = self._last_j, self._last_read_ns
        self._last_j, self._last_read_ns = total_energy_j, read_mono_ns
        if before_j is None or total_energy_j < before_j:
            self.edge_mono_ns = self.edge_energy_j = None
            self._start_learning(read_mono_ns)
        elif self.is_fast:
            self._follow_fast(read_mono_ns, total_energy_j, has_changed=total_energy_j > before_j)
        elif not self.period_ns:
            self._learn(before_ns, read_mono_ns, has_changed=total_energy_j > before_j)
        elif total_energy_j > before_j:
            self._locate(before_ns, read_mono_ns, total_energy_j)
        else:
            self._await(read_mono_ns)

    @property
    def _narrow_ns(self) -> int:
        """The longest interval between two readings that dates an update between them."""
        return max(_NARROW_NS, 2 * (self._took_ns + _LEARN_POLL_NS))

    @property
    def _guard_ns(self) -> int:
        """Readings closer to an update than this may be before or after it."""
        return _GUARD_NS + self._took_ns

    def _start_learning(self, now_ns: int) -> None:
        self.period_ns = 0
        self.is_fast = False
        self._polled_ns = self._num_polls = self._num_unchanged = 0
        self._reads_half_way = False
        self._seen_ns = ()
        self._since_ns, self._again_ns = now_ns, now_ns + _LEARN_AGAIN_NS
        self._num_changes = 0
        self.next_read_ns = now_ns + _LEARN_POLL_NS

    def _learn(self, before_ns: int, now_ns: int, *, has_changed: bool) -> None:
        if now_ns - before_ns <= self._narrow_ns:
            self._polled_ns += now_ns - before_ns
            self._num_polls += 1
        if has_changed and now_ns - before_ns <= self._narrow_ns:
            middle_ns = (before_ns + now_ns) // 2
            self._seen_ns += (middle_ns,)
            self.edge_mono_ns, self.edge_energy_j = middle_ns, self._last_j
        self._num_changes += has_changed
        waited_ns = now_ns - self._since_ns
        num_needed = _LEARN_NUM_EDGES if waited_ns <= _LEARN_LIMIT_NS else _LEARN_MIN_EDGES
        span_ns = self._seen_ns[-1] - self._seen_ns[0] if self._seen_ns else 0
        has_enough = len(self._seen_ns) >= num_needed and span_ns >= _SPAN_TO_CALL * self._took_ns
        if has_enough:
            # Updates between distant readings are missed, so a gap may contain several periods.
            gaps_ns = [b - a for a, b in pairwise(self._seen_ns)]
            # The shortest gap is one period; where slow calls make gaps inexact, it is shorter than one.
            one_ns = median(gaps_ns) if min(gaps_ns) < _GAP_TO_CALL * self._took_ns else min(gaps_ns)
            num_periods = sum(max(1, round(gap_ns / one_ns)) for gap_ns in gaps_ns)
            self.period_ns = span_ns // num_periods
            self._num_drifts = 0
            self._grid_ns = self._anchor_ns = self._seen_ns[-1]
            shortest_ns = max(_MAX_READS_PER_PERIOD * self._polled_ns / self._num_polls, 2 * self._guard_ns + _SURE_NS)
            if self.period_ns <= shortest_ns:
                self.is_fast = True
                self.next_read_ns = 0
            else:
                self._aim(now_ns)
        elif now_ns > self._again_ns:
            self._start_learning(now_ns)
        elif waited_ns > _LEARN_LIMIT_NS and not self._seen_ns:  # it hardly moves, or is read too rarely
            if self.next_read_ns and self._num_changes > 1:
                self._again_ns = now_ns + _LEARN_SOON_NS
            self.next_read_ns = 0
        else:
            self.next_read_ns = now_ns + _LEARN_POLL_NS

    def _follow_fast(self, now_ns: int, energy_j: float, *, has_changed: bool) -> None:
        """Date a reading of a fast counter."""
        if has_changed:
            self._num_unchanged = 0
            self.edge_mono_ns, self.edge_energy_j = now_ns - self.period_ns // 2, energy_j
            return
        self._num_unchanged += 1
        if self._num_unchanged > _MAX_UNCHANGED:
            self._start_learning(now_ns)

    def _aim(self, after_ns: int) -> None:
        """Choose the next update to track: soon while the period is inaccurate, then once a second.

        Where periodic readings are too close to the updates to date them, extra readings do: three times a second.
        """
        limit_ns = _TRACK_EVERY_NS if self._has_dated_by_period else _DATE_EVERY_NS
        self._has_dated_by_period = False
        pause_ns = min(limit_ns, (after_ns - self._anchor_ns) // 4)
        ahead = max(1, -(-(after_ns + pause_ns - self._grid_ns) // self.period_ns))
        self._target_ns = self._grid_ns + ahead * self.period_ns
        self._late_polls = 0
        self._schedule_read(after_ns)

    def _locate(self, before_ns: int, now_ns: int, energy_j: float) -> None:
        """Determine when the counter was updated between two readings."""
        last_ns = self._grid_ns + (now_ns - self._grid_ns) // self.period_ns * self.period_ns
        since_ns = now_ns - last_ns
        guard_ns = self._guard_ns
        may_hold_several = now_ns - before_ns > self.period_ns - 2 * guard_ns
        if may_hold_several and not guard_ns <= since_ns <= self.period_ns - guard_ns:
            if now_ns >= self._target_ns - _MARGIN_NS:  # too early to be dated from readings so far apart
                self._reads_half_way = True
                self._aim(now_ns)
            else:
                self._schedule_read(now_ns)
            return
        is_expected_between = last_ns > before_ns
        if is_expected_between:
            edge_ns = last_ns
        else:  # it drifted: use the nearer reading
            self._num_drifts += 1
            if self._num_drifts > _MAX_DRIFTS:
                self._start_learning(now_ns)
                return
            is_late = before_ns - last_ns <= last_ns + self.period_ns - now_ns
            edge_ns = before_ns if is_late else now_ns
        is_narrow = now_ns - before_ns <= self._narrow_ns
        if is_expected_between and is_narrow:
            self._num_drifts = 0
        if is_narrow or not is_expected_between:
            num_periods = round((edge_ns - self._anchor_ns) / self.period_ns)
            if num_periods > 0:
                self.period_ns = round((edge_ns - self._anchor_ns) / num_periods)
            if edge_ns - self._anchor_ns > _NEW_ANCHOR_NS:
                self._anchor_ns = edge_ns
            self._grid_ns = edge_ns
        self.edge_mono_ns, self.edge_energy_j = edge_ns, energy_j
        if now_ns >= self._target_ns - _MARGIN_NS:
            self._aim(edge_ns)
        else:
            self._has_dated_by_period = True
            self._schedule_read(now_ns)

    def _await(self, now_ns: int) -> None:
        """Handle a reading without a change."""
        if now_ns < self._target_ns + _MARGIN_NS:
            self._schedule_read(now_ns)
            return
        self._late_polls += 1
        if self._late_polls > _MAX_LATE_POLLS:
            self._start_learning(now_ns)
        else:
            self.next_read_ns = now_ns + _LATE_POLL_NS

    def _schedule_read(self, now_ns: int) -> None:
        half_way_ns = self._target_ns - self.period_ns // 2
        if self._reads_half_way and now_ns < half_way_ns:
            self.next_read_ns = half_way_ns
            return
        is_near = now_ns >= self._target_ns - 2 * _MARGIN_NS - self._took_ns
        self.next_read_ns = self._target_ns + (_MARGIN_NS if is_near else -_MARGIN_NS - self._took_ns)
