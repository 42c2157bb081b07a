"""Time ranges that restrict which part of a job a summary covers."""

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class TimeRange:
    """A half-open time range from `since` until before `until`; None means unbounded."""

    since: datetime | None = None
    until: datetime | None = None

    def contains(self, at: datetime) -> bool:
        return (self.since is None or at >= self.since) and (self.until is None or at < self.until)

    def contains_job(self, started_at: datetime, ended_at: datetime | None) -> bool:
        if self != ALL_TIME and ended_at is not None and ended_at < started_at:
            return False  # the clock was set back while the job ran
        is_over = self.until is None or (ended_at is not None and ended_at <= self.until)
        return is_over and (self.since is None or started_at >= self.since)


ALL_TIME = TimeRange()
