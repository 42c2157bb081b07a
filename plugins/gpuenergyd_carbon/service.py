"""The service `carbon`: runs the fetcher, reads intensities, forecasts them, and updates the jobs' targets.

Without a carbon zone or a signal file it does nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, HourlySeries
from gpuenergyd.daemon.host_services import HostParts
from gpuenergyd.daemon.periodic import Periodic
from gpuenergyd.daemon.processes.plugins import TARGET_GROUP, check_policy_name
from gpuenergyd.daemon.processes.policy_client import PolicyClient, PolicyFailure
from gpuenergyd.daemon.processes.policy_host import MAX_LINE_BYTES, ServiceTask
from gpuenergyd.daemon.processes.target_queries import EncodedSeries
from gpuenergyd.daemon.settings import Processes, Settings
from gpuenergyd.errors import StoreError, UsageError
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.quantities.by_job import energy_by_job
from gpuenergyd.quantities.energy_use import NO_ENERGY, EnergyUse
from gpuenergyd.quantities.rates import read_rates
from gpuenergyd.store import open_history
from gpuenergyd.store.records import ForecastRecord
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_carbon.feed import CarbonFeed
from gpuenergyd_carbon.fetching.fetcher_process import CarbonFetcher
from gpuenergyd_carbon.forecasting import TASK, ForecastQuery, ForecastReply, TimingValue, TimingValueQuery
from gpuenergyd_carbon.rules.grid_clock import GridClock
from gpuenergyd_carbon.rules.present_intensity import IntensityNow, StalenessRules, intensity_now
from gpuenergyd_carbon.rules.skill import LiveSkill
from gpuenergyd_carbon.targets import CarbonTargets

_READS_PER_HOUR = 12
_READ_PERIOD_S = (0.5, 15.0)
_FIRST_READS, _FIRST_READ_PERIOD_S = 60, 0.5
"""Number and period of the reads while waiting for the fetcher's first file."""
_TIMING_VALUE_PERIOD = timedelta(hours=24)
_TIMING_VALUE_JOB_HOURS = 72.0
_SKILL_KEPT = timedelta(days=30)


