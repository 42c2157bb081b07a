"""Chooses the iterations whose instructions are timed: the first ones of a plan, then few where timing is costly.

A rank decides by what it has measured of itself. Later iterations are timed where their index is a multiple of the
stride; strides are multiples of each other, so ranks with different ones still time the same iterations.
"""

from collections import deque
from statistics import median_low

NEW_ITERATIONS = 16
"""Iterations under a new registration or plan that are all timed."""
STRIDES = (1, 4, 16)
MOST_COST_RATIO = 0.0025
"""Share of an iteration that the client may cost the training thread before fewer iterations are timed."""
_COST_EVERY, _COST_EVERY_NEW = 13, 3
"""Iterations from one whose calls are measured to the next, and the same in new ones. The times of up to eight
iterations are read in one of them. 13 has no factor in common with such groups or with strides, so that each place in
them is measured as often as any other, and the account is charged with what reading costs on average."""
_NEWEST = 5


class TimedIterations:
    """The iterations of one rank whose instructions are timed."""

    def __init__(self) -> None:
        self.is_timed = True
        """Whether the instructions of the current iteration are timed."""
        self.is_measured = False
        """Whether the cost of the client's calls in the current iteration is measured."""
        self.stride = 1
        self._is_like_previous = False
        self._index = -1
        self._new_until = NEW_ITERATIONS
        self._costs_s: dict[bool, deque[float]] = {is_timed: deque(maxlen=_NEWEST) for is_timed in (True, False)}
        self.times_s: deque[float] = deque(maxlen=_NEWEST)
        """Times of the newest timed iterations."""

    def restart(self, iteration_index: int) -> None:
        self._new_until = iteration_index + NEW_ITERATIONS

    def begin(self, iteration_index: int) -> bool:
        """Decide about an iteration that begins; return whether its instructions are timed."""
        self._index = iteration_index
        is_new = iteration_index < self._new_until
        is_timed = is_new or iteration_index % self.stride == 0
        self._is_like_previous = is_timed is self.is_timed
        self.is_timed = is_timed
        self.is_measured = iteration_index % (_COST_EVERY_NEW if is_new else _COST_EVERY) == 0
        return is_timed

    def begin_group(self, last_index: int) -> None:
        """Begin a group of iterations that are not timed, up to this one; few groups have their cost measured."""
        self._index, self.is_timed, self._is_like_previous = last_index, False, True
        self.is_measured = last_index % _COST_EVERY == 0

    def next_timed(self, *, are_together: bool) -> int:
        """Return the index of the next iteration that is timed; 0 if the next one is new.

        With `are_together`, the iterations between timed ones are recorded as one, so there are as many as possible.
        """
        following = self._index + 1
        if following < self._new_until:
            return 0
        return following + -following % (STRIDES[-1] if are_together and self.stride > 1 else self.stride)

    def add_cost(self, cost_s: float) -> None:
        """Take the cost of the current iteration, into which falls the reading of the times of the one before."""
        if self._is_like_previous:
            self._costs_s[self.is_timed].append(cost_s)
            self.stride = self._best_stride()

    def add_time(self, time_s: float) -> None:
        self.times_s.append(time_s)

    def cost_s(self, *, is_timed: bool) -> float | None:
        """Return the newest cost of an iteration whose instructions are timed, or are not; None if none is known."""
        costs_s = self._costs_s[is_timed]
        return costs_s[-1] if costs_s else None

    def _best_stride(self) -> int:
        """Return the smallest stride with which the client costs little enough; the largest one if none does."""
        timed_s, untimed_s = (median_low(known) if (known := self._costs_s[kind]) else 0.0 for kind in (True, False))
        most_s = MOST_COST_RATIO * median_low(self.times_s) if self.times_s else timed_s
        fitting = (n for n in STRIDES if untimed_s + max(0.0, timed_s - untimed_s) / n <= most_s)
        return next(fitting, STRIDES[-1])
