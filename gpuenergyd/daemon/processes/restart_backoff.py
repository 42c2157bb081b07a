"""How soon a process that was lost is started again: at once where somebody waits for it, later each time where not."""

from dataclasses import dataclass

_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 10.0
_STEADY_AFTER_S = 30.0
_MAX_ATTEMPTS_IN_VAIN = 3


@dataclass(slots=True)
class RestartBackoff:
    """Pauses between a process and its successor; one that lived for half a minute clears the record."""

    _pause_s: float = 0.0
    _num_in_vain: int = 0

    def next_delay_s(self, *, lived_s: float, came_up: bool, is_awaited: bool) -> float:
        """Return how long to wait before the successor of a process that has just been lost.

        `came_up`: it was ready before it was lost. `is_awaited`: what it left undone hurts until the next one is there.
        Then the next comes at once, unless several in a row were lost before they were ready: more would not help.
        """
        if lived_s > _STEADY_AFTER_S:
            self._pause_s = 0.0
        pause_s = self._pause_s
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LAST_PAUSE_S)
        self._num_in_vain = 0 if came_up else self._num_in_vain + 1
        return 0.0 if is_awaited and self._num_in_vain < _MAX_ATTEMPTS_IN_VAIN else pause_s
