"""What a critical error says about its GPU: lost, suspect, or nothing where a program alone did wrong."""

import queue
import threading

import pytest

from gpuenergyd.gpu.link.messages import GpuHealth
from gpuenergyd.gpu.worker.threads.xid_watch import health_after_xid, watch_xids


class ScriptedDriver:
    """Reports these errors, and then none for ever."""

    def __init__(self, *events: tuple[str, int] | None) -> None:
        self._events = list(events)

    def await_xid(self, timeout_s: float) -> tuple[str, int] | None:
        """Return the next one."""
        assert timeout_s > 0
        if not self._events:
            threading.Event().wait()
        return self._events.pop(0)


@pytest.mark.parametrize(("xid", "health"), [(79, GpuHealth.LOST), (48, GpuHealth.DEGRADED), (31, None)])
def test_an_error_of_a_program_says_nothing_about_its_gpu(xid: int, health: GpuHealth | None) -> None:
    assert health_after_xid(xid) is health


def test_each_error_that_says_something_is_passed_on_with_its_number() -> None:
    heard: queue.Queue[tuple[str, GpuHealth, str]] = queue.Queue()
    driver = ScriptedDriver(None, ("GPU-a", 13), ("GPU-b", 79), None, ("GPU-a", 48))

    watch_xids(driver, lambda *news: heard.put(news))

    assert heard.get(timeout=60) == ("GPU-b", GpuHealth.LOST, "the driver reported Xid 79")
    assert heard.get(timeout=60) == ("GPU-a", GpuHealth.DEGRADED, "the driver reported Xid 48")