class CarbonService:
    """Carbon intensities, forecasts and targets of this daemon; owned by the event loop."""

    def __init__(self, parts: HostParts, *, now: Callable[[], datetime] = lambda: datetime.now(tz=UTC)) -> None:
        settings, history = parts.settings, parts.history
        self._settings = settings
        self._is_configured = settings.carbon_zone is not None or settings.signal_path is not None
        self._runners = parts.jobs.with_targets
        self._history = history
        self._now = now
        replay_from = settings.carbon_replay_from
        self.grid = (
            GridClock.real_time(now())
            if replay_from is None
            else GridClock(now(), replay_from.astimezone(UTC), settings.carbon_replay_hour_s)
        )
        self.feed = CarbonFeed(settings, self.grid, history, now)
        self._emissions = RunningEmissions(settings.database_url, settings.pue)
        self.targets = CarbonTargets(
            settings, self.grid, self.feed, parts.next_target, history, now, self._emissions.use_of
        )
        if self._is_configured:
            parts.jobs.watch(self.targets, self.feed.zone)
        # A separate policy host: plans must not wait while a forecast is fitted, which takes seconds.
        self._forecaster = PolicyClient(parts.start_policy_host)
        is_child = settings.processes is Processes.CHILDREN and settings.needs_carbon_fetcher
        self._fetcher = CarbonFetcher(settings) if is_child else None
        self._periodic = Periodic()
        self._first_fetch: asyncio.Task[None] | None = None
        self._skill = LiveSkill()
        self._own_forecast: CarbonForecast | None = None
        self._forecast_failure: str | None = None
        self._forecast_series_end_at: datetime | None = None
        self._timing_value: TimingValue | None = None
        self._timing_value_at: datetime | None = None
        self._is_started = False

    @staticmethod
    def check(settings: Settings) -> None:
        """Check that the target policy is installed.

        Raises:
            UnknownPolicyError: it is not installed; the message lists the installed ones.
            UsageError: there is a table `[carbon]`.
        """
        check_policy_name(settings.target, TARGET_GROUP)
        if settings.service_options.get("carbon") is not None:
            raise UsageError("[carbon]: no such table; settings of carbon intensities begin with carbon_")

    async def start(self) -> None:
        """Load stored intensities and forecasts, start the fetcher and the periodic updates."""
        if not self._is_configured:
            return
        self._is_started = True
        await self.feed.load()
        with contextlib.suppress(StoreError):
            for forecast in await asyncio.to_thread(self._stored_forecasts):
                self._skill.add(forecast)
        if self._fetcher is not None:
            self._fetcher.start()
        period_s = min(max(self.grid.hour_s / _READS_PER_HOUR, _READ_PERIOD_S[0]), _READ_PERIOD_S[1])
        self._periodic.every(period_s, "carbon targets", self._update_targets)
        self._periodic.every(period_s, "job emissions", self._update_emissions)
        self._periodic.every(period_s, "carbon forecast", self._update_forecast)
        self._periodic.start()
        if self._settings.needs_carbon_fetcher:
            self._first_fetch = asyncio.create_task(self._await_first_fetch(), name="first carbon fetch")

    async def close(self) -> None:
        """Stop the periodic updates and both processes, and save the jobs' accounts."""
        if not self._is_started:
            return
        self._periodic.close()
        if self._first_fetch is not None:
            self._first_fetch.cancel()
            await asyncio.gather(self._first_fetch, return_exceptions=True)
        await self.targets.accounts.save(self._runners())
        if self._fetcher is not None:
            await self._fetcher.close()
        await self._forecaster.close()

    def handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Do nothing: targets follow iterations."""

    # --- periodic updates ---

    @property
    def forecast(self) -> CarbonForecast | None:
        """The forecast that targets use: the provider's if it reaches 6 h ahead, else our own."""
        provided = self.feed.provider_forecast
        now_at = self.grid.to_grid(self._now())
        is_usable = provided is not None and provided.hours and provided.hours[-1].target_at > now_at + 6 * HOUR
        return provided if is_usable else self._own_forecast

    async def _await_first_fetch(self) -> None:
        """Read the fetcher's file often until it has a first result, success or failure."""
        for _ in range(_FIRST_READS):
            await asyncio.sleep(_FIRST_READ_PERIOD_S)
            await self.feed.read()
            if self.feed.fetch_status is not None:
                return

    async def _update_targets(self) -> None:
        await self.feed.read()
        await self.targets.decide(self._runners(), self.forecast)
        await self.targets.accounts.save(self._runners())

    async def _update_emissions(self) -> None:
        await self._emissions.update([runner.job_id for runner in self._runners()])

    async def _update_forecast(self) -> None:
        """Compute a new forecast when the value of another hour is known."""
        series = self.feed.signal.series()
        if series is None or series.end_at == self._forecast_series_end_at:
            return
        self._skill.update(series)
        series = self._extended_to_now(series)
        wants_timing_value = (
            self._timing_value_at is None or series.end_at - self._timing_value_at >= _TIMING_VALUE_PERIOD
        )
        budget_ratio = self._settings.default_budget_ratio or self._settings.carbon_budget_ratio
        wanted = TimingValueQuery(budget_ratio, _TIMING_VALUE_JOB_HOURS, self._settings.carbon_host_power_w)
        query = ForecastQuery(EncodedSeries.of(series), wanted if wants_timing_value else None)
        answer = await self._forecaster.run_task(ServiceTask(TASK, encode(query).decode()))
        known = self.feed.signal.series()
        self._forecast_series_end_at = known.end_at if known is not None else None
        if isinstance(answer, PolicyFailure):
            self._forecast_failure = answer.reason
            return
        reply = decode(answer.encode(), ForecastReply, max_bytes=MAX_LINE_BYTES)
        self._forecast_failure = None
        self._own_forecast = reply.forecast
        if wants_timing_value:
            self._timing_value, self._timing_value_at = reply.timing_value, series.end_at
        used = self.forecast or reply.forecast
        self._skill.add(used)
        self._history.write(ForecastRecord(used))

    def _extended_to_now(self, series: HourlySeries) -> HourlySeries:
        """Extend a series to the start of this hour with unknown values, for at most a day of late data."""
        hour_at = self.grid.hour_of(self._now())
        missing = (hour_at - series.end_at) // HOUR
        if not 0 < missing <= 24:
            return series
        values = series.values + (float("nan"),) * missing
        return replace(series, values=values)

    def _stored_forecasts(self) -> tuple[CarbonForecast, ...]:
        with open_history(self._settings.database_url) as history:
            return history.forecasts(self.feed.zone, self.grid.to_grid(self._now()) - _SKILL_KEPT)

    # --- status ---

    @property
    def trouble(self) -> str | None:
        """The problem with the carbon data and its fix, None if there is none."""
        fetch = self.feed.fetch_status
        if self._fetcher is not None and self._fetcher.refusal is not None:
            return f"carbon: {self._fetcher.refusal}"
        if self.feed.trouble is not None and not self._is_waiting_for_first_fetch():
            is_unit = self._settings.needs_carbon_fetcher and self._fetcher is None and fetch is None
            return f"carbon: {self.feed.trouble}" + (
                "; check `systemctl status gpuenergyd-carbon.service`" if is_unit else ""
            )
        if fetch is not None and fetch.num_failures > 0 and not self._intensity_now().basis.is_current:
            return f"carbon: {fetch.message or fetch.problem} (acting on: {self._intensity_now().basis})"
        return None

    def status(self) -> Mapping[str, Any]:
        """Return the field `carbon` of the daemon's status."""
        return {"carbon": self._fields() if self._is_configured else None}

    def _fields(self) -> dict[str, Any]:
        present, series, source, fetch = (
            self._intensity_now(),
            self.feed.signal.series(),
            self.feed.source,
            self.feed.fetch_status,
        )
        forecast, skill, now_at = self.forecast, self._skill.skill(), self.grid.to_grid(self._now())
        return {
            "zone": self.feed.zone,
            "signal": self._settings.carbon_signal,
            "unit": self.feed.signal.unit,
            "source": source.source if source is not None else None,
            "kind": source.kind if source is not None else None,
            "factor": source.factor if source is not None else None,
            "value": present.carbon_intensity_g_per_kwh,
            "basis": present.basis,
            "age_s": present.age_s,
            "staleness": {
                "live_age_s": present.age_s,
                "forecast_age_s": (now_at - forecast.issued_at).total_seconds() if forecast is not None else None,
                "history_hours": len(series.values) if series is not None else 0,
                **asdict(StalenessRules()),
            },
            "forecast_model": forecast.model if forecast is not None else None,
            "forecast_failure": self._forecast_failure,
            "live_skill": asdict(skill) if skill is not None else None,
            "history_skill": asdict(forecast.skill) if forecast is not None and forecast.skill is not None else None,
            "timing_value": asdict(self._timing_value) if self._timing_value is not None else None,
            "fetcher": {
                "is_needed": self._settings.needs_carbon_fetcher,
                "pid": self._fetcher.pid if self._fetcher is not None else None,
                "num_restarts": self._fetcher.num_restarts if self._fetcher is not None else 0,
                "state": fetch.state if fetch is not None else None,
                "problem": fetch.problem if fetch is not None else None,
                "message": self._fetch_message(),
                "num_failures": fetch.num_failures if fetch is not None else 0,
            },
            "host_power_w": self._settings.carbon_host_power_w,
            "window_h": self._settings.carbon_window_h,
            "replayed_hour_s": None if self.grid.is_real_time else self.grid.hour_s,
            "failures": self._periodic.failures,
        }

    def _fetch_message(self) -> str | None:
        if self._fetcher is not None and self._fetcher.refusal is not None:
            return self._fetcher.refusal
        return self.feed.fetch_status.message if self.feed.fetch_status is not None else None

    def _intensity_now(self) -> IntensityNow:
        return intensity_now(self.grid.to_grid(self._now()), self.feed.signal.series(), self.forecast)

    def _is_waiting_for_first_fetch(self) -> bool:
        return self.feed.fetch_status is None and self._fetcher is not None and self._fetcher.num_restarts == 0


