"""One bracket on one GPU: mean power lowered, raised for some seconds, and lowered again, while nothing runs."""

from collections import deque
from dataclasses import dataclass, field

_SETTLING_S = 5.0
"""Time until power readings, some of which are means of a second, show a change of clocks."""
_MEAN_S = 10.0


@dataclass(slots=True)
class IdleBracket:
    """The powers of a GPU that stays idle; `begin` and `raise_clock` follow its clock, `restart` forgets all."""

    changed_s: float = 0.0
    is_raised: bool = False
    _before_w: float | None = None
    _raised_w: float | None = None
    _powers: deque[tuple[float, float]] = field(default_factory=deque)
    _sum_w: float = 0.0

    def restart(self, at_s: float) -> None:
        """Begin with a GPU that has just been lowered."""
        self.changed_s, self.is_raised = at_s, False
        self._before_w = self._raised_w = None
        self._clear()

    def observe(self, at_s: float, power_w: float | None) -> None:
        """Take note of a reading."""
        if power_w is None or at_s < self.changed_s + _SETTLING_S:
            return
        self._powers.append((at_s, power_w))
        self._sum_w += power_w
        while self._powers[0][0] < at_s - _MEAN_S:
            self._sum_w -= self._powers.popleft()[1]

    def is_settled(self, at_s: float) -> bool:
        """Return whether the powers since the last change are enough for a mean."""
        return at_s >= self.changed_s + _SETTLING_S + _MEAN_S and len(self._powers) > 1

    def raise_clock(self, at_s: float) -> None:
        """End the first part: the clock is raised now."""
        self._before_w = self._mean_w()
        self._change(at_s, is_raised=True)

    def lower_clock(self, at_s: float) -> None:
        """End the second part: the clock is lowered again."""
        self._raised_w = self._mean_w()
        self._change(at_s, is_raised=False)

    def result(self, at_s: float) -> tuple[float, float] | None:
        """Return power raised and lowered, once the third part is complete."""
        if self._before_w is None or self._raised_w is None or not self.is_settled(at_s):
            return None
        found = (self._raised_w, (self._before_w + self._mean_w()) / 2)
        self._before_w = self._raised_w = None
        return found

    @property
    def lowered_w(self) -> float | None:
        """The mean power of the last seconds, lowered; None until it has settled."""
        return self._mean_w() if self._powers and not self.is_raised else None

    def _change(self, at_s: float, *, is_raised: bool) -> None:
        self.changed_s, self.is_raised = at_s, is_raised
        self._clear()

    def _clear(self) -> None:
        self._powers.clear()
        self._sum_w = 0.0

    def _mean_w(self) -> float:
        return self._sum_w / len(self._powers)
