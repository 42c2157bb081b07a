"""Critical GPU errors: which change the health of their GPU, and that each is reported."""

import queue

import pytest

from gpuenergyd.gpu.link.messages import GpuHealth
from gpuenergyd.gpu.worker.threads.xid_watch import health_after_xid, watch_xids
from tests.support.waiting import LIMIT_S


class ScriptedDriver:
    """A driver that reports the given errors, then none."""

    def __init__(self, *events: tuple[str, int] | None) -> None:
        self._events = list(events)

    def await_xid(self, timeout_s: float) -> tuple[str, int] | None:
        """Return the next event."""
        assert timeout_s > 0
        return self._events.pop(0) if self._events else None


@pytest.mark.parametrize(("xid", "health"), [(79, GpuHealth.LOST), (48, GpuHealth.DEGRADED), (31, None)])
def test_application_errors_do_not_change_the_health_of_a_gpu(xid: int, health: GpuHealth | None) -> None:
    assert health_after_xid(xid) is health


def test_each_error_of_a_gpu_is_reported_with_its_number() -> None:
    reported: queue.Queue[tuple[str, GpuHealth, str]] = queue.Queue()
    driver = ScriptedDriver(None, ("GPU-a", 13), ("GPU-b", 79), None, ("GPU-a", 48))

    stop = watch_xids(driver, lambda *change: reported.put(change))

    assert reported.get(timeout=LIMIT_S) == ("GPU-b", GpuHealth.LOST, "the driver reported Xid 79")
    assert reported.get(timeout=LIMIT_S) == ("GPU-a", GpuHealth.DEGRADED, "the driver reported Xid 48")
    stop.set()
