"""Queue of clock changes at the drivers: each host's driver changes one GPU of that host at a time."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedClockCall:
    """The driver calls that change the clock of one stage, scheduled at `due_s`; each occupies the driver for `call_s`.

    There is one call for each GPU of the stage, `num_calls` in all. Calls of other stages on the same host wait.
    """

    due_s: float
    call_s: float
    stage: int
    is_raise: bool
    num_calls: int = 1
    host: str = ""


def driver_waits_s(calls: Sequence[QueuedClockCall]) -> list[float]:
    """Return how long each change waits until the last of its calls begins.

    Raises go first, then the call that has waited longest. In reality a change replaces an older one of the same GPU
    that is still waiting; here both are made, which overestimates waits.
    """
    waits_s = [0.0] * len(calls)
    of_host: dict[str, list[int]] = {}
    for k, call in enumerate(calls):
        of_host.setdefault(call.host, []).extend([k] * call.num_calls)
    for due in of_host.values():
        _serve(calls, sorted(due, key=lambda k: calls[k].due_s, reverse=True), waits_s)
    return waits_s


def longest_busy_s(calls: Sequence[QueuedClockCall]) -> float:
    """Return the total time of driver calls on the busiest host."""
    busy_s: dict[str, float] = {}
    for call in calls:
        busy_s[call.host] = busy_s.get(call.host, 0.0) + call.num_calls * call.call_s
    return max(busy_s.values(), default=0.0)


def _serve(calls: Sequence[QueuedClockCall], left: list[int], waits_s: list[float]) -> None:
    """Make the calls of one host, taking the next one from the end of `left`; update the wait of each change."""
    waiting: list[int] = []
    free_s = 0.0
    while left or waiting:
        if not waiting:
            free_s = max(free_s, calls[left[-1]].due_s)
        while left and calls[left[-1]].due_s <= free_s:
            waiting.append(left.pop())
        chosen = min(waiting, key=lambda k: (not calls[k].is_raise, calls[k].due_s, k))
        waiting.remove(chosen)
        waits_s[chosen] = max(waits_s[chosen], free_s - calls[chosen].due_s)
        free_s += calls[chosen].call_s
