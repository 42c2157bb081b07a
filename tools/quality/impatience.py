"""A pytest plugin that limits each test's CPU time: `pytest -p tools.quality.impatience`.

A test that uses more than TEST_CPU_S seconds is skipped: without numba some planner tests would take hours. The lines
that it ran still count for coverage. The limit is CPU time, so that load on the machine does not decide what is
skipped.

TEST_LIMITS names a JSON file with a limit per test. A test that exceeds its own limit is assumed to loop without end,
and the process exits with status SPINS; an exception might be caught by the code under test.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

LIMIT_S = float(os.environ.get("TEST_CPU_S", "0"))
"""0: no limit."""
LIMITS_S: dict[str, float] = (
    json.loads(Path(os.environ["TEST_LIMITS"]).read_text(encoding="utf-8")) if "TEST_LIMITS" in os.environ else {}
)
SPINS = 86


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Run a test under its CPU time limit."""
    own_s = LIMITS_S.get(item.nodeid)
    signal.signal(signal.SIGVTALRM, _skip if own_s is None else _exit)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S if own_s is None else own_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _skip(number: int, frame: FrameType | None) -> None:
    del number, frame
    pytest.skip(f"needs more than {LIMIT_S:g} s of CPU time")


def _exit(number: int, frame: FrameType | None) -> None:
    del number, frame
    os._exit(SPINS)
