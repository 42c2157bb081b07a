"""`pytest -p evidence.impatience`: skip a test that has used TEST_CPU_S seconds of processor time, wherever it is.

Without numba some of the planner's tests would take hours. What such a test ran until then counts as run; it has not
been judged. Processor time, because a busy machine must not choose what is skipped.
"""

import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

LIMIT_S = float(os.environ.get("TEST_CPU_S", "0"))
"""0: no limit."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Give a test so much time."""
    signal.signal(signal.SIGVTALRM, _give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _give_up(number: int, frame: FrameType | None) -> None:
    del number, frame
    pytest.skip(f"it takes more than {LIMIT_S:g} s of processor time here")
