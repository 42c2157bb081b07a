"""Past jobs through a real daemon: who sees, imports and forgets them, and files that are not what they should be."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.cli.output import json_text
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.daemon.jobs.past_jobs import past_job_record
from gpuenergyd.store.reader import epoch_us
from gpuenergyd.store.records import PastJobRecord
from gpuenergyd.wire import MAX_ITERATION_REPORT_BYTES
from gpuenergyd.wire.operator_messages import FILE_FORMAT, PastJobFile
from tests.support.client_process import client_process, daemon_for_everybody, needs_root
from tests.support.daemon_process import DaemonProcess
from tests.support.past_jobs import changed, past_job
from tests.support.waiting import LIMIT_S, wait_until

OTHER_UID = 4321
NUM_LARGE = 270
"""More than one import request may have, by number and by size."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with daemon_for_everybody() as running:
        wait_until(lambda: has_history(running))
        yield running


@pytest.fixture(autouse=True)
def only_own_and_foreign_job(daemon: DaemonProcess) -> None:
    """Let the history hold one past job of this user and one of another."""
    rows = [past_job_record(past_job("own"), os.geteuid()), past_job_record(past_job("foreign"), OTHER_UID)]
    store(daemon, rows)


def has_history(daemon: DaemonProcess) -> bool:
    """Return whether the daemon, which serves before that, has created its history."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{daemon.database_path}?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'models'").fetchone() is not None
    except sqlite3.OperationalError:
        return False


def store(daemon: DaemonProcess, rows: Sequence[PastJobRecord]) -> None:
    """Let the history hold these rows and no others."""
    with sqlite3.connect(daemon.database_path, timeout=LIMIT_S) as connection:
        connection.execute("DELETE FROM models")
        connection.executemany(
            "INSERT INTO models VALUES (?, ?, ?, ?)",
            [(row.signature, row.job_id, epoch_us(row.learned_at), row.model) for row in rows],
        )


def num_imported(daemon: DaemonProcess) -> int:
    """Return the number of stored past jobs of all users."""
    with sqlite3.connect(daemon.database_path, timeout=LIMIT_S) as connection:
        (number,) = connection.execute("SELECT count(*) FROM models WHERE signature LIKE 'past:all:%'").fetchone()
    return int(number)


def large_job(number: int) -> PastJob:
    """Return a past job with as many points as one may have; no two have the same key."""
    return past_job(
        f"large {number}", gpu_model_name=f"GPU {number} \N{GREEK SMALL LETTER MU}", clocks_mhz=range(1400, 1090, -10)
    )


def shown(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    capsys.readouterr()
    assert command(daemon, "--show-prior", "--json", *arguments) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def names(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], *arguments: str) -> set[str]:
    jobs = shown(daemon, capsys, *arguments)["past_jobs"]
    assert isinstance(jobs, list)
    return {job["job_name"] for job in jobs}


def command(daemon: DaemonProcess, *arguments: str) -> int:
    return run(["policies", *arguments, "--socket", str(daemon.socket_path)])


def test_the_prior_and_own_past_jobs_are_shown(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(daemon, capsys)
    assert command(daemon, "--show-prior") == 0
    table = capsys.readouterr().out

    priors = found["priors"]
    assert isinstance(priors, list)
    assert {prior["gpu_model_name"]: prior["num_past_jobs"] for prior in priors}["A100"] == 1
    assert names(daemon, capsys) == {"own"}
    assert names(daemon, capsys, "--all-users") == {"own", "foreign"}
    assert "own" in table
    assert "foreign" not in table


def test_exported_past_jobs_hold_for_all_users_where_they_are_imported_and_can_be_forgotten(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "past-jobs.json"
    assert command(daemon, "--export-prior", str(path)) == 0
    assert str(os.geteuid()) not in {word.strip('":,') for word in path.read_text().split()}
    assert '"uid"' not in path.read_text()
    assert all(job["gpu_uuids"] == [] for job in json.loads(path.read_text())["past_jobs"])
    assert command(daemon, "--forget-prior") == 0
    wait_until(lambda: names(daemon, capsys) == set())
    assert names(daemon, capsys, "--all-users") == {"foreign"}

    assert command(daemon, "--import-prior", str(path)) == 0

    wait_until(lambda: names(daemon, capsys) == {"own"})
    assert command(daemon, "--forget-prior", "--all-users") == 0
    wait_until(lambda: names(daemon, capsys, "--all-users") == set())
    assert command(daemon, "--export-prior", str(tmp_path / "none.json")) == 1
    assert "no past job" in capsys.readouterr().err


def test_an_export_of_more_than_one_request_takes_is_imported_whole(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "past-jobs.json"
    store(daemon, [past_job_record(large_job(number), os.geteuid()) for number in range(NUM_LARGE)])
    assert command(daemon, "--export-prior", str(path)) == 0
    assert path.stat().st_size > MAX_ITERATION_REPORT_BYTES
    store(daemon, [])

    assert command(daemon, "--import-prior", str(path)) == 0

    assert f"{NUM_LARGE} past jobs imported" in capsys.readouterr().out
    wait_until(lambda: num_imported(daemon) == NUM_LARGE)


def test_another_user_sees_own_past_jobs_only_and_may_not_import(daemon: DaemonProcess) -> None:
    needs_root()
    content = json.loads(json_text(PastJobFile(FILE_FORMAT, (past_job("lie"),))))
    with client_process(daemon.socket_path, uid=OTHER_UID, gid=OTHER_UID) as client:
        status, listed = client.ask("GET", "/v1/past-jobs")
        refusals = [
            client.ask("GET", "/v1/past-jobs/all"),
            client.ask("POST", "/v1/past-jobs/import", content),
            client.ask("POST", "/v1/past-jobs/forget", {"is_for_all_users": True}),
        ]

    assert status == 200
    assert [own["job"]["job_name"] for own in listed["past_jobs"]] == ["foreign"]
    for refused, answer in refusals:
        assert refused == 403
        assert "allowed: root of this host" in answer["error"]


GOOD = json.loads(json_text(PastJobFile(FILE_FORMAT, (past_job("good"),))))
BAD_POINT = json.loads(
    json_text(
        PastJobFile(
            FILE_FORMAT, (past_job("a"), changed(past_job("b"), lambda p, _: type(p)(p.sm_clock_mhz, 9.0, 0, 1, 0)))
        )
    )
)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no exported past jobs"),
        (b"\xff\xfe\x00", "no exported past jobs"),
        (b"[" * 100_000, "no exported past jobs"),
        (b" " * 9_000_000, "at most 8388608"),
        (json.dumps({**GOOD, "format": "gpuenergyd past jobs 9"}).encode(), "'gpuenergyd past jobs 1' is valid"),
        (json.dumps({**GOOD, "past_jobs": [{}]}).encode(), "no exported past jobs"),
        (json.dumps(GOOD).replace("0.003", "NaN").encode(), "no exported past jobs"),
        (json.dumps(GOOD).replace("0.003", "1e999").encode(), "time_sigma_ratio"),
        (json.dumps(GOOD).replace('"good"', '"\\u001b[2J"').encode(), "printable"),
        (json.dumps(BAD_POINT).encode(), "past job 2: curve of F: time_ratio 9 at 1320 MHz"),
    ],
)
def test_a_hostile_file_gets_one_line_and_nothing_is_lost(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, reason: str
) -> None:
    path = tmp_path / "hostile.json"
    path.write_bytes(content)

    assert command(daemon, "--import-prior", str(path)) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(path) in error
    assert reason in error
    assert "\x1b" not in error
    assert names(daemon, capsys, "--all-users") == {"own", "foreign"}


def test_an_export_overwrites_no_file_and_needs_a_folder(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    present = tmp_path / "present.json"
    present.write_text("mine")

    for path in (present, tmp_path / "missing" / "file.json"):
        assert command(daemon, "--export-prior", str(path)) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert present.read_text() == "mine"
    assert command(daemon, "--import-prior", str(tmp_path / "missing.json")) == 2


def test_options_that_do_not_go_together_are_refused(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(daemon, "--show-prior", "--forget-prior") == 2
    assert "--show-prior and --forget-prior cannot be combined" in capsys.readouterr().err
    assert command(daemon, "--all-users") == 2
    assert "--all-users needs" in capsys.readouterr().err


def test_without_a_daemon_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", "--show-prior", "--socket", str(tmp_path / "none.sock")]) == 3
    assert capsys.readouterr().err.count("\n") == 1
