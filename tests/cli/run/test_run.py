"""`gpuenergyd run` replaces itself with the program, with the options in its environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.manual.command_tree import described_commands
from gpuenergyd.cli.app import command_line
from gpuenergyd.cli.main import run
from gpuenergyd.cli.run import command as run_module
from gpuenergyd.cli.run.arguments import RUN_OPTIONS, RunRequest, parse_run_arguments, run_help
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon
from tests.support.waiting import LIMIT_S

SHOWS_ENVIRONMENT = (
    "import os; print(*(os.environ.get(n) for n in ('GPUENERGYD_JOB', 'GPUENERGYD_JOB_POLICY',"
    " 'GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO', 'GPUENERGYD_SOCKET')))"
)


def gpuenergyd_run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")}
    command = [sys.executable, "-m", "gpuenergyd.cli.main", "run", *arguments]
    return subprocess.run(command, env=kept | variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_the_program_runs_with_its_arguments_and_exit_code_and_the_options_in_its_environment(tmp_path: Path) -> None:
    there = tmp_path / "there.sock"
    there.touch()
    options = ["--job", "gpt", "--policy", "uniform", "--max-slowdown", "0.05", "--socket", str(there)]
    program = SHOWS_ENVIRONMENT + "; import sys; print(sys.argv[1:]); sys.exit(7)"

    done = gpuenergyd_run(*options, "--", sys.executable, "-c", program, "--job", "its own")

    assert done.stdout.splitlines() == [f"gpt uniform 0.05 {there}", "['--job', 'its own']"]
    assert done.returncode == 7
    assert done.stderr == (
        f"gpuenergyd: nothing joined the daemon at {there}, so clocks stayed as they were: no process of the"
        " program ran a training step, of an optimizer of torch or of a supported framework; other loops join with"
        " gpuenergyd.job\n"
    )


JOINS = """
import os, gpuenergyd
with gpuenergyd.job() as job:
    with job.iteration():
        pass
"""


STARTS_RANKS = f"""
import os, subprocess, sys
for rank, program in enumerate([{JOINS!r}, *["import torch"] * int(sys.argv[1])]):
    subprocess.run([sys.executable, "-c", program], env=os.environ | dict(RANK=str(rank), WORLD_SIZE="3"), check=True)
