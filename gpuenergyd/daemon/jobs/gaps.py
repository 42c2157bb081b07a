"""Raises a rank's clock to full speed when its next iteration is later than usual, as in an unmarked evaluation.

What a program does between two iterations, or in the middle of one, need not be marked as a pause: a generation with
another model, a checkpoint, an evaluation by a submodule. Until its next report the rank would stay at the clock that
its plan requested last, which may be that of a wait.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_LATE_RATIO = 1.5
"""A report is late after so many times the usual time of an iteration."""
_MARGIN_S = 0.1
"""Of the loops of the client and of the daemon, in which reports wait."""
_ITERATIONS_KEPT = 8
_MIN_KNOWN = 2
"""Iterations until the usual time is known."""
_NS_PER_S = 1e9


@dataclass(slots=True)
class GapWatch:
    """Watches the reports of one rank; calls `raise_clock` in each gap and pause, and after each request within one."""

    raise_clock: Callable[[], None]
    _times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_ITERATIONS_KEPT))
    _timer: asyncio.TimerHandle | None = None
    _is_raised: bool = False

    @property
    def limit_s(self) -> float | None:
        """Time without a report after which the rank is in a gap; None while too few iterations are known.

        The usual time is the second longest of the kept ones: one of them may contain a gap.
        """
        if len(self._times_s) < _MIN_KNOWN:
            return None
        return _LATE_RATIO * sorted(self._times_s)[-2] + _MARGIN_S

    def reported(self, begin_ns: int, next_begin_ns: int) -> None:
        """Take a report: the iteration after it has begun, or a pause if `next_begin_ns` is 0."""
        self._is_raised = False
        if next_begin_ns:
            self._times_s.append((next_begin_ns - begin_ns) / _NS_PER_S)
            self._wait()
        else:  # the client has requested full speed, too, unless its request was dropped
            self._gap_found()

    def requested(self) -> None:
        """Take a clock request of the rank: within a gap, the clock may be low again."""
        if self._is_raised:
            self._is_raised = False
            self._wait()

    def stop(self) -> None:
        """Wait for no report."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _wait(self) -> None:
        self.stop()
        if (limit_s := self.limit_s) is not None:
            self._timer = asyncio.get_running_loop().call_later(limit_s, self._gap_found)

    def _gap_found(self) -> None:
        self.stop()
        self._is_raised = True
        self.raise_clock()
