"""What the core knows of the grid: read from the fetcher's file or a signal file, kept by the hour, written down.

Two series: the signal that jobs follow, of which an hour counts once it is over, and the carbon intensities that
energy is priced with, which may be revised at any time. They are the same unless jobs follow a price.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpuenergyd.carbon.fetched_file import Fetched, FetchStatus, read_fetched
from gpuenergyd.carbon.signal_file import CARBON_UNIT, SignalFile, zone_of_file
from gpuenergyd.core.carbon.grid_clock import GridClock
from gpuenergyd.core.carbon.intensity import (
    HOUR,
    CarbonForecast,
    CarbonSignal,
    ForecastHour,
    HourlySeries,
    IntensitySample,
    SampleStatus,
    hourly_series,
)
from gpuenergyd.daemon.ports import HistoryPort
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.errors import CarbonDataError, CarbonSourceError, StoreError
from gpuenergyd.store import open_history
from gpuenergyd.store.records import IntensityRecord

CSV_SOURCE = "csv"
KEPT = timedelta(days=2 * 366)
_WRITTEN_KEPT = timedelta(days=9)
_LEAST_GIVEN_HOURS = 12
"""A provider's own forecast that reaches less far is not used: ours does."""


@dataclass(slots=True)
class KnownHours:
    """One series, hour by hour."""

    zone: str
    unit: str = CARBON_UNIT
    _hours: dict[datetime, float] = field(default_factory=dict)

    def put(self, series: HourlySeries) -> bool:
        """Take what is known of a series; return whether that was news."""
        is_news = False
        for k, value in enumerate(series.values):
            hour_at = series.first_hour_at + k * HOUR
            if math.isfinite(value) and self._hours.get(hour_at) != value:
                self._hours[hour_at] = value
                is_news = True
        if is_news:
            oldest = max(self._hours) - KEPT
            for hour_at in [hour_at for hour_at in self._hours if hour_at < oldest]:
                del self._hours[hour_at]
        return is_news

    def series(self) -> HourlySeries | None:
        """Return everything known; None when that is nothing."""
        if not self._hours:
            return None
        first, last = min(self._hours), max(self._hours)
        values = (self._hours.get(first + k * HOUR, math.nan) for k in range((last - first) // HOUR + 1))
        return HourlySeries(self.zone, first, values=tuple(values), unit=self.unit)

    def value_at(self, hour_at: datetime) -> float | None:
        """Return the value of an hour, None where it is not known."""
        return self._hours.get(hour_at)


class CarbonFeed:
    """The one reader of what comes from outside; nothing here waits for the network."""

    def __init__(self, settings: Settings, grid: GridClock, history: HistoryPort, now: Callable[[], datetime]) -> None:
        self._settings = settings
        self._grid = grid
        self._history = history
        self._now = now
        path = settings.signal_path
        zone = settings.carbon_zone or (zone_of_file(path) if path is not None else "")
        self._file = SignalFile(path, zone) if path is not None else None
        self._fetched_stamp: tuple[int, int] | None = None
        self._written: dict[tuple[datetime, SampleStatus], float] = {}
        self.zone = zone
        self.signal = KnownHours(zone)
        """What jobs follow: complete hours only."""
        self.priced = KnownHours(zone)
        """What energy is priced with."""
        self.given_forecast: CarbonForecast | None = None
        """The provider's own, None where it gives none that can be used."""
        self.source: CarbonSignal | None = None
        self.fetch_status: FetchStatus | None = None
        self.trouble: str | None = None
        self.num_news = 0

    @property
    def follows_file(self) -> bool:
        """Whether jobs follow a file instead of what the fetcher finds."""
        return self._file is not None

    async def load(self) -> None:
        """Read what an earlier daemon wrote down of this zone; a history that cannot be read is as none."""
        if self._settings.carbon_replay_from is None and self._settings.carbon_zone is not None:
            with contextlib.suppress(StoreError):
                for series in await asyncio.to_thread(self._stored):
                    self.priced.put(series)
                    if not self.follows_file:
                        self.signal.put(series)

    async def read(self) -> None:
        """Take what is new, from the fetcher's file and from the signal's."""
        trouble = None
        try:
            if self._settings.asks_network:
                await self._read_fetched()
        except CarbonSourceError as error:
            trouble = str(error)
        try:
            if self._file is not None:
                self._take_file(await asyncio.to_thread(self._file.read))
        except CarbonDataError as error:
            trouble = str(error)
        self.trouble = trouble

    def intensity_of_hour(self, hour_at: datetime) -> float | None:
        """Return the carbon intensity of an hour of the grid in g/kWh, None where nobody knows it."""
        return self.priced.value_at(hour_at)

    def _stored(self) -> list[HourlySeries]:
        with open_history(self._settings.database_url) as history:
            stored = history.intensities(zone=self.zone, since=self._now() - KEPT)
        by_signal: dict[CarbonSignal, list[IntensitySample]] = {}
        for row in stored:
            length = row.host.valid_to_at - row.host.valid_from_at
            sample = IntensitySample(
                row.grid_from, row.grid_from + length, row.host.carbon_intensity_g_per_kwh, row.host.status
            )
            by_signal.setdefault(row.signal, []).append(sample)
        wanted = self._settings.carbon_source
        fitting = [
            samples
            for signal, samples in by_signal.items()
            if (wanted is None or signal.source == wanted)
            and self._settings.carbon_kind in {None, signal.kind}
            and self._settings.carbon_factor in {None, signal.factor}
        ]
        # Two signals are two quantities: with more than one stored, only the one with most hours can be meant.
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
                raise CarbonSourceError(f"{path} holds zone {fetched.signal.zone!r}; set is {self.zone!r}")
            self._fetched_stamp = stamp
            self._take_fetched(fetched)

    def _take_fetched(self, fetched: Fetched) -> None:
        self.source, self.fetch_status = fetched.signal, fetched.status
        series = hourly_series(self.zone, fetched.samples)
        if series is not None:
            is_news = self.priced.put(series)
            if not self.follows_file:
                is_news = self.signal.put(series)
                self.given_forecast = self._forecast_of(fetched)
            self.num_news += is_news
        for sample in fetched.samples:
            self._write(sample, fetched.signal)

    def _forecast_of(self, fetched: Fetched) -> CarbonForecast | None:
        series = hourly_series(self.zone, fetched.forecast)
        if series is None or fetched.status.fetched_at is None:
            return None
        return _given(self.zone, series, fetched.status.fetched_at, f"{fetched.signal.source}'s own")

    def _take_file(self, series: HourlySeries) -> None:
        now_at = self._grid.to_grid(self._now())
        self.signal.unit = series.unit
        known = series.until(now_at)
        self.num_news += self.signal.put(known)
        if self._grid.is_real_time:
            self.given_forecast = _given(self.zone, series, now_at, "the file's own")
        if series.unit != CARBON_UNIT:
            return
        self.source = CarbonSignal(self.zone, CSV_SOURCE)
        begun = series.until(now_at + HOUR)
        self.priced.put(begun)
        first = (
            max(0, begun.index_of(now_at) - 8 * 24) if self._grid.is_real_time else begun.index_of(self._grid.grid_at)
        )
        for k in range(max(0, first), len(begun.values)):
            hour_at = begun.first_hour_at + k * HOUR
            if math.isfinite(begun.values[k]):
                self._write(IntensitySample(hour_at, hour_at + HOUR, begun.values[k]), self.source)

    def _write(self, sample: IntensitySample, signal: CarbonSignal) -> None:
        """Write down a value that is new or was revised."""
        key = (sample.valid_from_at, sample.status)
        if self._written.get(key) == sample.carbon_intensity_g_per_kwh:
            return
        self._written[key] = sample.carbon_intensity_g_per_kwh
        for old in [old for old in self._written if old[0] < sample.valid_from_at - _WRITTEN_KEPT]:
            del self._written[old]
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


def _given(zone: str, series: HourlySeries, issued_at: datetime, model: str) -> CarbonForecast | None:
    """Return the hours of a series that lie ahead as a forecast without a range; None where they are too few."""
    begin = issued_at - timedelta(seconds=issued_at.timestamp() % HOUR.total_seconds())
    hours = tuple(
        ForecastHour(hour_at, value, value, value)
        for k, value in enumerate(series.values)
        if math.isfinite(value) and (hour_at := series.first_hour_at + k * HOUR) >= begin
    )[: 7 * 24]
    return CarbonForecast(zone, begin, model, hours, series.unit) if len(hours) >= _LEAST_GIVEN_HOURS else None
