"""Periodic tasks on the event loop: a missed run is skipped, and a task never overlaps itself."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from apscheduler.schedulers.asyncio import AsyncIOScheduler

log = logging.getLogger(__name__)


class Periodic:
    """Named periodic tasks; a failing task is logged once per reason and runs again at its next time."""

    def __init__(self) -> None:
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        logging.getLogger("apscheduler.executors.default").addFilter(_is_no_cancellation)
        self._scheduler = AsyncIOScheduler(timezone=UTC)
        self._failures: dict[str, str] = {}

    def every(self, period_s: float, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` when the scheduler starts and every `period_s` seconds after that."""

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  a failing task must not stop the scheduler
                self._record_failure(name, f"{type(error).__name__}: {error}")
            else:
                self._failures.pop(name, None)

        self._scheduler.add_job(
            guarded,
            "interval",
            seconds=period_s,
            id=name,
            next_run_time=datetime.now(tz=UTC),
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,
        )

    @property
    def failures(self) -> dict[str, str]:
        """The reason for each task whose last run failed, by name."""
        return dict(self._failures)

    def start(self) -> None:
        """Start the scheduler on the running event loop."""
        self._scheduler.start()

    def close(self) -> None:
        """Stop scheduling; a task that is running is not awaited."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _record_failure(self, name: str, reason: str) -> None:
        if self._failures.get(name) != reason:
            log.warning("periodic task %r failed: %s", name, reason)
        self._failures[name] = reason


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Return whether a record may be logged: the end of the scheduler cancels tasks, also before they begin."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
