"""Waits for conditions in other processes, however busy the host is."""

import time
from collections.abc import Callable

LIMIT_S = 300.0
"""Ends a test that hangs: much longer than anything that a test waits for takes on a busy machine."""
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.05
_POLL_SHARE = 0.1
"""Each pause is this share of the time waited so far: polling takes little from the processes that it waits for."""


def wait_until(predicate: Callable[[], bool], timeout_s: float = LIMIT_S, *, log: Callable[[], str] = str) -> None:
    """Wait until a predicate holds, polling ever more rarely; fail after the time limit, with this log."""
    start_s = time.monotonic()
    while not predicate():
        waited_s = time.monotonic() - start_s
        assert waited_s < timeout_s, f"did not happen within {timeout_s} s\n{log()}"
        time.sleep(min(max(waited_s * _POLL_SHARE, _FIRST_POLL_S), _LAST_POLL_S))