_MAX_DUTY_RATIO = 0.01
"""Largest share of time spent reading the history; a long training has many hours to add up."""


class RunningEmissions:
    """The energy use of running jobs by the definitions of reports, as of the last update."""

    def __init__(self, database_url: str, pue: float) -> None:
        self._database_url, self._pue = database_url, pue
        self._uses: Mapping[str, EnergyUse] = {}
        self._next_mono_s = float("-inf")

    def use_of(self, job_id: str) -> EnergyUse:
        """Return the energy use of a job; all of it is missing before the first update."""
        return self._uses.get(job_id, NO_ENERGY)

    async def update(self, job_ids: Collection[str]) -> None:
        """Read the history in a thread, unless the last read took so long that it is too early for another."""
        begun_mono_s = time.monotonic()
        if begun_mono_s < self._next_mono_s:
            return
        with contextlib.suppress(StoreError):
            self._uses = await asyncio.to_thread(self.read, job_ids)
        now_mono_s = time.monotonic()
        self._next_mono_s = now_mono_s + (now_mono_s - begun_mono_s) / _MAX_DUTY_RATIO

    def read(self, job_ids: Collection[str]) -> Mapping[str, EnergyUse]:
        if not job_ids:
            return {}
        with open_history(self._database_url) as history:
            spans = history.job_spans()
            starts = [spans[job_id][0] for job_id in job_ids if job_id in spans]
            if not starts:
                return {}
            first_at = min(starts)
            uses = energy_by_job(history, read_rates(history, pue=self._pue, since=first_at), first_at=first_at)
        return {job_id: uses[job_id] for job_id in job_ids if job_id in uses}
