"""`gpuenergyd report` reads the history without the daemon, with the same figures in every format."""

import csv
import io
import json
import re
from datetime import timedelta
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.report.plugin_groups import plugin_groups
from tests.support.documents import inline_commands
from tests.support.sample_history import START, write_sample_history
from tests.support.stored_history import write_records
from tests.support.training_history import TrainingJob

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(write_sample_history(tmp_path / "history.sqlite3"))


def test_json_contains_the_figures_under_their_names(database: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_table_fits_eighty_columns_and_marks_simulated_jobs(
    database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", "--database", database]) == 0

    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "Simulated GPUs" in out
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
    assert energy_row.split() == ["energy", "per", "iteration", "-", "-", "-", "-"]


def test_a_period_excludes_other_jobs(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--json", "--since", "2026-03-02", "--database", database]) == 0
    later = json.loads(capsys.readouterr().out)
    assert run(["report", "--json", "--until", "2026-03-02T00:00+00:00", "--database", database]) == 0
    earlier = json.loads(capsys.readouterr().out)

    assert later["jobs"] == []
    assert len(earlier["jobs"]) == 1


def test_html_is_written_to_the_given_file(database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"

    assert run(["report", "--format", "html", "--out", str(out), "--database", database]) == 0

    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == ""


def test_an_unwritable_folder_is_one_line(database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "none" / "report.html"

    assert run(["report", "--format", "html", "--out", str(out), "--database", database]) == 2
    assert capsys.readouterr().err.splitlines() == [f"gpuenergyd: cannot write {out}: No such file or directory"]


@pytest.mark.parametrize("by", ["training", "user", "gpu", "day", "tag --tag slurm_job_id"])
def test_groups_are_the_same_in_every_format(by: str, database: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["report", "--group-by", *by.split(), "--price-per-kwh", "0.25", "--database", database]
    assert run([*arguments, "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert run([*arguments, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert run(arguments) == 0
    table = capsys.readouterr().out

    assert [row["group"] for row in rows] == [group["group"] for group in groups]
    assert all(group["cost"] == pytest.approx(group["energy_j"] / 3.6e6 * 0.25) for group in groups)
    assert all(group["group"] in table for group in groups)


@pytest.mark.parametrize("written_as", ["table", "csv", "json"])
def test_a_training_of_which_other_hosts_know_the_rest_is_one_line_on_stderr(
    written_as: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = TrainingJob("gpt-1", START, START + timedelta(minutes=5), tags=(("world_size", "16"),))
    database = write_records(tmp_path / "history.sqlite3", *part.records([1.0, 2.0]))

    assert run(["report", "--group-by", "training", "--format", written_as, "--database", str(database)]) == 0

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpuenergyd: only a part of these trainings is in this history and period: gpt ")
    assert "(2 of 16 ranks)" in line


def test_the_table_of_one_training_has_its_parts_by_replica_stage_and_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.sqlite3"
    end = START + timedelta(minutes=5)
    for dp_rank, host in enumerate(("node-a", "node-b")):
        job = TrainingJob(f"gpt-{dp_rank}", START, end, dp_rank=dp_rank, host=host)
        write_records(path, *job.records([3.6e6, 7.2e6]), host=host)
    other = TrainingJob("other-1", START, end, job_name="other", run_key="other", num_gpus=1)
    arguments = ["report", "--group-by", "training", "--price-per-kwh", "1", "--database", str(path)]

    assert run([*arguments, "--job", "gpt"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    write_records(path, *other.records([1.0]))
    assert run(arguments) == 0
    of_both = capsys.readouterr().out

    for title, names in (("replica", ["0", "1"]), ("stage", ["0", "1"]), ("host", ["node-a", "node-b"])):
        (header,) = (number for number, line in enumerate(lines) if line[0] == title)
        rows = [line for line in lines[header + 1 :] if line[0] in names][:2]
        assert lines[header][:3] == [title, "GPUs", "energy"]
        assert [row[0] for row in rows] == names
        costs = [float(row[-1]) for row in rows]
        assert costs == ([2.0, 4.0] if title == "stage" else [3.0, 3.0])
    assert "replica " not in of_both, "two trainings have one row each"


DOCUMENTED_GROUPINGS = sorted(
    {
        grouping
        for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        if document.name != "CHANGELOG.md"
        for command in inline_commands(document)
        if command.startswith("gpuenergyd report")
        for grouping in re.findall(r"--(?:group-)?by \S+(?: --tag \S+)?", command)
        if grouping.split()[1] not in {"KEY", *plugin_groups()}  # plugins have tables and tests of their own
    }
)


@pytest.mark.parametrize("grouping", DOCUMENTED_GROUPINGS)
def test_every_grouping_in_the_documents_has_groups(
    grouping: str, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", *grouping.split(), "--json", "--database", database]) == 0
    assert json.loads(capsys.readouterr().out)["groups"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group-by", "day", "--format", "html"], "--group-by needs --format table, json or csv"),
        (["--group-by", "training", "--format", "html"], "--group-by needs --format table, json or csv"),
        (["--group-by", "training", "--tag", "user"], "--tag user needs --group-by tag"),
        (
            ["--group-by", "training", "--job", "gpt-1"],
            "--job gpt-1 is one part of a training; --group-by training needs its name: --job gpt",
        ),
        (["--group-by", "training", "--job", "nope"], "no job 'nope' in this period; jobs: gpt"),
        (["--group-by", "gpu", "--job", "gpt"], "cannot be combined with --job"),
        (["--group-by", "moon"], "valid: one of job, training, user, host, gpu, day, month, tag, or two"),
        (["--group-by", "state", "--job", "gpt"], "--group-by state is of whole GPUs"),
        (["--group-by", "state", "--format", "html"], "--group-by needs --format table, json or csv"),
        (["--group-by", "tag"], "needs --tag NAME; tags in this period: git_commit, slurm_job_id, user"),
        (["--group-by", "tag", "--tag", "team"], "no job has a tag 'team'; tags in this period: git_commit"),
        (["--tag", "user"], "needs --group-by tag"),
        (["--price-per-kwh", "1", "--tariff", "x.toml"], "give only one"),
        (["--tariff", "/nowhere/x.toml"], "cannot read the tariff /nowhere/x.toml: No such file"),
        (["--job", "gpt", "--until", "2026-02-01"], "job 'gpt' did not run in this period; it started at 2026-03-01"),
        (["--job", "nope", "--group-by", "user"], "no job 'nope' in this period; jobs: gpt"),
        (["--price-per-kwh", "-1"], "--price-per-kwh"),
        (["--out", "x.txt"], "--out needs --format json, csv, html, trace, spdx or model-card"),
        (["--format", "trace"], "--format trace is of one job: give --job ID"),
        (["--format", "trace", "--job", "gpt", "--group-by", "day"], "--format trace is of one job: give --job ID"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_contradict_each_other_are_usage_errors(
    arguments: list[str], message: str, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", *arguments, "--database", database]) == 2
    assert message in capsys.readouterr().err


def test_csv_names_the_columns_that_join_with_sacct(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--format", "csv", "--database", database]) == 0

    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["slurm_job_id"], row["user"]) == ("4711", "ada")
    assert "slurm_job_id=4711" in row["tags"].split()


def test_a_tariff_of_one_price_costs_what_the_price_costs(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tariff = tmp_path / "tariff.toml"
    tariff.write_text("price_per_kwh = 0.5\n[[periods]]\nprice_per_kwh = 0.25\nfrom_hour = 0\n", encoding="utf-8")
    for by in ("job", "gpu", "training"):
        arguments = ["report", "--json", "--group-by", by, "--database", database]
        assert run([*arguments, "--price-per-kwh", "0.25"]) == 0
        flat = json.loads(capsys.readouterr().out)
        assert run([*arguments, "--tariff", str(tariff)]) == 0
        by_hour = json.loads(capsys.readouterr().out)

        name, rows = next(iter(flat.items()))
        assert [row["cost"] for row in by_hour[name]] == pytest.approx([row["cost"] for row in rows])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("price_per_kwh = -1", "invalid price_per_kwh -1; valid: a number >= 0"),
        ("price = 1", "unknown key 'price'; valid: currency, periods, price_per_kwh"),
        ("price_per_kwh = 1\ncurrency = 'US $'", "currency 'US $': must be 1 to 8 printable characters without spaces"),
        ("price_per_kwh = 1\ncurrency = ''", "currency '': must be 1 to 8 printable characters without spaces"),
        ("price_per_kwh = 1\ncurrency = 978", "currency 978: must be 1 to 8 printable characters without spaces"),
        (
            "price_per_kwh = 1\n[[periods]]\nprice_per_kwh = 1\nto_hour = 25",
            "to_hour 25; valid: two different integers from 0 to 24",
        ),
        (
            "price_per_kwh = 1\n[[periods]]\nprice_per_kwh = 1\nweekdays = ['mo']",
            "invalid weekdays ['mo']; valid: a list of mon, tue",
        ),
        ("=", "is not valid TOML"),
    ],
    ids=["negative", "key", "space", "empty", "number", "hour", "weekday", "toml"],
)
def test_an_invalid_tariff_is_one_line_that_names_the_key(
    text: str, message: str, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tariff = tmp_path / "tariff.toml"
    tariff.write_text(text, encoding="utf-8")

    assert run(["report", "--tariff", str(tariff), "--database", database]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
