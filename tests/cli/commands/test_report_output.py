"""`gpuenergyd report` on empty histories and impossible times prints one line with the right exit code."""

import csv
import io
import json
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.store.records import ControlEventRecord, IterationRecord, JobEndRecord, JobRecord, RollupRecord
from tests.support.sample_history import write_sample_history
from tests.support.stored_history import write_records

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def report(*arguments: str, database: Path) -> CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = run(["report", "--database", str(database), *arguments])
    return CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def job(job_id: str, started_at: datetime) -> JobRecord:
    return JobRecord(job_id, "gpt", "run", 0, "uniform", "1f1b", "torch", True, 1, 8, 0.0, 1000, started_at)


def test_uuids_and_names_stay_in_one_piece_in_a_narrow_terminal(tmp_path: Path) -> None:
    uuid = "GPU-51a00000-0000-4000-8000-000000070000"
    row = RollupRecord(
        3600, uuid, NOON, "gpt-1", 12_345.0, 1.0, 1.0, 1410.0, 1, 67.0, measured_s=10.0, estimated_s=1.0, missing_s=5.0
    )
    database = write_records(tmp_path / "history.sqlite3", row)

    printed = report("--group-by", "gpu", "--price-per-kwh", "100", database=database).stdout

    by_user = report("--group-by", "user", database=write_sample_history(tmp_path / "jobs.sqlite3")).stdout
    assert any(line.split()[:2] == ["root", "1"] for line in by_user.splitlines())
    (line,) = [line for line in printed.splitlines() if uuid in line]
    assert line.split() == [uuid, "1", "12.3", "kJ", "12.3", "kJ", "-", "67.0", "J", "5.000", "s", "0.345"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "no jobs in this period"),
        ("--group-by user", "no jobs in this period"),
        ("--group-by day", "no measurements in this period"),
        ("--group-by gpu", "no measurements in this period"),
        ("--group-by gpu,day", "no measurements in this period"),
        ("--group-by user,day", "no jobs in this period"),
        ("--json", '{"jobs":[]}'),
        ("--group-by day --json", '{"groups":[]}'),
    ],
)
def test_an_empty_history_is_reported_as_empty(arguments: str, expected: str, tmp_path: Path) -> None:
    done = report(*arguments.split(), database=write_records(tmp_path / "history.sqlite3"))

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, expected, "")


def test_an_empty_history_has_an_html_report(tmp_path: Path) -> None:
    done = report("--format", "html", database=write_records(tmp_path / "history.sqlite3"))

    assert done.returncode == 0
    assert "No jobs ran in this time range" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--job nope", "no job 'nope' in this period; jobs: gpt"),
        ("--job nope --json", "no job 'nope' in this period; jobs: gpt"),
        ("--since 1m", "--since '1m': minutes are 1min, months 30d"),
        ("--until 2m", "--until '2m': minutes are 2min, months 60d"),
        (
            "--since 5y",
            "--since '5y': must be a date, a month such as 2026-10, a time such as 2026-11-21T08:00, or an age such as",
        ),
        ("--until 2026-13", "--until '2026-13': must be a date, a month such as 2026-10, a time"),
        (
            "--group-by moon",
            "--group-by 'moon': unknown key 'moon'; valid: one of job, training, user, host, gpu, day,",
        ),
        ("--group-by user,", "--group-by 'user,': unknown key ''; valid: one of job, training, user, host, gpu, day,"),
        ("--group-by user,user", "--group-by 'user,user': the same key twice; valid: one of job, training, user,"),
        (
            "--group-by user,day,gpu",
            "--group-by 'user,day,gpu': more than two keys; valid: one of job, training, user,",
        ),
        ("--group-by gpu,day --job gpt", "--group-by gpu,day counts whole GPUs and cannot be combined with --job"),
        ("--group-by user,tag", "--group-by tag needs --tag NAME; tags in this period: git_commit, slurm_job_id, user"),
        (
            "--pue 0.9",
            "--pue 0.9: must be from 1 to 5, the power of the site as a ratio of its computers'; 1.2 adds 20 %",
        ),
        ("--pue 120", "--pue 120: must be from 1 to 5"),
        ("--pue nan", "--pue nan: must be from 1 to 5"),
        ("--currency EUR", "--currency EUR needs --price-per-kwh; a tariff file has the key currency"),
        ("--price-per-kwh 1 --currency euros/kWh", "--currency 'euros/kWh': must be 1 to 8 printable characters"),
        ("--since 2126-01-01", "--since 2126-01-01T00:00:00+00:00 is in the future"),
        ("--since 2126-01-01 --group-by day --format csv", "--since 2126-01-01T00:00:00+00:00 is in the future"),
        ("--job gpt --since 2026-03-05", "job 'gpt' did not run in this period; it started at 2026-03-01 12:00 UTC"),
        ("--since 2026-03-02 --until 2026-03-01", "--since 2026-03-02T00:00:00+00:00 is not before --until"),
    ],
)
def test_an_unknown_job_and_an_impossible_time_are_usage_errors(arguments: str, expected: str, tmp_path: Path) -> None:
    done = report(*arguments.split(), database=write_sample_history(tmp_path / "history.sqlite3"))

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gpuenergyd: {expected}")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_history_is_one_line_and_a_failure(tmp_path: Path) -> None:
    done = report(database=tmp_path / "none.sqlite3")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"gpuenergyd: no history at {tmp_path / 'none.sqlite3'}\n"


