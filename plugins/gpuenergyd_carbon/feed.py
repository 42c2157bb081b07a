"""Hourly carbon intensities and signal values, read from the fetcher's file or a signal file, stored in the database.

There are two series: the signal that targets follow, which contains only complete hours, and the carbon intensities
that convert energy to emissions, which may be revised at any time. They are the same unless targets follow a price.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpuenergyd.core.carbon.intensity import (
    HOUR,
    CarbonForecast,
    CarbonSignal,
    ForecastHour,
    HourlySeries,
    IntensitySample,
    SampleStatus,
)
from gpuenergyd.daemon.ports import HistoryPort
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.errors import CarbonDataError, CarbonSourceError, StoreError
from gpuenergyd.store import open_history
from gpuenergyd.store.records import EstimatesWithdrawn, IntensityRecord
from gpuenergyd_carbon.fetched_file import KEPT_HISTORY, SANDBOX_PROBLEM, Fetched, FetchStatus, read_fetched
from gpuenergyd_carbon.rules.grid_clock import GridClock
from gpuenergyd_carbon.rules.hourly_values import hourly_series
from gpuenergyd_carbon.signal_file import CARBON_UNIT, SignalFile, series_of, zone_of_file

CSV_SOURCE = "csv"
RETENTION = timedelta(days=2 * 366)
_WRITTEN_RETENTION = KEPT_HISTORY + timedelta(days=1)
"""Longer than the fetcher's file covers, since its values are read repeatedly."""
_MIN_FORECAST_HOURS = 12
"""A provider's forecast with fewer hours is not used, since the daemon's own model reaches further."""


@dataclass(slots=True)
class HourlyValues:
    """The values of one series by hour."""

    zone: str
    unit: str = CARBON_UNIT
    is_fixed: bool = False
    _hours: dict[datetime, float] = field(default_factory=dict)

    def update(self, series: HourlySeries) -> bool:
        """Add the known values of a series; return whether any was new or revised."""
        has_changed, self.is_fixed = False, series.is_fixed
        for k, value in enumerate(series.values):
            hour_at = series.first_hour_at + k * HOUR
            if math.isfinite(value) and self._hours.get(hour_at) != value:
                self._hours[hour_at] = value
                has_changed = True
        if has_changed:
            oldest = max(self._hours) - RETENTION
            for hour_at in [hour_at for hour_at in self._hours if hour_at < oldest]:
                del self._hours[hour_at]
        return has_changed

    def series(self) -> HourlySeries | None:
        if not self._hours:
            return None
        return replace(series_of(self.zone, self._hours, self.unit), is_fixed=self.is_fixed)

    def value_at(self, hour_at: datetime) -> float | None:
        return self._hours.get(hour_at)


