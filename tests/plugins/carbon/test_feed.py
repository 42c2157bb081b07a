"""The carbon feed: complete hours, no future values, revised values stored again, errors reported."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.core.carbon.intensity import HOUR, CarbonSignal, IntensityBasis, IntensitySample, SampleStatus
from gpuenergyd.daemon.processes.target_queries import EncodedSeries
from gpuenergyd.daemon.settings import Settings, load_settings
from gpuenergyd.store import HistoryWriter, WriterOptions, open_history
from gpuenergyd.store.records import IntensityRecord
from gpuenergyd_carbon.feed import CarbonFeed
from gpuenergyd_carbon.fetched_file import SANDBOX_PROBLEM, Fetched, FetchState, FetchStatus, write_fetched
from gpuenergyd_carbon.rules.grid_clock import GridClock
from gpuenergyd_carbon.rules.present_intensity import intensity_now
from tests.support.job_stage import FakeHistory

NOW_AT = datetime(2026, 3, 2, 12, 20, tzinfo=UTC)
THIS_HOUR_AT = datetime(2026, 3, 2, 12, tzinfo=UTC)


class Kept(FakeHistory):
    """A history that keeps its records in memory."""

    def intensities(self) -> list[IntensityRecord]:
        return [record for record in self.records if isinstance(record, IntensityRecord)]


def settings(folder: Path, **overrides: Any) -> Settings:
    config = folder / "config.toml"
    config.touch()
    given = {"runtime_dir": folder, "state_dir": folder, "carbon_zone": "GB", **overrides}
    return load_settings(config, **given)


def feed_of(
    known: Settings, kept: Kept, grid: GridClock | None = None, now: Callable[[], datetime] | None = None
) -> CarbonFeed:
    return CarbonFeed(known, grid or GridClock.real_time(NOW_AT), kept, now or (lambda: NOW_AT))


def samples(num_half_hours: int, value: float = 200.0) -> tuple[IntensitySample, ...]:
    """Return half-hours that end at the start of this hour."""
    first = THIS_HOUR_AT - num_half_hours * HOUR / 2
    return tuple(
        IntensitySample(first + k * HOUR / 2, first + (k + 1) * HOUR / 2, value + k % 2 * 10.0)
        for k in range(num_half_hours)
    )


def fetched(**changes: Any) -> Fetched:
    given: dict[str, Any] = {
        "signal": CarbonSignal("GB", "neso"),
        "samples": samples(48),
        "forecast": tuple(
            IntensitySample(THIS_HOUR_AT + k * HOUR, THIS_HOUR_AT + (k + 1) * HOUR, 300.0, SampleStatus.FORECAST)
            for k in range(24)
        ),
        "status": FetchStatus(FetchState.OK, fetched_at=NOW_AT),
        **changes,
    }
    return Fetched(**given)


def test_half_hours_are_merged_into_hours_and_stored_once(tmp_path: Path) -> None:
    known, kept = settings(tmp_path), Kept()
    feed = feed_of(known, kept)
    write_fetched(known.carbon_file_path, fetched())

    asyncio.run(feed.read())
    asyncio.run(feed.read())

    series = feed.signal.series()
    assert series is not None
    assert (len(series.values), series.end_at, series.values[-1]) == (24, THIS_HOUR_AT, 205.0)
    assert len(kept.intensities()) == 48
    assert feed.trouble is None
    assert feed.provider_forecast is not None
    assert feed.provider_forecast.value_at(NOW_AT) == 300.0


def test_a_revised_value_replaces_the_first_and_is_stored_again(tmp_path: Path) -> None:
    known, kept = settings(tmp_path), Kept()
    feed = feed_of(known, kept)
    write_fetched(known.carbon_file_path, fetched())
    asyncio.run(feed.read())
    write_fetched(known.carbon_file_path, fetched(samples=samples(48, value=100.0), forecast=()))

    asyncio.run(feed.read())

    assert feed.intensities.value_at(THIS_HOUR_AT - HOUR) == 105.0
    assert len(kept.intensities()) == 96
    assert feed.num_updates == 2


@pytest.mark.fault(58)
def test_estimates_of_a_sandbox_key_are_deleted_from_the_history(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    known = settings(tmp_path, database_url=url)
    history = HistoryWriter(url, WriterOptions(reserve_bytes=0))
    history.start()
    feed = CarbonFeed(known, GridClock.real_time(NOW_AT), history, lambda: NOW_AT)
    measured, made_up = samples(48)[:46], [replace(s, status=SampleStatus.ESTIMATED) for s in samples(48)[46:]]
    write_fetched(known.carbon_file_path, fetched(samples=(*measured, *made_up)))
    asyncio.run(feed.read())
    assert feed.intensities.value_at(THIS_HOUR_AT - HOUR) is not None

    refused = FetchStatus(FetchState.FAILED, problem=SANDBOX_PROBLEM, fetched_at=NOW_AT)
    write_fetched(known.carbon_file_path, fetched(samples=measured, forecast=(), status=refused))
    asyncio.run(feed.read())
    history.close(10.0)

    assert feed.intensities.value_at(THIS_HOUR_AT - HOUR) is None
    assert feed.intensities.value_at(THIS_HOUR_AT - 2 * HOUR) is not None
    with open_history(url) as stored:
        rows = stored.intensities(zone="GB", since=NOW_AT - timedelta(days=3))
    assert {row.host.status for row in rows} == {SampleStatus.MEASURED}
    assert len(rows) == 46


@pytest.mark.parametrize(
    ("content", "output"), [(None, None), (b"{", "invalid content"), (b"<html>502</html>", "invalid content")]
)
def test_a_missing_or_damaged_file_is_reported_without_further_effect(
    tmp_path: Path, content: bytes | None, output: str | None
) -> None:
    known, kept = settings(tmp_path), Kept()
    feed = feed_of(known, kept)
    if content is not None:
        known.carbon_file_path.write_bytes(content)

    asyncio.run(feed.read())

    assert feed.signal.series() is None
    assert (feed.trouble is None) if output is None else (output in (feed.trouble or ""))


def test_values_of_another_zone_are_refused(tmp_path: Path) -> None:
    known, kept = settings(tmp_path), Kept()
    feed = feed_of(known, kept)
    write_fetched(known.carbon_file_path, fetched(signal=CarbonSignal("DE", "neso")))

    asyncio.run(feed.read())

    assert feed.signal.series() is None
    assert "is for zone 'DE'" in (feed.trouble or "")


def test_stored_intensities_are_loaded_after_a_restart(tmp_path: Path) -> None:
    known = settings(tmp_path)
    writer = HistoryWriter(known.database_url)
    writer.start()
    write_fetched(known.carbon_file_path, fetched())
    earlier = CarbonFeed(known, GridClock.real_time(NOW_AT), writer, lambda: NOW_AT)
    asyncio.run(earlier.read())
    writer.close()
    known.carbon_file_path.unlink()

    feed = feed_of(known, Kept())
    asyncio.run(feed.load())

    series = feed.signal.series()
    assert series is not None
    assert series.values[-1] == 205.0
    assert len(series.values) == 24


def trace(folder: Path, column: str = "carbon_intensity_g_per_kwh", num_hours: int = 72) -> Path:
    """Write a trace that starts a day before this hour; each value is its index."""
    path = folder / "XX_test_2026.csv"
    rows = [f"{THIS_HOUR_AT + (k - 24) * HOUR:%Y-%m-%dT%H:%M:%SZ},{k}" for k in range(num_hours)]
    path.write_text(f"timestamp_utc,{column}\n" + "\n".join(rows) + "\n")
    return path


def test_future_hours_of_a_file_are_a_forecast_never_history(tmp_path: Path) -> None:
    known, kept = settings(tmp_path, carbon_zone=None, carbon_signal=str(trace(tmp_path))), Kept()
    feed = feed_of(known, kept)

    asyncio.run(feed.read())

    series = feed.signal.series()
    assert series is not None
    assert series.values == tuple(float(k) for k in range(24))
    assert feed.provider_forecast is not None
    assert feed.provider_forecast.hours[0].carbon_intensity_g_per_kwh == 24.0
    assert (feed.zone, feed.signal.unit) == ("XX", "g/kWh")
    assert max(record.carbon_intensity_g_per_kwh for record in kept.intensities()) == 24.0


def test_a_replayed_trace_hides_the_future_and_is_stored_in_host_time(tmp_path: Path) -> None:
    known = settings(tmp_path, carbon_zone=None, carbon_signal=str(trace(tmp_path)))
    kept, grid = Kept(), GridClock(NOW_AT, THIS_HOUR_AT, hour_s=6.0)
    feed = feed_of(known, kept, grid, lambda: NOW_AT + timedelta(seconds=15))

    asyncio.run(feed.read())

    series = feed.signal.series()
    assert series is not None
    assert series.values[-1] == 25.0
    assert feed.provider_forecast is None
    stored = kept.intensities()
    assert [record.carbon_intensity_g_per_kwh for record in stored] == [24.0, 25.0, 26.0]
    assert stored[0].valid_from == NOW_AT
    assert stored[0].valid_to == NOW_AT + timedelta(seconds=6)
    assert stored[1].grid_from == THIS_HOUR_AT + HOUR


def test_a_price_signal_is_followed_without_counting_emissions(tmp_path: Path) -> None:
    path = trace(tmp_path, column="price_eur_per_mwh")
    known, kept = settings(tmp_path, carbon_zone=None, carbon_signal="price", carbon_price_path=path), Kept()
    feed = feed_of(known, kept)

    asyncio.run(feed.read())

    assert feed.signal.unit == "price_eur_per_mwh"
    assert kept.intensities() == []
    assert feed.intensities.value_at(THIS_HOUR_AT - HOUR) is None


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("timestamp_utc,carbon_intensity_g_per_kwh\n2026-03-02T10:00:00Z,-5\n", "line 2"),
        ("timestamp_utc,carbon_intensity_g_per_kwh\n2026-03-02T10:00:00Z,1000000\n", "line 2"),
        ("timestamp_utc,carbon_intensity_g_per_kwh\n2026-03-02T10:30:00Z,5\n", "expected a full hour"),
        ("timestamp_utc,carbon_intensity_g_per_kwh\nyesterday,5\n", "expected a time and a number"),
        ("a,b,c\n1,2,3\n", "valid: timestamp_utc and one more"),
        ("timestamp_utc,x\n", "no rows below the header"),
    ],
)
def test_an_invalid_file_is_reported_with_its_line(tmp_path: Path, text: str, output: str) -> None:
    path = tmp_path / "XX.csv"
    path.write_text(text)
    feed = feed_of(settings(tmp_path, carbon_zone=None, carbon_signal=str(path)), Kept())

    asyncio.run(feed.read())

    assert output in (feed.trouble or "")
    assert str(path) in (feed.trouble or "")


def test_a_fixed_value_is_fixed_for_status_and_targets_until_a_source_replaces_it(tmp_path: Path) -> None:
    known = settings(tmp_path)
    feed = feed_of(known, Kept())
    fixed = IntensitySample(THIS_HOUR_AT, THIS_HOUR_AT + HOUR, 210.0, SampleStatus.STATIC)

    write_fetched(known.carbon_file_path, fetched(signal=CarbonSignal("GB", "fixed"), samples=(fixed,), forecast=()))
    asyncio.run(feed.read())
    series = feed.signal.series()
    assert series is not None
    sent = EncodedSeries.of(series).series()
    write_fetched(known.carbon_file_path, fetched())
    asyncio.run(feed.read())

    assert [intensity_now(NOW_AT, each).basis for each in (series, sent, feed.signal.series())] == [
        IntensityBasis.FIXED,
        IntensityBasis.FIXED,
        IntensityBasis.LIVE,
    ]


def test_aging_values_use_each_basis_in_turn(tmp_path: Path) -> None:
    known, kept = settings(tmp_path), Kept()
    feed = feed_of(known, kept)
    write_fetched(known.carbon_file_path, fetched())
    asyncio.run(feed.read())
    series, forecast = feed.signal.series(), feed.provider_forecast

    bases = [intensity_now(NOW_AT + h * HOUR, series, forecast).basis for h in (0, 5, 30, 24 * 8)]

    assert bases == [
        IntensityBasis.LIVE,
        IntensityBasis.FORECAST,
        IntensityBasis.HISTORICAL_MEAN,
        IntensityBasis.NEUTRAL,
    ]
    assert not math.isnan(intensity_now(NOW_AT, series, forecast).carbon_intensity_g_per_kwh or math.nan)
