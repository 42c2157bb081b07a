"""Narrows down when clock changes took effect, by clocks that a training program has had its GPU count."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from gpuenergyd.gpu.device import SAME_CLOCK_MHZ
from gpuenergyd.gpu.link.messages import ClockChangeReport
from gpuenergyd.wire.messages import TrueClockRow

_MAX_CHANGES, _MAX_CLOCKS = 64, 512
_MAX_WIDTH_NS = 15_000_000
"""Wider bounds are not much better than those from many changes."""


@dataclass(slots=True)
class TrueClocks:
    """The newest changes of one GPU, and the clocks that it has counted.

    A program may say anything of its clocks, and latencies are those of all GPUs of the model: what contradicts the
    bounds that the worker has read is not used.
    """

    _changes: deque[ClockChangeReport] = field(default_factory=lambda: deque(maxlen=_MAX_CHANGES))
    _clocks: deque[TrueClockRow] = field(default_factory=lambda: deque(maxlen=_MAX_CLOCKS))

    def add_change(self, change: ClockChangeReport) -> None:
        """Keep a change that may be narrowed."""
        self._changes.append(change)

    def narrowed(self, clocks: Iterable[TrueClockRow]) -> tuple[tuple[ClockChangeReport, ClockChangeReport], ...]:
        """Add clocks; return each change of which the effect is now known closely, as read and narrowed, once."""
        self._clocks.extend(clocks)
        found = {change.returned_mono_ns: (change, narrow) for change, narrow in self._narrow_ones()}
        remaining = [change for change in self._changes if change.returned_mono_ns not in found]
        self._changes.clear()
        self._changes.extend(remaining)
        return tuple(found.values())

    def _narrow_ones(self) -> Iterator[tuple[ClockChangeReport, ClockChangeReport]]:
        clocks = sorted(self._clocks)
        for change, after in pairwise([*self._changes, None]):
            if change is None or change.previous_sm_clock_mhz is None:
                continue
            until_ns = inf if after is None else after.called_mono_ns
            first, last = (bisect_left(clocks, (at_ns,)) for at_ns in (change.returned_mono_ns, until_ns))
            during = [clock for clock in clocks[first:last] if clock[1] <= until_ns]
            narrow = _narrow(change, change.previous_sm_clock_mhz, during)
            if narrow is not None:
                yield change, narrow


def _narrow(change: ClockChangeReport, before_mhz: int, clocks: Sequence[TrueClockRow]) -> ClockChangeReport | None:
    """Return a change with the bounds that clocks counted after its call give; None if they are wide, or contradict."""
    lows_ns = [early for early, _, mhz in clocks if abs(mhz - before_mhz) <= SAME_CLOCK_MHZ]
    highs_ns = [late for _, late, mhz in clocks if abs(mhz - change.requested_sm_clock_mhz) <= SAME_CLOCK_MHZ]
    if not highs_ns:
        return None
    low_ns = max([change.unseen_until_mono_ns or change.returned_mono_ns, *lows_ns])
    high_ns = min(highs_ns if change.effective_mono_ns is None else [*highs_ns, change.effective_mono_ns])
    if not 0 <= high_ns - low_ns <= _MAX_WIDTH_NS:
        return None
    return replace(
        change,
        unseen_until_mono_ns=low_ns,
        effective_mono_ns=high_ns,
        actual_sm_clock_mhz=change.requested_sm_clock_mhz,
        clock_age_ns=0,
    )
