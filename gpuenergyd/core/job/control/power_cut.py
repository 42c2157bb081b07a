"""Iterations that ran at lower clocks than planned, because the power of the host was above its budget."""

from dataclasses import dataclass

_ITERATIONS_AHEAD = 2
"""Iterations that a program may have launched, and that end after the one last reported."""


@dataclass(slots=True)
class PowerCut:
    """Whether clocks of a job are cut now, and the last iteration that may have been touched by a cut."""

    is_cut: bool = False
    last_index: int = -1

    def change(self, *, is_cut: bool, last_reported: int) -> None:
        """Begin or end a cut after this iteration."""
        if self.is_cut and not is_cut:
            self.last_index = last_reported + _ITERATIONS_AHEAD
        self.is_cut = is_cut

    def touches(self, iteration_index: int) -> bool:
        """Return whether an iteration may have run at lower clocks than planned."""
        return self.is_cut or iteration_index <= self.last_index
