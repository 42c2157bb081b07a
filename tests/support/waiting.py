"""Waiting for another process without guessing how long it takes."""

import time
from collections.abc import Callable


def wait_until(predicate: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Return as soon as the predicate holds; fail when it does not within the time limit."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        time.sleep(0.002)
