"""`pytest -p tools.quality.impatience`: skip a test that has used TEST_CPU_S seconds of processor time, wherever it is.

Without numba some of the planner's tests would take hours. What such a test ran until then counts as run; it has not
been judged. Processor time, because a busy machine must not choose what is skipped.

TEST_LIMITS names a file with a limit for each test by its name: who exceeds its own does not end, and all ends with the
status SPINS. No exception: what runs then might catch it, or be tried again.
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
    """Give a test so much time."""
    own_s = LIMITS_S.get(item.nodeid)
    signal.signal(signal.SIGVTALRM, _give_up if own_s is None else _end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S if own_s is None else own_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _give_up(number: int, frame: FrameType | None) -> None:
    del number, frame
    pytest.skip(f"it takes more than {LIMIT_S:g} s of processor time here")


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    os._exit(SPINS)
