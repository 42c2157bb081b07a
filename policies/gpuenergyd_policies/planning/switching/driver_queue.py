"""Clock changes of several GPUs wait for each other: the driver of a host carries out one at a time."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedClockCall:
    """A call that sets a clock of one GPU: due then, taking so long once the driver is free."""

    due_s: float
    call_s: float
    gpu: int
    is_raise: bool


def driver_waits_s(calls: Sequence[QueuedClockCall]) -> list[float]:
    """Return how long each call waits for the driver: raises go first, then what has been due longest.

    A change that comes while an older one of the same GPU still waits would replace it; here both are carried out,
    which errs towards longer waits.
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
