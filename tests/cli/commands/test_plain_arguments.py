"""A report's plain arguments are read without Typer, exactly as Typer reads them; whatever is not plain is Typer's."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from gpuenergyd.cli.app import command_line
from gpuenergyd.cli.commands import report as report_module
from gpuenergyd.cli.commands.plain_arguments import plain_report
from gpuenergyd.cli.commands.report_output import ReportRequest
from tests.support.sample_history import write_sample_history

PLAIN = [
    "",
    "--json",
    "--since 30d --until 2026-11-21T08:00 --job gpt",
    "--group-by=tag --tag slurm_job_id --format csv --out x.csv",
    "--price-per-kwh 0.25 --tariff=/etc/tariff.toml --database postgresql://h/db --json",
    "--job= --since 1d --since 2d",
]
NOT_PLAIN = [
    "--help",
    "--nope",
    "extra",
    "--since",
    "--job --json",
    "--json=1",
    "--group-by moon",
    "--format=pdf",
    "--price-per-kwh -1",
    "--price-per-kwh nan",
    "--price-per-kwh dear",
    "--",
    "-h",
]


def typer_reads(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> ReportRequest:
    seen: list[ReportRequest] = []

    def note(request: ReportRequest) -> int:
        seen.append(request)
        return 0

    monkeypatch.setattr(report_module, "write_report", note)
    command_line(arguments)(arguments, prog_name="gpuenergyd", standalone_mode=False)
    (request,) = seen
    return request


@pytest.mark.parametrize("text", PLAIN)
def test_plain_arguments_mean_what_typer_takes_them_for(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["report", *text.split()]

    assert plain_report(arguments) == typer_reads(arguments, monkeypatch)


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_whatever_is_not_plain_is_left_to_typer(text: str) -> None:
    assert plain_report(["report", *text.split()]) is None


@pytest.mark.parametrize("arguments", [[], ["status"], ["--version"]])
def test_no_other_command_is_taken(arguments: list[str]) -> None:
    assert plain_report(arguments) is None


def test_every_option_of_the_command_is_read_plainly() -> None:
    app = typer.Typer()
    app.command("report")(report_module.report)
    options = {name: option for option in get_command(app).params for name in option.opts}
    values = {"--group-by": "job", "--format": "json", "--price-per-kwh": "1"}
    options.pop("--help", None)

    for name, option in options.items():
        is_flag = getattr(option, "is_flag", False)
        if "completion" not in name:
            assert plain_report(["report", name, *([] if is_flag else [values.get(name, "x")])]) is not None, name


def test_a_report_of_an_sqlite_history_loads_neither_sqlalchemy_nor_typer(tmp_path: Path) -> None:
    """They take longer to load than the report to write: half a second from a cold start would be lost to them."""
    database = str(write_sample_history(tmp_path / "history.sqlite3"))
    code = (
        "import sys\nfrom gpuenergyd.cli.main import run\n"
        "assert [run(['report', '--database', sys.argv[1], *words.split()]) for words in "
        "('--json', '--group-by day --json', '--format csv')] == [0, 0, 0]\n"
        "heavy = {'sqlalchemy', 'typer', 'pydantic', 'rich', 'jinja2', 'asyncio', 'numpy', 'alembic'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
        "run(['report', '--database', sys.argv[1], '--group-by', 'day'])\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", code, database], capture_output=True, text=True, check=True)

    assert done.stderr.splitlines() == ["[]", "['rich']"]  # a table is drawn by Rich, and by nothing else
