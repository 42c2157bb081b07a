"""Waiting for another process without guessing how long it takes."""

import time
from collections.abc import Callable


def wait_until(predicate: Callable[[], bool], timeout_s: float = 10.0, *, poll_s: float = 0.002) -> None:
    """Return as soon as the predicate holds; fail when it does not within the time limit.

    Where looking costs those who are waited for something, look every `poll_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, f"did not happen within {timeout_s} s"
        time.sleep(poll_s)
