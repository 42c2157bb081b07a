"""`gpuenergyd demo` trains, reports and leaves nothing behind, even if it is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

FIGURES = {
    "baseline_iteration_time_s",
    "iteration_time_s",
    "baseline_energy_j",
    "energy_j",
    "saving_ratio",
    "saving_low_ratio",
    "saving_high_ratio",
    "slowdown_ratio",
    "slowdown_low_ratio",
    "slowdown_high_ratio",
    "policy",
    "gpus",
    "simulated",
    "report_path",
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder for temporary files, with a path short enough for sockets, that must be empty afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    yield folder
    left_files, left_processes = list(folder.iterdir()), processes_of(folder)
    shutil.rmtree(folder)

    assert left_files == []
    assert left_processes == []


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of living processes that were given a path in a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """Start the demo with its temporary files in a folder of the test's."""
    return subprocess.Popen(
        [sys.executable, "-m", "gpuenergyd.cli.main", "demo", *arguments],
        env={**os.environ, "TMPDIR": str(folder), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.torch
def test_the_demo_prints_its_figures_on_the_last_line_and_writes_a_report(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    demo = start(
        folder, "--json", "--out", str(out), "--gpus", "2", "--microbatches", "2", "--policy", "uniform",
        "--max-slowdown", "0.2", "--baseline-iterations", "4", "--tuned-iterations", "2",
    )  # fmt: skip

    stdout, stderr = demo.communicate()

    assert demo.returncode == 0, stderr
    figures = json.loads(stdout.splitlines()[-1])
    assert set(figures) == FIGURES
    assert (figures["policy"], figures["gpus"], figures["simulated"]) == ("uniform", 2, True)
    assert figures["report_path"] == str(out)
    assert figures["baseline_energy_j"] > 0
    for name in ("saving", "slowdown"):
        if figures[f"{name}_ratio"] is not None:
            assert figures[f"{name}_low_ratio"] <= figures[f"{name}_ratio"] <= figures[f"{name}_high_ratio"]
    assert out.read_text(encoding="utf-8").count('<svg class="timeline"') == 1
    assert "planned: " in stderr


@pytest.mark.torch
@pytest.mark.kill
@pytest.mark.parametrize(
    ("number", "exit_code", "at", "num_processes"),
    [
        (signal.SIGINT, 130, "baseline: ", 4),  # daemon, worker, launcher and ranks
        (signal.SIGTERM, 143, "training a small GPT: ", 2),  # daemon and worker, the training only just started
    ],
)
def test_an_interrupted_demo_ends_quietly_and_leaves_nothing(
    folder: Path, tmp_path: Path, number: signal.Signals, exit_code: int, at: str, num_processes: int
) -> None:
    demo = start(folder, "--out", str(tmp_path / "report.html"), "--gpus", "2")
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith(at):
            break
    assert len(processes_of(folder)) >= num_processes  # the check below can see them

    demo.send_signal(number)
    _, stderr = demo.communicate()

    assert (demo.returncode, stderr) == (exit_code, "")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.torch
@pytest.mark.kill
def test_a_killed_demo_leaves_neither_process_nor_folder(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    demo = start(folder, "--out", str(tmp_path / "report.html"), "--gpus", "2")
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("baseline: "):
            break
    num_running = len(processes_of(folder))

    demo.kill()
    demo.communicate()

    wait_until(lambda: processes_of(folder) == [], timeout_s=60.0)
    left_files = list(folder.iterdir())
    assert num_running >= 4
    assert left_files == []
    shutil.rmtree(folder)


def test_a_training_that_fails_is_one_line_with_the_end_of_its_log(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('this torch is broken')")
    demo = start(folder, "--out", str(tmp_path / "report.html"), PYTHONPATH=str(tmp_path))

    _, stderr = demo.communicate()

    assert demo.returncode == 1
    assert "ImportError: this torch is broken" in stderr
    assert stderr.splitlines()[-1] == ("gpuenergyd: training failed with exit code 1; see the end of its log above")


@pytest.mark.torch
def test_a_policy_without_a_plan_is_an_error(folder: Path, tmp_path: Path) -> None:
    demo = start(
        folder, "--out", str(tmp_path / "report.html"), "--gpus", "2", "--microbatches", "2", "--policy", "full-speed",
        "--baseline-iterations", "2", "--tuned-iterations", "1",
    )  # fmt: skip

    _, stderr = demo.communicate()

    assert demo.returncode == 1
    assert stderr.startswith("gpuenergyd: policy 'full-speed' made no plan: ")
