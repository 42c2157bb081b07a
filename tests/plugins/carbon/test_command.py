"""`gpuenergyd carbon` reads and writes the documented files; every error is one line."""

import csv
import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, ForecastHour, HourlySeries
from gpuenergyd.errors import CarbonDataError, GpuEnergyError
from gpuenergyd_carbon.command import carbon
from gpuenergyd_carbon.lab.files import read_power_limit_profiles, read_traces
from gpuenergyd_carbon.lab.plot import forecast_svg
from tests.plugins.carbon.sources.scripted_server import Reply, json_reply, serving
from tests.support.carbon_traces import FIRST_AT, made_up_values

FRONTIER = [{"T": 1.0, "E": 100.0}, {"T": 1.05, "E": 92.0}, {"T": 1.1, "E": 88.0}]


def carbon_command(*arguments: object) -> int:
    """Run `gpuenergyd carbon ...` and return its exit code."""
    result = carbon([str(a) for a in arguments], standalone_mode=False)
    return result if isinstance(result, int) else 0


def write_trace(path: Path, values: Sequence[object], first_at: datetime = FIRST_AT) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["timestamp_utc", "carbon_intensity_g_per_kwh"])
        for k, value in enumerate(values):
            writer.writerow([f"{first_at + k * HOUR:%Y-%m-%dT%H:%M:%SZ}", value])
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "XX_made_2023.csv", made_up_values(40).round(2).tolist())


@pytest.fixture
def frontier(tmp_path: Path) -> Path:
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps(FRONTIER))
    return path


def backtest(trace: Path, *options: object) -> list[object]:
    return ["backtest", trace, "--train-until", "2023-01-31", "--job-hours", 24, "--starts", 5, *options]


def test_a_backtest_prints_the_documented_figures_and_writes_the_documented_files(
    trace: Path, frontier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forecasts, choices = tmp_path / "f.csv", tmp_path / "c.json"

    code = carbon_command(
        *backtest(trace, "--frontier", frontier, "--json", "--forecasts-out", forecasts, "--choices-out", choices)
    )
    printed = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader(forecasts.read_text().splitlines()))
    ran: dict[str, Any] = json.loads(choices.read_text())

    assert code == 0
    assert printed["zone"] == ran["zone"] == "XX"
    assert printed["time_used_ratio_max"] <= 1.0
    assert [method["name"] for method in printed["methods"]] == [
        "forecast", "yesterday", "7-day-mean", "chase", "perfect",
    ]  # fmt: skip
    assert list(rows[0]) == ["issued_at_utc", "target_utc", "carbon_intensity_g_per_kwh"]
    assert len(rows) == 10 * 24 * 24
    assert (rows[0]["issued_at_utc"], rows[0]["target_utc"]) == ("2023-01-31T00:00:00Z",) * 2
    assert len(ran["jobs"]) == 5
    for job in ran["jobs"]:
        for choice in job["choices"]:
            times_s = [choice] if isinstance(choice, float) else [time_s for time_s, _ in choice]
            assert set(times_s) <= {1.0, 1.05, 1.1}


def test_forecasts_and_choices_use_no_future_values(frontier: Path, tmp_path: Path) -> None:
    values, changed_from = made_up_values(40).round(2), 34 * 24 + 7
    other = values.copy()
    other[changed_from:] = values[changed_from:][::-1] * 3.0 + 100.0
    starts = tmp_path / "starts.json"
    starts.write_text(json.dumps([{"zone": "XX", "starts_utc": ["2023-02-03T02:00:00Z", "2023-02-01T20:00:00Z"]}]))
    written = []
    for name, lived in (("as-it-was", values), ("another-future", other)):
        folder = tmp_path / name
        folder.mkdir()
        files = folder / "f.csv", folder / "c.json"
        trace = write_trace(folder / "XX_made_2023.csv", lived.tolist())
        options = ["--starts-file", starts, "--job-hours", 48, "--forecasts-out", files[0], "--choices-out", files[1]]
        carbon_command("backtest", trace, "--train-until", "2023-01-31", "--frontier", frontier, *options)
        written.append((files[0].read_text().splitlines()[1:], json.loads(files[1].read_text())["jobs"]))

    (rows, jobs), (other_rows, other_jobs) = written
    changed_at = FIRST_AT + changed_from * HOUR  # not known yet to what is issued then
    num_before = sum(datetime.fromisoformat(row.partition(",")[0]) <= changed_at for row in rows)
    assert num_before == 24 * (4 * 24 + 7 + 1)
    assert rows[:num_before] == other_rows[:num_before]
    assert (rows, jobs) != (other_rows, other_jobs)
    for job, other_job in zip(jobs, other_jobs, strict=True):
        num_chosen = (changed_at - datetime.fromisoformat(job["start_utc"])) // HOUR + 1
        assert job["choices"][:num_chosen] == other_job["choices"][:num_chosen]


