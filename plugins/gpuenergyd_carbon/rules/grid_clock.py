"""Clock of the grid: real time, or the accelerated time of a replayed trace."""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpuenergyd.core.carbon.intensity import HOUR
from gpuenergyd.errors import CarbonDataError


@dataclass(frozen=True, slots=True)
class GridClock:
    """Maps host time to grid time: `host_at` corresponds to `grid_at`, and a grid hour lasts `hour_s` of host time."""

    host_at: datetime
    grid_at: datetime
    hour_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.hour_s) and 0 < self.hour_s <= HOUR.total_seconds()):
            raise CarbonDataError(f"length of a grid hour: {self.hour_s} s; valid: more than 0, at most 3600 s")

    @classmethod
    def real_time(cls, now_at: datetime) -> "GridClock":
        """Return a clock whose grid time is the host time."""
        return cls(now_at, now_at, HOUR.total_seconds())

    @property
    def speed(self) -> float:
        """Grid seconds per host second; 1 in real time."""
        return HOUR.total_seconds() / self.hour_s

    @property
    def is_real_time(self) -> bool:
        """Whether grid time equals host time."""
        return self.host_at == self.grid_at and self.hour_s == HOUR.total_seconds()

    def to_grid(self, host_at: datetime) -> datetime:
        """Return the grid time of a host instant."""
        return host_at if self.is_real_time else self.grid_at + (host_at - self.host_at) * self.speed

    def to_host(self, grid_at: datetime) -> datetime:
        """Return the host time of a grid instant."""
        return grid_at if self.is_real_time else self.host_at + (grid_at - self.grid_at) / self.speed

    def hour_of(self, host_at: datetime) -> datetime:
        """Return the start of the grid hour at a host instant."""
        at = self.to_grid(host_at)
        return at - timedelta(seconds=at.timestamp() % HOUR.total_seconds())
