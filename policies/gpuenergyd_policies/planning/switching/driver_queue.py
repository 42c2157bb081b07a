"""Queue of clock changes at the driver, which sets one GPU of a host at a time."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedClockCall:
    """A driver call that sets the clock of one GPU, due at `due_s`, which occupies the driver for `call_s`."""

    due_s: float
    call_s: float
    gpu: int
    is_raise: bool


def driver_waits_s(calls: Sequence[QueuedClockCall]) -> list[float]:
    """Return the wait of each call for the driver: raises go first, then the call that has been due longest.

    In reality a change replaces an older one of the same GPU that still waits; here both are carried out, which
    overestimates waits.
    """
    waits_s = [0.0] * len(calls)
    left = sorted(range(len(calls)), key=lambda k: calls[k].due_s, reverse=True)
    waiting: list[int] = []
    free_s = 0.0
    while left or waiting:
        if not waiting:
            free_s = max(free_s, calls[left[-1]].due_s)
        while left and calls[left[-1]].due_s <= free_s:
            waiting.append(left.pop())
        chosen = min(waiting, key=lambda k: (not calls[k].is_raise, calls[k].due_s, k))
        waiting.remove(chosen)
        waits_s[chosen] = free_s - calls[chosen].due_s
        free_s += calls[chosen].call_s
    return waits_s
