"""What the core does by the clock, on its event loop: late runs are not made up for, and none runs twice at once."""

import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from apscheduler.schedulers.asyncio import AsyncIOScheduler

log = logging.getLogger(__name__)


class Periodic:
    """Jobs by name; a job that fails is logged once per change of reason, and tried again at its next time."""

    def __init__(self) -> None:
        logging.getLogger("apscheduler").setLevel(logging.ERROR)
        self._scheduler = AsyncIOScheduler(timezone=UTC)
        self._failures: dict[str, str] = {}

    def every(self, period_s: float, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run something at once and then so often, once the scheduler has been started."""

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  whatever one job does, the others keep their time
                self._failed(name, f"{type(error).__name__}: {error}")
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
        """What failed at its last run, and why, by name."""
        return dict(self._failures)

    def start(self) -> None:
        """Begin; the caller runs in an event loop."""
        self._scheduler.start()

    def close(self) -> None:
        """Start nothing more."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _failed(self, name: str, reason: str) -> None:
        if self._failures.get(name) != reason:
            log.warning("%s failed: %s", name, reason)
        self._failures[name] = reason
