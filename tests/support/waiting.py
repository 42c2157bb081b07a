"""Waits for conditions in other processes."""

import time
from collections.abc import Callable


def wait_until(predicate: Callable[[], bool], timeout_s: float = 10.0, *, poll_s: float = 0.002) -> None:
    """Wait until a predicate holds; fail after the time limit.

    Increase `poll_s` if evaluating the predicate costs the observed process time.
    """
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        time.sleep(poll_s)