class CarbonFeed:
    """Reads the fetcher's file and the signal file, and keeps the two series; never accesses the network."""

    def __init__(self, settings: Settings, grid: GridClock, history: HistoryPort, now: Callable[[], datetime]) -> None:
        self._settings = settings
        self._grid = grid
        self._history = history
        self._now = now
        path = settings.signal_path
        zone = settings.carbon_zone or (zone_of_file(path) if path is not None else "")
        self._file = SignalFile(path, zone) if path is not None else None
        self._fetched_stamp: tuple[int, int] | None = None
        self._written: dict[tuple[CarbonSignal, datetime, SampleStatus], float] = {}
        self.zone = zone
        self.signal = HourlyValues(zone)
        """The signal that targets follow; complete hours only."""
        self.intensities = HourlyValues(zone)
        """The carbon intensities that convert energy to emissions."""
        self.provider_forecast: CarbonForecast | None = None
        """The provider's own forecast; None if it has none, or it is too short."""
        self.source: CarbonSignal | None = None
        self.fetch_status: FetchStatus | None = None
        self.trouble: str | None = None
        self.num_updates = 0

    @property
    def follows_file(self) -> bool:
        """Whether the signal comes from a file instead of the fetcher."""
        return self._file is not None

    async def load(self) -> None:
        """Load the stored intensities of this zone from the database; an unreadable database counts as empty."""
        if self._settings.carbon_replay_from is None and self._settings.carbon_zone is not None:
            with contextlib.suppress(StoreError):
                for series in await asyncio.to_thread(self._stored):
                    self.intensities.update(series)
                    if not self.follows_file:
                        self.signal.update(series)

    async def read(self) -> None:
        """Read new values from the fetcher's file and the signal file."""
        trouble = None
        try:
            if self._settings.needs_carbon_fetcher:
                await self._read_fetched()
        except CarbonSourceError as error:
            trouble = str(error)
        try:
            if self._file is not None:
                self._add_file(await asyncio.to_thread(self._file.read))
        except CarbonDataError as error:
            trouble = str(error)
        self.trouble = trouble

    def _stored(self) -> list[HourlySeries]:
        with open_history(self._settings.database_url) as history:
            stored = history.intensities(zone=self.zone, since=self._now() - RETENTION)
        by_signal: dict[CarbonSignal, list[IntensitySample]] = {}
        for row in stored:
            length = row.host.valid_to_at - row.host.valid_from_at
            sample = IntensitySample(
                row.grid_from, row.grid_from + length, row.host.carbon_intensity_g_per_kwh, row.host.status
            )
            by_signal.setdefault(row.signal, []).append(sample)
            # Stored values are not written again; the fetcher's file holds 65 weeks.
            self._written[row.signal, sample.valid_from_at, sample.status] = sample.carbon_intensity_g_per_kwh
        wanted = self._settings.carbon_source
        fitting = [
            samples
            for signal, samples in by_signal.items()
            if (wanted is None or signal.source == wanted)
            and self._settings.carbon_kind in {None, signal.kind}
            and self._settings.carbon_factor in {None, signal.factor}
        ]
        # Different signals are different quantities, which must not be mixed: use the stored one with the most hours.
        fullest = max(fitting, key=len, default=[])
        series = hourly_series(self.zone, fullest)
        return [series] if series is not None else []

    async def _read_fetched(self) -> None:
        path = self._settings.carbon_file_path
        with contextlib.suppress(OSError):
            stat = path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp == self._fetched_stamp:
                return
            fetched = await asyncio.to_thread(read_fetched, path)
            if fetched.signal.zone != self.zone:
                raise CarbonSourceError(f"{path} is for zone {fetched.signal.zone!r}, but carbon_zone is {self.zone!r}")
            self._fetched_stamp = stamp
            self._add_fetched(fetched)

    def _add_fetched(self, fetched: Fetched) -> None:
        self.source, self.fetch_status = fetched.signal, fetched.status
        if fetched.status.problem == SANDBOX_PROBLEM:
            self._withdraw_estimates(fetched.signal)
        series = hourly_series(self.zone, fetched.samples)
        if series is not None:
            has_changed = self.intensities.update(series)
            if not self.follows_file:
                has_changed = self.signal.update(series)
                self.provider_forecast = self._forecast_of(fetched)
            self.num_updates += has_changed
        for sample in fetched.samples:
            self._write(sample, fetched.signal)
        self._forget_old()

    def _withdraw_estimates(self, signal: CarbonSignal) -> None:
        """Forget the made-up estimates of a provider's test key, also those stored by an earlier version."""
        self._history.write(EstimatesWithdrawn(signal))
        self._written = {
            key: value for key, value in self._written.items() if key[::2] != (signal, SampleStatus.ESTIMATED)
        }
        self.intensities = HourlyValues(self.zone)
        self.provider_forecast = None
        if not self.follows_file:
            self.signal = HourlyValues(self.zone)

    def _forecast_of(self, fetched: Fetched) -> CarbonForecast | None:
        series = hourly_series(self.zone, fetched.forecast)
        if series is None or fetched.status.fetched_at is None:
            return None
        return _forecast(self.zone, series, fetched.status.fetched_at, f"{fetched.signal.source} (provider)")

    def _add_file(self, series: HourlySeries) -> None:
        now_at = self._grid.to_grid(self._now())
        self.signal.unit = series.unit
        known = series.until(now_at)
        self.num_updates += self.signal.update(known)
        if self._grid.is_real_time:
            self.provider_forecast = _forecast(self.zone, series, now_at, "signal file")
        if series.unit != CARBON_UNIT:
            return
        self.source = CarbonSignal(self.zone, CSV_SOURCE)
        begun = series.until(now_at + HOUR)
        self.intensities.update(begun)
        first = (
            max(0, begun.index_of(now_at) - 8 * 24) if self._grid.is_real_time else begun.index_of(self._grid.grid_at)
        )
        for k in range(max(0, first), len(begun.values)):
            hour_at = begun.first_hour_at + k * HOUR
            if math.isfinite(begun.values[k]):
                self._write(IntensitySample(hour_at, hour_at + HOUR, begun.values[k]), self.source)
        self._forget_old()

    def _forget_old(self) -> None:
        newest_at = max((at for _, at, _ in self._written), default=None)
        if newest_at is not None:
            self._written = {
                key: value for key, value in self._written.items() if key[1] >= newest_at - _WRITTEN_RETENTION
            }

    def _write(self, sample: IntensitySample, signal: CarbonSignal) -> None:
        """Store a value that is new or revised in the database."""
        key = (signal, sample.valid_from_at, sample.status)
        if self._written.get(key) == sample.carbon_intensity_g_per_kwh:
            return
        self._written[key] = sample.carbon_intensity_g_per_kwh
        self._history.write(
            IntensityRecord(
                zone=signal.zone,
                source=signal.source,
                kind=signal.kind,
                factor=signal.factor,
                status=sample.status,
                valid_from=self._grid.to_host(sample.valid_from_at),
                valid_to=self._grid.to_host(sample.valid_to_at),
                grid_from=sample.valid_from_at,
                carbon_intensity_g_per_kwh=sample.carbon_intensity_g_per_kwh,
                fetched_at=self._now(),
            )
        )


def _forecast(zone: str, series: HourlySeries, issued_at: datetime, model: str) -> CarbonForecast | None:
    """Return the future hours of a series as a forecast without intervals, None if they are too few."""
    begin = issued_at - timedelta(seconds=issued_at.timestamp() % HOUR.total_seconds())
    hours = tuple(
        ForecastHour(hour_at, value, value, value)
        for k, value in enumerate(series.values)
        if math.isfinite(value) and (hour_at := series.first_hour_at + k * HOUR) >= begin
    )[: 7 * 24]
    return CarbonForecast(zone, begin, model, hours, series.unit) if len(hours) >= _MIN_FORECAST_HOURS else None