def test_starts_come_from_a_file_and_several_zones_give_a_list(
    trace: Path, frontier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_trace(tmp_path / "YY_made_2023.csv", made_up_values(40, seed=1).round(2).tolist())
    starts = tmp_path / "starts.json"
    starts.write_text(json.dumps([{"zone": z, "starts_utc": ["2023-02-02T05:00:00Z"]} for z in ("XX", "YY")]))

    carbon_command(*backtest(trace, other, "--frontier", frontier, "--starts-file", starts, "--json"))
    printed = json.loads(capsys.readouterr().out)

    assert [(zone["zone"], zone["num_jobs"]) for zone in printed] == [("XX", 1), ("YY", 1)]


def test_a_backtest_table_lists_every_forecast(trace: Path, frontier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    carbon_command(*backtest(trace, "--frontier", frontier))
    shown = capsys.readouterr().out

    for words in ("perfect timing adds", "yesterday", "7-day-mean", "chase", "forecast skill"):
        assert words in shown


def test_power_limit_profiles_of_several_gpus_add_energy_and_wait_for_the_slowest(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for gpu, slower in ((0, 1.0), (1, 1.01)):
        path = tmp_path / f"A40+job+gpu{gpu}.csv"
        rows = [f"0,limit,{slower * t},{e}" for t, e in ((1.0, 100.0), (1.1, 88.0))]
        path.write_text(f"start_time,window_name,elapsed_time,gpu{gpu}_energy\n" + "\n".join(rows) + "\n")
        paths.append(path)

    code = carbon_command(*backtest(trace, "--profile", *paths, "--json"))

    assert code == 0
    assert json.loads(capsys.readouterr().out)["constant_saving_ratio"] > 0
    assert read_power_limit_profiles(paths) == ((1.01, 200.0), (1.01 * 1.1, 176.0))


def test_years_of_a_zone_are_joined_in_any_order_and_gaps_stay_gaps(tmp_path: Path) -> None:
    later = write_trace(tmp_path / "XX_made_2024.csv", [3.0, 4.0], FIRST_AT + 4 * HOUR)
    earlier = write_trace(tmp_path / "XX_made_2023.csv", [1.0, "", 2.0])

    series = read_traces([later, earlier])[0]

    assert series.zone == "XX"
    assert series.first_hour_at == FIRST_AT
    assert [None if v != v else v for v in series.values] == [1.0, None, 2.0, None, 3.0, 4.0]  # noqa: PLR0124  NaN


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "columns"),
        ("time,value\n2023-01-01T00:00Z,1\n", "columns"),
        ("timestamp_utc,carbon_intensity_g_per_kwh\n", "no rows"),
        ("timestamp_utc,carbon_intensity_g_per_kwh\nyesterday,1\n", "line 2"),
        ("timestamp_utc,carbon_intensity_g_per_kwh\n2023-01-01T00:00Z,-5\n", "line 2.*0 to 2000"),
        ("timestamp_utc,carbon_intensity_g_per_kwh\n2023-01-01T00:00Z,1e6\n", "line 2.*0 to 2000"),
        ("timestamp_utc,carbon_intensity_g_per_kwh\n2023-01-01T00:30Z,5\n", "hourly"),
        (
            "timestamp_utc,carbon_intensity_g_per_kwh\n2023-01-01T00:00Z,5\n2023-01-01T00:00Z,6\n",
            "6 for 2023-01-01T00:00:00Z, but 5 earlier",
        ),
    ],
)
def test_an_invalid_trace_is_an_error_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "XX_bad.csv"
    path.write_text(content)

    with pytest.raises(CarbonDataError, match=words):
        read_traces([path])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "either --frontier FILE or --profile FILE"),
        (("--frontier", "missing.json"), "No such file"),
        (("--frontier", "XX_made_2023.csv"), "must be a frontier"),
        (("--frontier", "frontier.json", "--max-slowdown", "nan"), "--max-slowdown nan"),
        (("--frontier", "frontier.json", "--starts-file", "frontier.json"), "must be start times"),
        (("--frontier", "frontier.json", "--choices-out", "no/such/folder"), "No such file"),
    ],
)
def test_an_invalid_option_is_a_usage_error(
    trace: Path, frontier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    assert frontier.parent == tmp_path
    monkeypatch.chdir(tmp_path)

    with pytest.raises(GpuEnergyError, match=words) as caught:
        carbon_command(*backtest(trace, *options))

    assert caught.value.exit_code == 2


def test_an_invalid_date_is_a_usage_error(trace: Path, frontier: Path) -> None:
    with pytest.raises(CarbonDataError, match="--train-until 'soon': must be a date"):
        carbon_command("backtest", trace, "--train-until", "soon", "--frontier", frontier)


def test_a_forecast_is_drawn_in_the_terminal_and_as_svg(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = carbon_command("forecast", trace, "--hours", 6, "--svg", tmp_path / "f.svg")
    shown = capsys.readouterr().out.splitlines()

    assert code == 0
    assert sum("█" in line for line in shown) == 6
    drawing = ET.parse(tmp_path / "f.svg")
    paths = [(node.get("class"), node.get("d", "")) for node in drawing.findall(".//{*}path")]
    assert [name for name, _ in paths[:3]] == ["band", "line history", "line expected"]
    assert [path.count("H") for _, path in paths[:3]] == [12, 48, 6]
    assert "XX, issued 2023-02-10 00:00 UTC" in [node.text for node in drawing.findall(".//{*}text")]


def test_unknown_hours_are_gaps_of_the_drawn_history() -> None:
    values = (*(200.0,) * 10, math.nan, math.nan, *(150.0,) * 4)
    hours = tuple(ForecastHour(FIRST_AT + k * HOUR, 150.0, 100.0, 200.0) for k in range(16, 18))
    drawing = forecast_svg(CarbonForecast("XX", FIRST_AT, "m", hours), HourlySeries("XX", FIRST_AT, values))

    history, _ = re.findall(r'class="line history" d="(M[^"]*)"', drawing)  # the second one is in the legend

    assert (history.count("M"), history.count("H")) == (2, 14)


def test_a_forecast_as_json_holds_hours_with_bounds(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    carbon_command("forecast", trace, "--hours", 30, "--json")
    printed = json.loads(capsys.readouterr().out)

    assert len(printed["hours"]) == 30
    assert printed["hours"][0]["target_utc"] == printed["issued_at_utc"] == "2023-02-10T00:00:00Z"
    assert all(h["low_g_per_kwh"] <= h["carbon_intensity_g_per_kwh"] <= h["high_g_per_kwh"] for h in printed["hours"])


def test_now_queries_the_source_and_prints_the_kind_of_value(capsys: pytest.CaptureFixture[str]) -> None:
    begin = datetime.now(tz=UTC).replace(minute=0, second=0, microsecond=0) - HOUR
    row = {
        "from": f"{begin:%Y-%m-%dT%H:%MZ}",
        "to": f"{begin + timedelta(hours=1):%Y-%m-%dT%H:%MZ}",
        "intensity": {"forecast": 150, "actual": 140, "index": "low"},
    }
    with serving(lambda _: json_reply({"data": [row]})) as server:
        code = carbon_command("now", "--zone", "GB", "--base-url", server.url, "--json")
    printed = json.loads(capsys.readouterr().out)

    assert code == 0
    assert printed["carbon_intensity_g_per_kwh"] == 140
    assert (printed["basis"], printed["status"], printed["source"]) == ("live", "measured", "neso")
    assert (printed["kind"], printed["factor"]) == ("average", "operational")


def test_now_reports_a_source_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        serving(lambda _: Reply(b"<html>", 200)) as server,
        pytest.raises(GpuEnergyError, match="neso: reply is not JSON") as caught,
    ):
        carbon_command("now", "--zone", "GB", "--base-url", server.url)

    assert caught.value.exit_code == 1
    assert capsys.readouterr().out == ""


def test_an_old_file_is_degraded(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = carbon_command("now", "--csv", trace)

    assert code == 4
    assert "more than a day old" in " ".join(capsys.readouterr().out.split())


def test_a_fixed_intensity_is_not_called_live(capsys: pytest.CaptureFixture[str]) -> None:
    assert carbon_command("now", "--zone", "GB", "--fixed", "300") == 0
    text = capsys.readouterr().out
    assert carbon_command("now", "--zone", "GB", "--fixed", "300", "--json") == 0
    document = json.loads(capsys.readouterr().out)

    assert text == "GB: 300 g/kWh (fixed; average, lifecycle)\n"
    assert (document["basis"], document["carbon_intensity_g_per_kwh"]) == ("fixed", 300.0)