def test_a_clock_set_back_during_a_job_loses_no_energy_and_prints_a_warning(tmp_path: Path) -> None:
    """Ten iterations at noon, then the clock shows eleven: nothing is lost or doubled, no duration is zero."""
    iterations = [
        IterationRecord(
            "j1", k, NOON + timedelta(seconds=k) - timedelta(hours=k >= 10), 1.0, 100.0,
            BASELINE_PLAN_ID, PlanPurpose.BASELINE, is_regular=True,
        )
        for k in range(20)
    ]  # fmt: skip
    rollups = [
        RollupRecord(bucket_s, "GPU-0", at, "j1", 1000.0, 100.0, 100.0, 1410.0, 100, measured_s=10.0)
        for at in (NOON, NOON - timedelta(hours=1))
        for bucket_s in (60, 3600)
    ]
    ended = JobEndRecord("j1", NOON + timedelta(seconds=20) - timedelta(hours=1), "released")
    database = write_records(tmp_path / "history.sqlite3", job("j1", NOON), *iterations, *rollups, ended)

    done = report("--json", database=database)
    within = report("--json", "--since", "2026-03-01T11:30", database=database)
    by_day = report("--json", "--group-by", "day", database=database)

    assert [each.returncode for each in (done, within, by_day)] == [0, 0, 0]
    (found,) = json.loads(done.stdout)["jobs"]
    assert (found["num_iterations"], found["energy_j"], found["duration_s"]) == (20, 2000.0, 20.0)
    assert found["gpu_energy_j"] == 2000.0
    assert done.stderr.startswith("gpuenergyd: warning: the clock was set back while gpt ran")
    (part,) = json.loads(within.stdout)["jobs"]
    assert part["num_iterations"] == 10
    assert [group["energy_j"] for group in json.loads(by_day.stdout)["groups"]] == [2000.0]


def test_records_from_the_future_print_a_warning(tmp_path: Path) -> None:
    later = datetime.now(tz=UTC) + timedelta(days=3)
    event = ControlEventRecord(later, "phase", "core", "j1", None, "began")
    database = write_records(tmp_path / "history.sqlite3", job("j1", later), event)

    done = report("--json", database=database)

    assert done.returncode == 0
    assert len(json.loads(done.stdout)["jobs"]) == 1
    assert done.stderr.startswith(f"gpuenergyd: warning: the newest record, {later:%Y-%m-%d %H:%M} UTC, is later")


@pytest.mark.parametrize(
    ("arguments", "expected_j"),
    [
        ("--since 2026-02", 500.0),
        ("--since 2026-02 --until 2026-03", 200.0),
        ("--until 2026-02", 100.0),
        ("--since 2026-03 --until 2026-04", 300.0),
    ],
)
def test_a_month_is_its_first_instant(arguments: str, expected_j: float, tmp_path: Path) -> None:
    begins = (datetime(2026, 1, 31, 23, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC), datetime(2026, 3, 1, tzinfo=UTC))
    rows = [
        RollupRecord(3600, "GPU-0", at, "", 100.0 * number, 1.0, 1.0, 1410.0, 1, measured_s=60.0)
        for number, at in enumerate(begins, start=1)
    ]
    database = write_records(tmp_path / "history.sqlite3", *rows)

    done = report("--group-by", "gpu", "--json", *arguments.split(), database=database)

    assert [group["energy_j"] for group in json.loads(done.stdout)["groups"]] == [expected_j]


SACCT = """\
JobID|JobIDRaw|JobName|User|Account|State|Elapsed|AllocTRES
4711|4711|train|ada|vision|COMPLETED|01:00:14|billing=16,cpu=16,gres/gpu=4,node=1
4711.batch|4711.batch|batch||vision|COMPLETED|01:00:14|cpu=16,node=1
4711.extern|4711.extern|extern||vision|COMPLETED|01:00:14|billing=16,cpu=16,gres/gpu=4,node=1
4712_3|4715|sweep|bob|speech|RUNNING|00:10:00|billing=4,cpu=4,gres/gpu=1,node=1
"""
"""As `sacct --parsable2 --format=JobID,JobIDRaw,JobName,User,Account,State,Elapsed,AllocTRES` prints it."""


def test_csv_joins_with_sacct_on_the_raw_job_id(tmp_path: Path) -> None:
    """One line of energy per allocation: steps have ids of their own, an array's task is known by its raw id."""
    done = report("--format", "csv", database=write_sample_history(tmp_path / "history.sqlite3"))
    jobs = {row["slurm_job_id"]: row for row in csv.DictReader(io.StringIO(done.stdout))}

    joined = [
        {**slurm, **jobs[slurm["JobIDRaw"]]}
        for slurm in csv.DictReader(io.StringIO(SACCT), delimiter="|")
        if slurm["JobIDRaw"] in jobs
    ]

    assert [(row["JobID"], row["Account"], row["user"]) for row in joined] == [("4711", "vision", "ada")]
    assert float(joined[0]["gpu_energy_j"]) == 2884.0