"""
WITHOUT_STEPS = (
    "gpuenergyd: rank 1 took no step of an optimizer, so it did not join, and its GPU ran at full speed; this is said"
    " once for all such ranks"
)


@pytest.mark.parametrize(
    ("command", "more"),
    [(["-c", JOINS], []), (["-c", STARTS_RANKS, "0"], []), (["-c", STARTS_RANKS, "2"], [WITHOUT_STEPS])],
)
def test_a_process_of_the_program_or_its_child_joins_with_one_line(
    command: list[str], more: list[str], tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    with FakeDaemon(tmp_path) as daemon:
        done = gpuenergyd_run(
            *("--job", "gpt", "--socket", daemon.socket_path, "--", sys.executable, *command),
            GPUENERGYD_GPU_UUID="GPU-1",
            TMPDIR=str(marks),
        )
        registration = daemon.registrations.get(timeout=WAIT_LIMIT_S)

    assert registration["job_name"] == "gpt"
    assert done.stderr.splitlines() == [f"gpuenergyd: job gpt (job-1) joined the daemon at {daemon.socket_path}", *more]
    assert list(marks.iterdir()) == []


@pytest.mark.parametrize("name", ["nobody.sock", 99 * "long"])
def test_without_a_daemon_the_program_runs_and_one_warning_is_printed(name: str, tmp_path: Path) -> None:
    there = tmp_path / name
    done = gpuenergyd_run("--socket", str(there), "--", "echo", "trained")

    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr == f"gpuenergyd: no daemon socket at {there} yet; starting echo\n"


WAITS_AND_JOINS = f"""
print("waiting", flush=True)
input()
{JOINS}
"""


def test_a_program_that_joins_later_is_not_announced_as_one_without_a_daemon(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")}
    daemon = FakeDaemon(tmp_path)
    program = [sys.executable, "-c", WAITS_AND_JOINS]
    command = [sys.executable, "-m", "gpuenergyd.cli.main", "run", "--job", "gpt", "--socket", daemon.socket_path]
    with subprocess.Popen(
        [*command, "--", *program],
        env={**kept, "GPUENERGYD_GPU_UUID": "GPU-1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        with daemon:
            _, printed = process.communicate("\n", timeout=LIMIT_S)
            daemon.registrations.get(timeout=WAIT_LIMIT_S)

    assert printed.splitlines() == [
        f"gpuenergyd: no daemon socket at {daemon.socket_path} yet; starting {sys.executable}",
        f"gpuenergyd: job gpt (job-1) joined the daemon at {daemon.socket_path}",
    ]


def test_a_program_whose_gpu_is_unknown_says_so_once(tmp_path: Path) -> None:
    program = JOINS.replace("    with", "    for _ in range(4):\n     with").replace("        pass", "         pass")
    with FakeDaemon(tmp_path) as daemon:
        done = gpuenergyd_run("--job", "gpt", "--socket", daemon.socket_path, "--", sys.executable, "-c", program)

    assert done.stderr == (
        "gpuenergyd: job gpt, rank 0: no GPU UUID (no gpu_uuid argument, GPUENERGYD_GPU_UUID not set, CUDA not in use"
        " by this process); training continues unmanaged\n"
    )


def test_a_missing_program_is_one_line_and_a_usage_error(tmp_path: Path) -> None:
    there = tmp_path / "there.sock"
    there.touch()

    done = gpuenergyd_run("--socket", str(there), "--", "no-such-program")

    assert done.returncode == 2
    assert done.stderr == "gpuenergyd: cannot run 'no-such-program': No such file or directory\n"


def test_length_and_deadline_are_passed_in_utc_and_an_invalid_deadline_is_an_error() -> None:
    shows = "import os; print(*(os.environ.get('GPUENERGYD_JOB_' + n) for n in ('ITERATIONS', 'HOURS', 'DEADLINE')))"
    options = ["--iterations", "500", "--hours", "2.5", "--deadline", "2030-01-31T10:00+02:00"]

    done = gpuenergyd_run(*options, "--", sys.executable, "-c", shows)
    wrong = gpuenergyd_run("--deadline", "tomorrow", "--", sys.executable, "-c", shows)

    assert done.stdout == "500 2.5 2030-01-31T08:00:00+00:00\n"
    assert wrong.returncode == 2
    assert "--deadline 'tomorrow'" in wrong.stderr


def test_permission_for_other_orders_is_a_variable_of_the_program() -> None:
    shows = "import os; print(os.environ.get('GPUENERGYD_JOB_ALLOW_REORDER'))"

    assert gpuenergyd_run("--allow-reorder", "--", sys.executable, "-c", shows).stdout == "1\n"
    assert gpuenergyd_run("--job", "gpt", "--", sys.executable, "-c", shows).stdout == "None\n"


def test_the_program_and_its_options_need_no_separator(tmp_path: Path) -> None:
    program = "import sys; print(sys.argv[1:])"
    socket = str(tmp_path / "nobody.sock")

    done = gpuenergyd_run(
        "--socket", socket, sys.executable, "-c", program, "--epochs", "3", "--job", "its own", "-h", "--"
    )

    assert (done.returncode, done.stdout) == (0, "['--epochs', '3', '--job', 'its own', '-h', '--']\n")


ACCEPTED = [
    "train.py",
    "--job gpt python3 train.py --job other",
    "--job=gpt --policy uniform -- torchrun --nproc-per-node 4 train.py -- -h",
    "--max-slowdown 0.05 --iterations 500 --hours 2.5 --deadline 2030-01-31T10:00+02:00 --socket /run/x.sock true",
    "--job first --job second true",
    "--allow-reorder --job gpt true --allow-reorder",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_arguments_are_parsed_as_typer_parses_them(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[RunRequest] = []

    def record(request: RunRequest) -> int:
        requests.append(request)
        return 0

    monkeypatch.setattr(run_module, "run_program", record)
    command_line()(["run", *text.split()], prog_name="gpuenergyd", standalone_mode=False)

    assert [parse_run_arguments(text.split())] == requests


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--nope train.py", "no such option: --nope; see 'gpuenergyd run --help'"),
        ("--allow-reorder=yes true", "--allow-reorder takes no value; see 'gpuenergyd run --help'"),
        ("--job", "--job needs a value; see 'gpuenergyd run --help'"),
        ("", "no program to run; see 'gpuenergyd run --help'"),
        ("--job gpt --", "no program to run; see 'gpuenergyd run --help'"),
        ("--iterations 0 true", "--iterations '0': must be a whole number of at least 1"),
        ("--iterations 1.5 true", "--iterations '1.5': must be a whole number of at least 1"),
        ("--hours nan true", "--hours 'nan': must be a number greater than 0"),
        ("--max-slowdown five true", "--max-slowdown 'five': must be a ratio from 0 to 1, e.g. 0.05 for 5 %"),
    ],
)
def test_invalid_arguments_are_one_line_and_a_usage_error(
    text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", *text.split()]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"gpuenergyd: {expected}\n")


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_the_help_lists_every_option_with_the_text_of_the_manual_page(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    (described,) = (command for command in described_commands() if command.name == "gpuenergyd run")

    text = run_help()

    words = " ".join(text.split())
    assert all(f"{option.usage} {option.text}" in words for option in (*described.arguments, *described.options))
    assert all(f"\n  {example}\n" in text for example in described.examples)
    assert f"{described.summary} {described.description}" in words
    assert len(described.options) == len(RUN_OPTIONS) + 1  # and --help
    rows = text.partition("\nExamples:")[0].splitlines()
    assert max(map(len, rows)) <= max(min(int(columns), 80) - 2, 50)
