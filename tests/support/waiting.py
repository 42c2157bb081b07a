"""Waits for conditions in other processes."""

import time
from collections.abc import Callable

_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.05
_POLL_SHARE = 0.1
"""Each pause is this share of the time waited so far: polling takes little from the processes that it waits for."""


def wait_until(predicate: Callable[[], bool], timeout_s: float = 60.0, *, log: Callable[[], str] = str) -> None:
    """Wait until a predicate holds, polling ever more rarely; fail after the time limit, with this log."""
    start_s = time.monotonic()
    while not predicate():
        waited_s = time.monotonic() - start_s
        assert waited_s < timeout_s, f"did not happen within {timeout_s} s\n{log()}"
        time.sleep(min(max(waited_s * _POLL_SHARE, _FIRST_POLL_S), _LAST_POLL_S))
