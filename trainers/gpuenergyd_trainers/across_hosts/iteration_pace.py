"""Iteration time of a rank as its store thread sees it: iterations per time, without clocks of other hosts."""

from dataclasses import dataclass

_PACE_ITERATIONS = 8
"""Iterations over which the iteration time is measured."""


@dataclass(slots=True)
class IterationPace:
    """Measures the iteration time from instants and iteration numbers."""

    iteration_s: float = 0.0
    """0 while unknown."""
    _since: tuple[float, int] | None = None

    def update(self, now_s: float, iteration_index: int) -> None:
        """Record the newest iteration at an instant."""
        if self._since is None or iteration_index < self._since[1]:
            self._since = now_s, iteration_index
        elif iteration_index >= self._since[1] + _PACE_ITERATIONS:
            self.iteration_s = (now_s - self._since[0]) / (iteration_index - self._since[1])
            self._since = now_s, iteration_index
