"""Restart backoff for helper processes: exponential delay, none while GPUs wait to be restored."""

from dataclasses import dataclass

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 10.0
_RESET_AFTER_S = 30.0
_MAX_FAILED_STARTS = 3


@dataclass(slots=True)
class RestartBackoff:
    """Delays between restarts of one process; a process that lived for 30 s resets them."""

    _delay_s: float = 0.0
    _num_failed_starts: int = 0

    def next_delay_s(self, *, lifetime_s: float, was_ready: bool, is_urgent: bool) -> float:
        """Return the delay before the restart of a process that has just been lost.

        `was_ready`: the process had finished starting. `is_urgent`: GPUs stay changed until the next process restores
        them. An urgent restart has no delay, unless several processes in a row were lost before they were ready.
        """
        if lifetime_s > _RESET_AFTER_S:
            self._delay_s = 0.0
        delay_s = self._delay_s
        self._delay_s = min(max(_FIRST_DELAY_S, 2 * delay_s), _MAX_DELAY_S)
        self._num_failed_starts = 0 if was_ready else self._num_failed_starts + 1
        return 0.0 if is_urgent and self._num_failed_starts < _MAX_FAILED_STARTS else delay_s
