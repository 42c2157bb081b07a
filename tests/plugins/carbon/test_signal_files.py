"""Signal files: valid rows are read unchanged, invalid ones are named with file and line."""

import math
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuenergyd.core.carbon.intensity import HOUR, SampleStatus
from gpuenergyd.errors import CarbonDataError
from gpuenergyd_carbon import signal_file
from gpuenergyd_carbon.signal_file import SignalFile, zone_of_file
from gpuenergyd_carbon.sources import fixed
from gpuenergyd_carbon.sources.source import SourceOptions, make_source
from gpuenergyd_carbon.sources.web import SourceError, SourceProblem, Web

HEADER = "timestamp_utc,carbon_intensity_g_per_kwh\n"
FIRST_AT = datetime(2026, 5, 4, 10, tzinfo=UTC)


def read(path: Path, text: str) -> tuple[float, ...]:
    path.write_text(text)
    return SignalFile(path, "XX").read().values


def test_hours_may_be_unordered_and_missing_ones_are_unknown(tmp_path: Path) -> None:
    rows = "2026-05-04T15:00+02:00,300\n\n2026-05-04T10:00,100\n2026-05-04T11:00Z,\n"

    values = read(tmp_path / "XX_2026.csv", HEADER + rows)

    assert values[0] == 100.0
    assert math.isnan(values[1])
    assert math.isnan(values[2])
    assert values[3] == 300.0


def test_another_column_is_a_cost_in_its_unit_and_may_be_negative(tmp_path: Path) -> None:
    path = tmp_path / "DE_prices.csv"
    path.write_text("eur_per_mwh,timestamp_utc\n-12.5,2026-05-04T10:00Z\n")

    series = SignalFile(path, zone_of_file(path)).read()

    assert (series.zone, series.unit, series.values) == ("DE", "eur_per_mwh", (-12.5,))
    assert series.first_hour_at == FIRST_AT


def test_a_file_is_read_again_only_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text(HEADER + "2026-05-04T10:00Z,100\n")
    file = SignalFile(path, "XX")

    first = file.read()
    again = file.read()
    path.write_text(HEADER + "2026-05-04T10:00Z,2000\n")

    assert again is first
    assert file.read().values == (2000.0,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns"),
        ("timestamp_utc,a,b\n", "valid: timestamp_utc and one more"),
        (HEADER, "no rows below the header"),
        (HEADER + "2026-05-04T10:00Z\n", "line 2: expected a time and a number"),
        (HEADER + "2026-05-04T10:00Z,1\nyesterday,1\n", "line 3: expected a time and a number"),
        (HEADER + "2026-05-04T10:30Z,1\n", "line 2: expected a full hour"),
        (HEADER + "2026-05-04T10:00Z,inf\n", "line 2: expected a full hour and a finite value"),
        (HEADER + "2026-05-04T10:00Z,2001\n", "line 2: carbon intensity 2001.0 is not a number from 0 to 2000"),
        (HEADER + "1900-01-01T00:00Z,1\n2026-05-04T10:00Z,1\n", "at most"),
    ],
)
def test_an_invalid_row_is_named_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CarbonDataError, match=message) as refused:
        read(tmp_path / "f.csv", text)
    assert str(refused.value).startswith(str(tmp_path / "f.csv"))


def test_a_missing_or_too_large_signal_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_file, "MAX_BYTES", 50)

    with pytest.raises(CarbonDataError, match="No such file"):
        SignalFile(tmp_path / "none.csv", "XX").read()
    with pytest.raises(CarbonDataError, match="larger than 50 bytes"):
        read(tmp_path / "f.csv", HEADER + "2026-05-04T10:00Z,100\n")


def csv_source(path: Path, text: str) -> tuple[tuple[float, SampleStatus], ...]:
    path.write_text(text)
    reply = make_source("csv", SourceOptions("XX", Web(), path=path)).fetch(FIRST_AT + 1.5 * HOUR)
    return tuple((s.carbon_intensity_g_per_kwh, s.status) for s in (*reply.samples, *reply.forecast))


def test_future_rows_of_a_csv_source_are_its_forecast(tmp_path: Path) -> None:
    rows = "2026-05-04T10:00,100\n2026-05-04T11:00Z,200\n2026-05-04T12:00Z,300\n"

    assert csv_source(tmp_path / "f.csv", HEADER + rows) == (
        (100.0, SampleStatus.MEASURED),
        (200.0, SampleStatus.MEASURED),
        (300.0, SampleStatus.FORECAST),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns 'a,b'; valid: timestamp_utc and carbon_intensity_g_per_kwh"),
        (HEADER + "noon,1\n", "line 2: expected a time and a number"),
    ],
)
def test_a_csv_source_names_the_invalid_row(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message) as refused:
        csv_source(tmp_path / "f.csv", text)
    assert refused.value.problem is SourceProblem.NOT_PARSED


def test_a_csv_source_rejects_a_missing_or_too_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed, "_MAX_BYTES", 8)

    with pytest.raises(SourceError, match="larger than 8 bytes"):
        csv_source(tmp_path / "f.csv", HEADER)
    with pytest.raises(SourceError, match="No such file") as absent:
        make_source("csv", SourceOptions("XX", Web(), path=tmp_path / "none")).fetch(FIRST_AT)
    assert absent.value.problem is SourceProblem.UNREACHABLE
