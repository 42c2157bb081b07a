"""`gpuenergyd report` reads the history with the daemon stopped, and says the same in every format."""

import csv
import io
import json
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.store import HistoryWriter
from tests.support.sample_history import write_sample_history


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(write_sample_history(tmp_path / "history.sqlite3"))


def test_json_holds_the_figures_under_their_names(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--json", "--database", database]) == 0

    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert job["job_name"] == "gpt"
    assert job["is_simulated"] is True
    assert (job["num_baseline_iterations"], job["num_tuned_iterations"]) == (10, 12)
    assert job["saving_ratio"] == pytest.approx(0.18, abs=0.02)
    assert job["saving_low_ratio"] < job["saving_ratio"] < job["saving_high_ratio"]
    assert job["saved_energy_j"] == pytest.approx(job["saving_ratio"] * job["baseline_energy_j"] * 12)


def test_csv_and_json_agree(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["report", "--json", "--database", database])
    (expected,) = json.loads(capsys.readouterr().out)["jobs"]

    assert run(["report", "--format", "csv", "--database", database]) == 0

    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert list(row) == list(expected)
    assert float(row["energy_j"]) == expected["energy_j"]
    assert row["gpu_uuids"] == "GPU-0 GPU-1 GPU-2 GPU-3"


def test_the_table_fits_eighty_columns_and_says_what_was_simulated(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", "--database", database]) == 0

    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "simulated" in out
    assert "-18." in out


def test_what_was_not_measured_is_missing_and_never_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = str(write_sample_history(tmp_path / "history.sqlite3", is_measured=False))
    assert run(["report", "--json", "--database", database]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert run(["report", "--database", database]) == 0
    table = capsys.readouterr().out

    assert job["energy_j"] is job["saving_ratio"] is job["profiling_cost_j"] is job["saving_low_ratio"] is None
    assert job["slowdown_ratio"] is not None
    energy_row = next(line for line in table.splitlines() if "energy per iteration" in line)
    assert energy_row.split() == ["energy", "per", "iteration", "-", "-", "-"]


def test_an_unknown_job_names_the_known_ones(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--job", "nope", "--database", database]) == 2
    assert capsys.readouterr().err == "gpuenergyd: no job 'nope' in that time; known: gpt\n"


def test_an_empty_history_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.sqlite3"
    writer = HistoryWriter(path)
    writer.start()
    writer.close()

    assert run(["report", "--database", str(path)]) == 0
    assert capsys.readouterr().out == "no job ran in that time\n"


def test_a_span_of_time_leaves_other_jobs_out(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--json", "--since", "2026-03-02", "--database", database]) == 0
    later = json.loads(capsys.readouterr().out)
    assert run(["report", "--json", "--until", "2026-03-02T00:00+00:00", "--database", database]) == 0
    earlier = json.loads(capsys.readouterr().out)

    assert later["jobs"] == []
    assert len(earlier["jobs"]) == 1


def test_html_is_written_where_asked(database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"

    assert run(["report", "--format", "html", "--out", str(out), "--database", database]) == 0

    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == ""


def test_a_folder_that_cannot_be_written_is_one_line(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "none" / "report.html"

    assert run(["report", "--format", "html", "--out", str(out), "--database", database]) == 2
    assert capsys.readouterr().err.splitlines() == [f"gpuenergyd: cannot write {out}: No such file or directory"]


@pytest.mark.parametrize("by", ["user", "gpu", "day"])
def test_groups_are_the_same_in_every_format(by: str, database: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["report", "--group-by", by, "--price-per-kwh", "0.25", "--database", database]
    assert run([*arguments, "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert run([*arguments, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert run(arguments) == 0
    table = capsys.readouterr().out

    assert [row["group"] for row in rows] == [group["group"] for group in groups]
    assert all(group["cost"] == pytest.approx(group["energy_j"] / 3.6e6 * 0.25) for group in groups)
    assert all(group["group"] in table for group in groups)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--group-by", "day", "--format", "html"], "--group-by with table, json or csv"),
        (["--group-by", "gpu", "--job", "gpt"], "it takes no --job"),
        (["--group-by", "moon"], "'job', 'user', 'gpu', 'day'"),
        (["--price-per-kwh", "-1"], "--price-per-kwh"),
        (["--out", "x.txt"], "--out needs --format json, csv or html"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_contradict_each_other_are_usage_errors(
    arguments: list[str], says: str, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", *arguments, "--database", database]) == 2
    assert says in capsys.readouterr().err
