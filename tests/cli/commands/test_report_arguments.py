"""`gpuenergyd report` parses common arguments without Typer, with the same result; Typer handles all others."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from gpuenergyd.cli.app import command_line
from gpuenergyd.cli.commands import report as report_module
from gpuenergyd.cli.commands.report_arguments import parse_report_arguments
from gpuenergyd.cli.commands.report_output import ReportRequest
from tests.support.sample_history import write_sample_history

COMMON = [
    "",
    "--json",
    "--since 30d --until 2026-11-21T08:00 --job gpt",
    "--group-by tag --tag slurm_job_id --format csv --out x.csv",
    "--price-per-kwh 0.25 --tariff /etc/tariff.toml --database postgresql://h/db --json",
    "--since 1d --since 2d",
]
LEFT_TO_TYPER = [
    "--help",
    "--nope",
    "extra",
    "--since",
    "--since=1d",
    "--job=",
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


def parse_with_typer(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> ReportRequest:
    requests: list[ReportRequest] = []

    def record(request: ReportRequest) -> int:
        requests.append(request)
        return 0

    monkeypatch.setattr(report_module, "write_report", record)
    command_line(arguments)(arguments, prog_name="gpuenergyd", standalone_mode=False)
    (request,) = requests
    return request


@pytest.mark.parametrize("text", COMMON)
def test_common_arguments_are_parsed_as_typer_parses_them(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["report", *text.split()]

    assert parse_report_arguments(arguments) == parse_with_typer(arguments, monkeypatch)


@pytest.mark.parametrize("text", LEFT_TO_TYPER)
def test_other_arguments_are_left_to_typer(text: str) -> None:
    assert parse_report_arguments(["report", *text.split()]) is None


@pytest.mark.parametrize("arguments", [[], ["status"], ["--version"]])
def test_other_commands_are_left_to_typer(arguments: list[str]) -> None:
    assert parse_report_arguments(arguments) is None


def test_every_option_of_the_command_has_a_fast_path() -> None:
    app = typer.Typer()
    app.command("report")(report_module.report)
    options = {name: option for option in get_command(app).params for name in option.opts}
    values = {"--group-by": "job", "--format": "json", "--price-per-kwh": "1"}
    options.pop("--help", None)

    for name, option in options.items():
        is_flag = getattr(option, "is_flag", False)
        if "completion" not in name:
            arguments = ["report", name, *([] if is_flag else [values.get(name, "x")])]
            assert parse_report_arguments(arguments) is not None, name


def test_a_report_of_an_sqlite_history_loads_neither_sqlalchemy_nor_typer(tmp_path: Path) -> None:
    """Both take longer to load than the report takes to write."""
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

    assert done.stderr.splitlines() == ["[]", "['rich']"]  # tables need Rich and nothing else
