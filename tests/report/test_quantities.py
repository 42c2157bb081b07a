"""Every output shows the quantities that the rows of the history give, computed here by SQL of its own."""

import csv
import io
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.core.carbon.intensity import EmissionFactor, IntensityBasis, SampleStatus, SignalKind
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.quantities.energy_use import NO_ENERGY
from gpuenergyd.report.formatting import cost_text, energy_text, grams_text
from gpuenergyd.store.records import (
    EstimateRecord,
    IntensityRecord,
    IterationRecord,
    JobEndRecord,
    JobRecord,
    RankRecord,
    Record,
    RollupRecord,
    TargetRecord,
)
from gpuenergyd_carbon.job_views import carbon_figures
from gpuenergyd_carbon.service import RunningEmissions
from gpuenergyd_otlp.prometheus import metrics_text
from tests.plugins.otlp.test_prometheus import STATUS
from tests.support.sample_history import write_sample_history
from tests.support.stored_history import write_records

BEGIN = datetime(2026, 3, 1, 8, 0, tzinfo=UTC)
NUM_MINUTES = 180
PRICE, PUE = 0.25, 1.3
OLD_HOST_W = 300.0
UID = 600_000
"""No user of any host."""
JOBS = {"all-1": (0, 40, 130), "old-1": (1, 10, 100), "dark-1": (2, 20, 50)}
"""Number of its first GPU (it has two), first and last minute of each job."""


def _minute(number: int) -> datetime:
    return BEGIN + timedelta(minutes=number)


