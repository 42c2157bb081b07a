"""Finds the repeating sequence of optimizer steps that forms an iteration, for loops without marks, such as a GAN's.

Theory of operation. A loop with one optimizer steps it once per iteration. With several, an iteration is the shortest
sequence of steps that has just run twice and in which every optimizer takes part. Examples: two steps for a GAN, six if
its critic steps five times, one step of each optimizer if several share a model. The cycle begins where the repetition
does, so that a program that begins with an iteration keeps its own boundaries.

Steps can be skipped, for example by a loss scaler. A skipped step invalidates only its iteration: the cycle continues
at the optimizer that has stepped. If more than one cycle in four has a skipped step, the cycle was wrong, and the next
one has to repeat for twice as long. If a longer sequence runs three times with the same gap, the gap belongs to that
longer cycle. A new optimizer ends the cycle, unless it takes the turn of one that was deleted.
"""

from collections import deque
from enum import Enum, auto
from typing import Any
from weakref import WeakKeyDictionary

LONGEST_CYCLE = 32
"""Most steps of an iteration, enough for two optimizers that alternate every 16 steps."""
_STEPS_KEPT = 4 * LONGEST_CYCLE
"""An optimizer that has not stepped within this many steps no longer takes part."""
STEPS_WITHOUT_CYCLE = 192
"""Steps without a cycle after which the user is told."""
_MISSES_LIMIT, _MISSES_PER_CYCLE = 2.0, 0.25
_LONGER_REPEATED = 3
"""Repetitions after which a longer cycle replaces one with skipped steps."""


class StepTurn(Enum):
    """Position of an optimizer step in the cycle of a loop."""

    WITHIN = auto()
    """A step before the last one of an iteration."""
    LAST = auto()
    """The last step of an iteration."""
    MISSED = auto()
    """A step after a skipped one, so that this iteration is unlike others."""
    UNKNOWN = auto()
    """A step while the cycle is not known."""


class StepCycle:
    """Follows the optimizer steps of a loop one by one."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._last_steps: dict[int, int] = {}
        """The number of the last step of each optimizer."""
        self._recent: deque[int] = deque(maxlen=_STEPS_KEPT)
        self._cycle: tuple[int, ...] = ()
        self._position = self._num_steps = 0
        self._num_misses = 0.0
        self._least_repeated = 0
        """Number of steps that must repeat; grows with each wrong cycle."""
        self.num_without = 0
        """Consecutive steps without a known cycle."""

    @property
    def num_optimizers(self) -> int:
        """Number of optimizers that take part."""
        return len(self._active())

    def step(self, optimizer: Any) -> StepTurn:
        """Record an optimizer step and return its position in the cycle."""
        number = self._number_of(optimizer)
        self._num_steps += 1
        self._last_steps[number] = self._num_steps
        self._recent.append(number)
        turn = self._go_on(number) if self._cycle else self._find()
        self.num_without = self.num_without + 1 if turn is StepTurn.UNKNOWN else 0
        return turn

    def _number_of(self, optimizer: Any) -> int:
        number = self._numbers.get(optimizer)
        if number is not None:
            return number
        expected = self._cycle[self._position] if self._cycle else None
        if expected is not None and expected not in self._numbers.values():
            number = expected  # replaces a deleted optimizer
        else:
            number = len(self._last_steps)
            self._cycle = ()
        self._numbers[optimizer] = number
        return number

    def _active(self) -> set[int]:
        oldest_step = self._num_steps - _STEPS_KEPT
        return {number for number in self._numbers.values() if self._last_steps.get(number, 0) > oldest_step}

    def _go_on(self, number: int) -> StepTurn:
        length = len(self._cycle)
        ahead = next((k for k in range(length) if self._cycle[(self._position + k) % length] == number), None)
        if ahead is None:
            self._cycle = ()
            return StepTurn.UNKNOWN
        self._position = (self._position + ahead + 1) % length
        if ahead:
            self._num_misses += 1
            if self._num_misses > _MISSES_LIMIT:
                self._cycle = ()
                self._least_repeated = min(2 * max(self._least_repeated, 2 * length), _STEPS_KEPT)
                return StepTurn.UNKNOWN
            longer = self._find(length + 1, _LONGER_REPEATED)
            return StepTurn.MISSED if longer is StepTurn.UNKNOWN else longer
        if self._position:
            return StepTurn.WITHIN
        self._num_misses = max(0.0, self._num_misses - _MISSES_PER_CYCLE)
        return StepTurn.LAST

    def _find(self, shortest: int = 1, times: int = 2) -> StepTurn:
        """Start the shortest cycle of at least `shortest` steps that has just run `times` times."""
        steps, active = list(self._recent), self._active()
        for length in range(max(shortest, len(active)), LONGEST_CYCLE + 1):
            num_repeated = max(times * length if len(active) > 1 else 1, self._least_repeated)
            if num_repeated > len(steps):
                break
            if set(steps[-length:]) == active and _repeats(steps, len(steps) - num_repeated, length):
                begin = len(steps) - num_repeated
                while begin and steps[begin - 1] == steps[begin - 1 + length]:
                    begin -= 1
                self._cycle = tuple(steps[begin : begin + length])
                self._position, self._num_misses = (len(steps) - begin) % length, 0.0
                return StepTurn.WITHIN if self._position else StepTurn.LAST
        return StepTurn.UNKNOWN


def _repeats(steps: list[int], begin: int, length: int) -> bool:
    """Return whether the steps from index `begin` on repeat with period `length`."""
    return all(steps[k] == steps[k + length] for k in range(begin, len(steps) - length))
