"""Which hour of the grid it is: now, or, where a past trace is lived again at speed, an hour of that trace."""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpuenergyd.core.carbon.intensity import HOUR
from gpuenergyd.errors import CarbonDataError


@dataclass(frozen=True, slots=True)
class GridClock:
    """Maps the host's time to the grid's: at `host_at` the grid is at `grid_at`, and its hours take `hour_s`."""

    host_at: datetime
    grid_at: datetime
    hour_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.hour_s) and 0 < self.hour_s <= HOUR.total_seconds()):
            raise CarbonDataError(f"an hour of the grid cannot take {self.hour_s} s; valid: more than 0, up to 3600")

    @classmethod
    def real_time(cls, now_at: datetime) -> "GridClock":
        """Return the clock on which the grid's time is the host's."""
        return cls(now_at, now_at, HOUR.total_seconds())

    @property
    def speed(self) -> float:
        """Seconds of the grid in one second of the host; 1 in real time."""
        return HOUR.total_seconds() / self.hour_s

    @property
    def is_real_time(self) -> bool:
        """Whether both times are the same."""
        return self.host_at == self.grid_at and self.hour_s == HOUR.total_seconds()

    def to_grid(self, host_at: datetime) -> datetime:
        """Return the grid's time at an instant of the host."""
        return host_at if self.is_real_time else self.grid_at + (host_at - self.host_at) * self.speed

    def to_host(self, grid_at: datetime) -> datetime:
        """Return when the grid is at an instant, by the host's time."""
        return grid_at if self.is_real_time else self.host_at + (grid_at - self.grid_at) / self.speed

    def hour_of(self, host_at: datetime) -> datetime:
        """Return the begin of the grid's hour that holds an instant of the host."""
        at = self.to_grid(host_at)
        return at - timedelta(seconds=at.timestamp() % HOUR.total_seconds())