def _rollups() -> Iterator[Record]:
    """Yield each minute of six GPUs, as minute and hour: measured, estimated, missing; three minutes have all."""
    for minute in range(NUM_MINUTES):
        for gpu in range(6):
            job_id = next((j for j, (own, a, b) in JOBS.items() if gpu // 2 == own and a <= minute < b), "")
            energy_j: float | None
            estimated_j: float | None
            energy_j, estimated_j, seconds = 6000.0 + 10 * gpu + minute, None, (60.0, 0.0, 0.0)
            if job_id == "dark-1":
                energy_j, seconds = None, (0.0, 0.0, 60.0)
            elif minute % 17 == 3:
                energy_j, estimated_j, seconds = None, 5000.0 + minute, (0.0, 60.0, 0.0)
            elif minute % 23 == 5:
                energy_j, estimated_j, seconds = 2000.0, 1500.0, (20.0, 20.0, 20.0)
            host_j = None if job_id == "old-1" else 60.0 * 40.0
            for bucket_s in (60, 3600):
                at = _minute(minute if bucket_s == 60 else minute - minute % 60)
                values = (energy_j, 100.0, 100.0, 1410.0, 600, estimated_j, *seconds, host_j)
                yield RollupRecord(bucket_s, f"GPU-{gpu}", at, job_id, *values)


def _iterations(job_id: str) -> Iterator[Record]:
    """Yield half a minute of each minute but ten in the middle: regular, disturbed, profiling, some without energy."""
    _, first, last = JOBS[job_id]
    for k, minute in enumerate(minute for minute in range(first, last) if not first + 20 <= minute < first + 30):
        purpose = PlanPurpose.BASELINE if k < 10 else PlanPurpose.TRIAL if k < 14 else PlanPurpose.TUNED
        energy_j = None if k % 9 == 8 or job_id == "dark-1" else (5000.0 if k < 10 else 4300.0) + 7 * (k % 5)
        at, plan_id = _minute(minute), f"{purpose}-1"
        yield IterationRecord(job_id, k, at, 30.0 + 0.1 * (k % 3), energy_j, plan_id, purpose, is_regular=k % 7 != 6)


def _intensities() -> Iterator[Record]:
    """Yield half an hour each: an estimate that was measured later, a gap, and nothing after 10:20."""
    known = [(0, 30, 200.0, SampleStatus.MEASURED), (30, 60, 900.0, SampleStatus.ESTIMATED)]
    known += [(30, 60, 250.0, SampleStatus.MEASURED), (75, 90, 300.0, SampleStatus.FORECAST)]
    known += [(90, 120, 350.0, SampleStatus.MEASURED), (120, 140, 120.0, SampleStatus.ESTIMATED)]
    for first, last, intensity, status in known:
        begin, end = _minute(first), _minute(last)
        yield IntensityRecord(
            "GB", "test", SignalKind.AVERAGE, EmissionFactor.DIRECT, status, begin, end, begin, intensity, BEGIN
        )


def _records() -> Iterator[Record]:
    yield from _rollups()
    yield from _intensities()
    for job_id, (own, first, last) in JOBS.items():
        at = _minute(first)
        yield JobRecord(job_id, job_id[:-2], job_id, 0, "uniform", "1f1b", "torch", True, 2, 8, 0.0, UID + own, at)
        for rank in range(2):
            yield RankRecord(job_id, rank, f"GPU-{2 * own + rank}", "A100", 1, own, at)
        yield from _iterations(job_id)
        yield JobEndRecord(job_id, _minute(last), "released")
    yield TargetRecord(
        "old-1", _minute(10), "carbon", None, "test", IntensityBasis.LIVE, 200.0, "g/kWh", None, 0.0, OLD_HOST_W
    )


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_records(tmp_path_factory.mktemp("history") / "history.sqlite3", *_records(), host="a")


EACH_MINUTE = f"""
    WITH minutes AS (
        SELECT r.*, coalesce(energy_j, 0) + coalesce(estimated_j, 0) AS used_j,
            coalesce(assumed_host_j, CASE WHEN job_id = 'old-1' THEN 60 * {OLD_HOST_W} / 2 END, 0) AS host_j,
            (SELECT carbon_intensity_g_per_kwh FROM intensities
             WHERE valid_from <= r.started_at AND r.started_at < valid_to
             ORDER BY CASE status WHEN 'measured' THEN 0 ELSE 1 END LIMIT 1) AS g_per_kwh
        FROM gpu_rollups r WHERE bucket_s = 60)
    SELECT {{key}} AS key, sum(energy_j) AS energy_j, sum(estimated_j) AS estimated_j, sum(missing_s) AS missing_s,
        {PUE} * sum(used_j) / 3.6e6 * {PRICE} AS cost, {PUE} * sum((used_j + host_j) / 3.6e6 * g_per_kwh) AS carbon_g,
        sum(CASE WHEN g_per_kwh IS NULL THEN 0 ELSE used_j END) AS priced_energy_j,
        sum(CASE WHEN g_per_kwh IS NULL THEN used_j ELSE 0 END) AS unpriced_energy_j,
        {PUE} * sum(estimated_j / 3.6e6 * g_per_kwh) AS estimated_carbon_g, sum(host_j) AS assumed_host_j
    FROM minutes GROUP BY 1"""
USER_OF_JOB = (
    "CASE job_id WHEN 'all-1' THEN 'uid 600000' WHEN 'old-1' THEN 'uid 600001'"
    " WHEN '' THEN '(idle)' ELSE 'uid 600002' END"
)
NAMES = (
    *("energy_j", "estimated_j", "missing_s", "cost", "carbon_g", "estimated_carbon_g"),
    *("priced_energy_j", "unpriced_energy_j", "assumed_host_j"),
)


def from_rows(database: Path, key: str) -> dict[str, dict[str, Any]]:
    """Return the quantities by an expression over minutes; energy without any reading is missing, as are prices of it.

    Without any intensity nothing is said of emissions.
    """
    with sqlite3.connect(database) as connection:
        connection.row_factory = sqlite3.Row
        found: dict[str, dict[str, Any]] = {
            row["key"]: dict(row) for row in connection.execute(EACH_MINUTE.format(key=key))
        }
        (has_intensities,) = connection.execute("SELECT count(*) > 0 FROM intensities").fetchone()
    connection.close()
    if not has_intensities:
        nothing: dict[str, Any] = dict.fromkeys(("priced_energy_j", "unpriced_energy_j", "assumed_host_j"))
        found = {name: values | nothing for name, values in found.items()}
    without: dict[str, Any] = dict.fromkeys(("cost", "priced_energy_j", "unpriced_energy_j"))
    unknown = {key for key, values in found.items() if values["energy_j"] is values["estimated_j"] is None}
    return {key: values | without if key in unknown else values for key, values in found.items()}


def reported(database: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    prices = ["--price-per-kwh", str(PRICE), "--currency", "EUR", "--pue", str(PUE)]
    assert run(["report", "--database", str(database), *prices, *arguments]) == 0
    return capsys.readouterr().out


def csv_rows(text: str) -> list[dict[str, Any]]:
    return [
        {name: None if cell == "" else cell for name, cell in row.items()} for row in csv.DictReader(io.StringIO(text))
    ]


def assert_same(row: dict[str, Any], expected: dict[str, Any], *, prefix: str = "") -> None:
    for name in NAMES:
        shown = row[f"{prefix}{name}" if name in {"energy_j", "estimated_j", "missing_s"} else name]
        value = None if shown is None else float(shown)
        assert value == (None if expected[name] is None else pytest.approx(expected[name])), name
    assert (float(row["price_per_kwh"]), row["currency"], float(row["pue"])) == (PRICE, "EUR", PUE)


def test_json_and_csv_by_job(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = from_rows(database, "job_id")
    with sqlite3.connect(database) as connection:
        within = dict(connection.execute("SELECT job_id, sum(energy_j) FROM iterations GROUP BY 1"))
        regular = dict(connection.execute("SELECT job_id, sum(energy_j) FROM iterations WHERE is_regular GROUP BY 1"))
    connection.close()

    for rows in (
        json.loads(reported(database, capsys, "--json"))["jobs"],
        csv_rows(reported(database, capsys, "--format", "csv")),
    ):
        assert {row["job_id"] for row in rows} == set(JOBS)
        for row in rows:
            of_job = expected[row["job_id"]]
            assert_same(row, of_job, prefix="gpu_")
            assert row["energy_j"] == row["gpu_energy_j"]
            if row["job_id"] == "dark-1":
                assert row["between_iterations_j"] is row["iterations_energy_j"] is row["regular_energy_j"] is None
                continue
            assert float(row["iterations_energy_j"]) == pytest.approx(within[row["job_id"]])
            assert float(row["regular_energy_j"]) == pytest.approx(regular[row["job_id"]])
            between_j = of_job["energy_j"] + of_job["estimated_j"] - within[row["job_id"]]
            assert float(row["between_iterations_j"]) == pytest.approx(between_j)


def test_totals_are_the_sums_of_jobs(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [values for key, values in from_rows(database, "job_id").items() if key]
    totals = json.loads(reported(database, capsys, "--json"))["totals"]

    for name in ("carbon_g", "estimated_carbon_g", "priced_energy_j", "unpriced_energy_j", "assumed_host_j"):
        assert totals[name] == pytest.approx(sum(values[name] or 0.0 for values in jobs))
    assert totals["pue"] == PUE


@pytest.mark.parametrize(
    ("by", "key"),
    [
        ("user", USER_OF_JOB),
        ("gpu", "gpu_uuid"),
        ("host", "'a'"),
        ("training", "CASE job_id WHEN '' THEN '(idle)' ELSE substr(job_id, 1, length(job_id) - 2) END"),
    ],
)
def test_groups(by: str, key: str, database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = from_rows(database, key)

    groups = json.loads(reported(database, capsys, "--group-by", by, "--json"))["groups"]
    as_csv = csv_rows(reported(database, capsys, "--group-by", by, "--format", "csv"))
    table = reported(database, capsys, "--group-by", by)

    for rows in (groups, as_csv):
        assert len(rows) == len(expected)
        for row in rows:
            assert_same(row, expected[row["group"].split(" 2026")[0]])
    assert "cost (EUR)" in table
    assert "emissions are location-based; emissions and cost with PUE 1.3" in table
    for values in expected.values():
        assert energy_text(values["energy_j"]) in table
        assert grams_text(values["carbon_g"]) in table
        assert cost_text(values["cost"]) in table


AT = "started_at / 1000000 - 30600, 'unixepoch'"
"""The time of a minute 8.5 hours west of Greenwich, where a month begins half an hour after the first minute."""
KEYS = {
    "user": USER_OF_JOB,
    "day": f"strftime('%Y-%m-%d', {AT})",
    "month": f"strftime('%Y-%m', {AT})",
    "gpu": "gpu_uuid",
    "host": "'a'",
    "job": "CASE job_id WHEN '' THEN '(idle)' ELSE job_id END",
}


@pytest.fixture
def west_of_greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "WEST8:30")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("west_of_greenwich")
@pytest.mark.parametrize("by", ["user,month", "day,gpu", "host,job", "user,day", "gpu,user", "month,host"])
def test_groups_by_two_keys(by: str, database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = by.split(",")
    expected = from_rows(database, " || '|' || ".join(KEYS[key] for key in keys))

    groups = json.loads(reported(database, capsys, "--group-by", by, "--json"))["groups"]
    as_csv = csv_rows(reported(database, capsys, "--group-by", by, "--format", "csv"))
    table = reported(database, capsys, "--group-by", by)

    for rows in (groups, as_csv):
        assert [*rows[0]][:3] == [*keys, "num_jobs"]
        assert {"|".join(row[key] for key in keys) for row in rows} == set(expected)
        assert len(rows) == len(expected)
        for row in rows:
            assert_same(row, expected["|".join(row[key] for key in keys)])
    assert table.splitlines()[1].split()[:2] == keys
    for values in expected.values():
        assert cost_text(values["cost"]) in table
    assert "cost (EUR)" in table


def test_the_terminal_and_the_page_show_the_same(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job_id, values in from_rows(database, "job_id").items():
        if job_id not in {"all-1", "old-1"}:
            continue
        terminal = " ".join(reported(database, capsys, "--job", job_id).split())
        page = reported(database, capsys, "--job", job_id, "--format", "html")
        card = reported(database, capsys, "--job", job_id, "--format", "model-card")

        assert f"  emissions: {values['carbon_g']:.6g}\n" in card
        assert " W assumed for the host" in card
        assert (
            f"{100 * values['estimated_carbon_g'] / values['carbon_g']:.0f} % of the emissions from estimated energy"
            in card
        )
        assert f"{energy_text(values['energy_j'])} measured, {energy_text(values['estimated_j'])} estimated" in terminal
        assert energy_text(values["energy_j"] + values["estimated_j"]) in page
        for text in (terminal, page):
            assert f"arbon emissions: {grams_text(values['carbon_g'])} (including" in text
            assert "assumed for the host, PUE 1.3); location-based, " in text
            assert f"{grams_text(values['estimated_carbon_g'])} of it from estimated energy" in text
            unknown = values["unpriced_energy_j"] / (values["energy_j"] + values["estimated_j"])
            assert f"intensity unknown for {100 * unknown:.0f} % of the energy" in text
            assert cost_text(values["cost"], "EUR") in text
        assert f"cost: {cost_text(values['cost'], 'EUR')} (PUE 1.3)" in terminal
        assert f"at {PRICE} EUR per kWh, PUE 1.3: {cost_text(values['cost'], 'EUR')}." in page


def test_status_and_metrics_of_a_running_job_are_the_same(database: Path) -> None:
    """The daemon shows all energy of a job, not that of its iterations; a status of these jobs as if they still ran."""
    expected = from_rows(database, "job_id")

    uses = RunningEmissions(f"sqlite:///{database}", PUE).read([*JOBS, "unknown-1"])
    fields = {job_id: carbon_figures(uses.get(job_id, NO_ENERGY), None, PUE) for job_id in (*JOBS, "unknown-1")}
    running = [STATUS["jobs"][0] | {"job_id": job_id, "carbon": own} for job_id, own in fields.items()]
    text = metrics_text(STATUS | {"jobs": running, "pue": PUE}).decode()

    for job_id, of_job in expected.items():
        if not job_id:
            continue
        shown = fields[job_id]
        for name, field in (
            *((name, name) for name in ("carbon_g", "estimated_carbon_g", "assumed_host_j")),
            *(("priced_energy_j", "priced_j"), ("unpriced_energy_j", "unpriced_j")),
        ):
            value = of_job[name]
            assert shown[field] == (None if value is None else pytest.approx(value)), (job_id, name)
        for metric, field in (("carbon_grams", "carbon_g"), ("unpriced_joules", "unpriced_j")):
            found = re.findall(rf'^gpuenergyd_job_{metric}{{job_id="{job_id}".*}} (.*)$', text, re.MULTILINE)
            value = shown[field]
            assert [float(number) for number in found] == ([] if value is None else [pytest.approx(value)])
    assert {name for name, value in fields["unknown-1"].items() if value is not None} == {"pue"}
    assert f"\ngpuenergyd_pue_ratio {PUE}\n" in text


def documented_columns(heading: str) -> set[str]:
    """Return the names in the first column of the table below a heading of the page on file formats."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "file-formats.md").read_text(encoding="utf-8")
    section = re.split(r"\n##+ ", text.split(f"# {heading}\n")[1])[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize(
    ("by", "heading"),
    [("job", "Columns by job"), ("user", "Columns by group"), ("gpu", "Columns by group"), ("training", "Trainings")],
)
def test_every_column_is_documented(by: str, heading: str, database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = reported(database, capsys, "--group-by", by, "--format", "csv").splitlines()[0].split(",")
    only_json = {"by_replica", "by_stage", "by_host", "by_gpu", "pipelines"} if by == "training" else set[str]()

    assert documented_columns(heading) - only_json == set(header)


def test_each_change_in_the_table_follows_from_its_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loop got slower by itself: the first baseline is far from what the plan is compared with."""
    database = write_sample_history(tmp_path / "history.sqlite3")
    values = ("gpt-1", 0, 0.344, 100.0, 0.463, 82.0, 9, 9, 0.25, 0.2, 0.3, 0.15, 0.14, 0.16)
    write_records(database, EstimateRecord(*values))

    for line, names in (
        ("iteration time", ("adjusted_baseline_time_s", "iteration_time_s", "slowdown_ratio")),
        ("energy per iteration", ("adjusted_baseline_energy_j", "energy_per_iteration_j", "saving_ratio")),
    ):
        (job,) = json.loads(reported(database, capsys, "--json"))["jobs"]
        table = reported(database, capsys, "--job", "gpt-1")
        before, after, ratio = (job[name] for name in names)
        assert abs(after / before - 1) == pytest.approx(abs(ratio))
        (row,) = [row for row in table.splitlines() if row.strip().startswith(line)]
        *_, shown_before, _, shown_after, _, change, _ = row.split()
        assert float(shown_after) / float(shown_before) - 1 == pytest.approx(float(change) / 100, abs=0.002)
