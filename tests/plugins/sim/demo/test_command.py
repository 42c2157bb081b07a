"""`gpuenergyd demo` trains, reports and leaves nothing behind, even if it is killed."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.core.job.result_text import NOT_SIGNIFICANT, saving_span_text, saving_text, slowdown_text
from gpuenergyd.report.job import job_reports
from gpuenergyd.store import open_history
from gpuenergyd_policies.planning.compiled import IS_COMPILED
from tests.report.test_quantities import assert_same, csv_rows, from_rows, reported
from tests.support.installed_distribution import install_distribution
from tests.support.thorough import thorough
from tests.support.waiting import wait_until

SHORT = (
    "--gpus", "2", "--microbatches", "2", "--policy", "uniform", "--max-slowdown", "0.2", "--baseline-iterations", "4",
    "--tuned-iterations", "40",
)  # fmt: skip

FIGURES = {
    "baseline_iteration_time_s", "iteration_time_s", "baseline_energy_j", "energy_j", "saving_ratio",
    "saving_low_ratio", "saving_high_ratio", "slowdown_ratio", "slowdown_low_ratio", "slowdown_high_ratio", "policy",
    "gpus", "simulated", "simulation", "is_virtual_time", "report_path",
}  # fmt: skip


@contextmanager
def demo_folder() -> Iterator[Path]:
    """Yield a folder for temporary files, with a path short enough for sockets, that must be empty afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    yield folder
    left_files, left_processes = list(folder.iterdir()), processes_of(folder)
    shutil.rmtree(folder)

    assert left_files == []
    assert left_processes == []


@pytest.fixture
def folder() -> Iterator[Path]:
    with demo_folder() as made:
        yield made


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


def start(folder: Path, *arguments: str, python: str = sys.executable, **variables: str) -> subprocess.Popen[str]:
    """Start the demo with its temporary files in a folder of the test's."""
    return subprocess.Popen(
        [python, "-m", "gpuenergyd.cli.main", "demo", *arguments],
        env={**os.environ, "TMPDIR": str(folder), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def started_until(beginning: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the demo and wait for a line that begins so."""
    demo = start(folder, *arguments)
    assert demo.stdout is not None
    next(line for line in demo.stdout if line.startswith(beginning))
    return demo


@dataclass(frozen=True, slots=True)
class FinishedDemo:
    """A demo that was held and has ended: output, lines of progress, report, the daemon's job."""

    exit_code: int
    stdout: str
    texts: list[str]
    report_path: Path
    status: dict[str, Any]
    """Of the daemon, while the demo was held."""
    is_virtual: bool
    database: Path
    """A copy of its history, made while it was held."""

    @property
    def job(self) -> dict[str, Any]:
        (job,) = self.status["ended_jobs"]
        return dict(job)


@pytest.fixture(scope="module", params=["virtual", *thorough("real")])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FinishedDemo:
    """Run a demo once for all tests that look at its result."""
    options = ("--real-time",) if request.param == "real" else ()
    return held_demo(tmp_path_factory.mktemp("demo"), *SHORT, *options)


def held_demo(results: Path, *arguments: str) -> FinishedDemo:
    """Run a demo, look at it while it is held, and end it; report and history are put into a folder."""
    report_path, database = results / "report.html", results / "history.sqlite3"
    with (
        demo_folder() as folder,
        start(folder, "--hold", "--json", "--out", str(report_path), *arguments, PYTHONUNBUFFERED="1") as demo,
    ):
        assert demo.stdin is not None
        assert demo.stdout is not None
        assert demo.stderr is not None
        texts, status = [], {}
        for line in demo.stderr:
            texts.append(line.rstrip())
            if "press Enter" in line:
                assert report_path.exists()  # the result comes before the daemon is held
                client = DaemonClient(str(next(folder.rglob("gpuenergyd.sock"))))
                status = client.get_status()
                client.close()
                with closing(sqlite3.connect(next(folder.rglob("history.sqlite3")))) as history:
                    history.execute("VACUUM INTO ?", (str(database),))
                demo.stdin.write("\n")
                demo.stdin.close()
        stdout = demo.stdout.read()
    return FinishedDemo(demo.returncode, stdout, texts, report_path, status, "--real-time" not in arguments, database)


@pytest.mark.torch
def test_the_demo_prints_its_figures_on_the_last_line_and_writes_a_report(finished: FinishedDemo) -> None:
    assert finished.exit_code == 0, finished.texts
    (line,) = finished.stdout.splitlines()
    figures = json.loads(line)
    assert set(figures) == FIGURES
    assert (figures["policy"], figures["gpus"], figures["simulated"]) == ("uniform", 2, True)
    assert figures["is_virtual_time"] is finished.is_virtual
    assert figures["report_path"] == str(finished.report_path)
    assert figures["baseline_energy_j"] > 0
    assert figures["saving_low_ratio"] <= figures["saving_ratio"] <= figures["saving_high_ratio"]
    assert figures["slowdown_low_ratio"] <= figures["slowdown_ratio"] <= figures["slowdown_high_ratio"]
    report = finished.report_path.read_text(encoding="utf-8")
    assert report.count('<svg class="timeline"') == 2  # for desktops and for phones
    interval = saving_span_text((figures["saving_low_ratio"], figures["saving_high_ratio"]))
    is_significant = finished.is_virtual or figures["saving_low_ratio"] > 0  # in real time, the host's load decides
    sentence = (
        "gpuenergyd trained this pipeline on 2 simulated a100-sxm GPUs (late clocks, slow reads, stalls) with"
        f" {saving_text(figures['saving_ratio']) if is_significant else NOT_SIGNIFICANT} per iteration"
        f" (95 % confidence interval: {interval}), {slowdown_text(figures['slowdown_ratio'])} than at full speed."
    )
    assert any(text.startswith(sentence) for text in finished.texts)


@pytest.mark.torch
def test_a_held_demo_answers_with_the_figures_that_its_report_has(finished: FinishedDemo) -> None:
    figures, ended = json.loads(finished.stdout), finished.job

    assert (figures["saving_ratio"], figures["slowdown_ratio"]) == (ended["saving_ratio"], ended["slowdown_ratio"])
    assert [figures["saving_low_ratio"], figures["saving_high_ratio"]] == ended["saving_interval"]
    assert (figures["baseline_energy_j"], figures["energy_j"]) == (ended["baseline_energy_j"], ended["energy_j"])


@pytest.mark.torch
def test_reports_of_the_demo_follow_from_its_rows(finished: FinishedDemo, capsys: pytest.CaptureFixture[str]) -> None:
    expected, job_id = from_rows(finished.database, "job_id"), finished.job["job_id"]
    with closing(sqlite3.connect(finished.database)) as history:
        (within_j,) = history.execute("SELECT sum(energy_j) FROM iterations").fetchone()

    for (row,) in (
        json.loads(reported(finished.database, capsys, "--json"))["jobs"],
        csv_rows(reported(finished.database, capsys, "--format", "csv")),
    ):
        assert_same(row, expected[job_id], prefix="gpu_")
        assert float(row["iterations_energy_j"]) == pytest.approx(within_j)


@pytest.mark.torch
def test_the_demo_shows_its_steps_in_order(finished: FinishedDemo) -> None:
    texts = finished.texts

    if texts[0] == "gpuenergyd demo: starting":  # printed where importing the demo takes long
        texts = texts[1:]
    assert (
        texts[0]
        == "gpuenergyd demo on 2 simulated a100-sxm GPUs (late clocks, slow reads, stalls): starting a private daemon"
    )
    steps = ["importing torch", "baseline: ", "trials: ", "tuned (", "stopping the training", "writing the report"]
    found = [next((i for i, text in enumerate(texts) if step in text), -1) for step in steps]
    assert -1 not in found
    assert found == sorted(found)


@pytest.mark.torch
@pytest.mark.kill
@pytest.mark.parametrize(
    ("number", "exit_code", "at", "num_processes", "options"),
    [
        # Daemon, worker, launcher and ranks.
        pytest.param(signal.SIGINT, 130, "baseline: ", 4, ("--real-time",), marks=pytest.mark.thorough),
        pytest.param(  # daemon and worker
            signal.SIGTERM, 143, "training a small GPT: ", 2, ("--real-time",), marks=pytest.mark.thorough
        ),
        (signal.SIGINT, 130, "baseline: ", 1, ()),  # all in one process
    ],
)
def test_an_interrupted_demo_ends_quietly_and_leaves_nothing(
    folder: Path,
    tmp_path: Path,
    number: signal.Signals,
    exit_code: int,
    at: str,
    num_processes: int,
    options: tuple[str, ...],
) -> None:
    demo = started_until(at, folder, "--out", str(tmp_path / "report.html"), *SHORT, *options)
    assert len(processes_of(folder)) >= num_processes  # the check below can see them

    demo.send_signal(number)
    _, stderr = demo.communicate()

    assert (demo.returncode, stderr) == (exit_code, "")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.torch
@pytest.mark.kill
@pytest.mark.parametrize(
    ("at", "num_processes", "options"),
    [
        ("baseline: ", 1, ()),
        *thorough(("training a small GPT: ", 2, ("--real-time",)), ("baseline: ", 4, ("--real-time",))),
    ],
)
def test_a_killed_demo_leaves_neither_process_nor_folder(
    folder: Path, tmp_path: Path, at: str, num_processes: int, options: tuple[str, ...]
) -> None:
    demo = started_until(at, folder, "--out", str(tmp_path / "report.html"), *SHORT, *options)
    num_running = len(processes_of(folder))

    demo.kill()
    demo.communicate()

    wait_until(lambda: processes_of(folder) == [], timeout_s=60.0)
    assert num_running >= num_processes


@pytest.mark.parametrize(("options", "name"), [((), "demo"), *thorough((("--real-time",), "training"))])
def test_a_training_that_fails_is_one_line_with_the_end_of_its_log(
    folder: Path, tmp_path: Path, options: tuple[str, ...], name: str
) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('this torch is broken')")
    demo = start(folder, "--out", str(tmp_path / "report.html"), *SHORT, *options, PYTHONPATH=str(tmp_path))

    _, stderr = demo.communicate()

    assert demo.returncode == 1
    assert "ImportError: this torch is broken" in stderr
    assert stderr.splitlines()[-1] == (f"gpuenergyd: {name} failed with exit code 1; see the end of its log above")


@pytest.mark.torch
@pytest.mark.thorough
@pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed or is disabled")
def test_a_demo_that_compiles_the_planner_says_so_and_has_the_same_figures_as_one_that_does_not(
    folder: Path, tmp_path: Path
) -> None:
    def run_once() -> tuple[Any, str]:
        arguments = ("--json", "--out", str(tmp_path / "report.html"), *SHORT, "--policy", "bubble-aware")
        stdout, stderr = start(folder, *arguments, NUMBA_CACHE_DIR=str(tmp_path / "kernels")).communicate()
        return json.loads(stdout), stderr

    (compiled, first_output), (loaded, second_output) = run_once(), run_once()

    assert "compiling the planner, once" in first_output
    assert "compiling the planner" not in second_output
    assert compiled["saving_ratio"] is not None
    assert compiled == loaded


@pytest.mark.thorough
@pytest.mark.torch
@pytest.mark.kill
def test_a_worker_that_is_killed_in_virtual_time_leaves_no_clock_lock(folder: Path, tmp_path: Path) -> None:
    demo = start(folder, "--kill-worker-after-s", "5", "--out", str(tmp_path / "report.html"), *SHORT)

    stdout, stderr = demo.communicate()

    assert (demo.returncode, stderr) == (0, "")
    found = re.search(r"killed the GPU worker while (\d) GPUs? had a clock lock; none had one \d\.\d\d s later", stdout)
    assert found is not None
    assert int(found[1]) >= 1
    assert "full speed again" in stdout


@pytest.mark.torch
@pytest.mark.thorough
def test_busy_processors_change_no_figure_of_the_demo(folder: Path, tmp_path: Path) -> None:
    def figures() -> Any:
        stdout, _ = start(folder, "--json", "--out", str(tmp_path / "report.html")).communicate()
        return json.loads(stdout)

    quiet = figures()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(12)]
    try:
        loaded = figures()
    finally:
        for process in busy:
            process.kill()
            process.wait()

    assert quiet == loaded
    assert quiet["saving_ratio"] >= 0.12
    assert quiet["slowdown_ratio"] <= 0.01


CRASHING = """
from gpuenergyd.core.pipeline.plan import ClockPlan

class Crashing:
    def next_plan(self, view):
        return self.plan_for(view)

    def plan_for(self, view):
        raise ValueError("no clock for this job")
"""


@dataclass(frozen=True)
class FaultyPlugins:
    """An environment with one policy that crashes and one that cannot be imported."""

    python: str
    folder: Path


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> FaultyPlugins:
    environment = tmp_path_factory.mktemp("faulty")
    venv.create(environment, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))
    ours = [path for path in sys.path if Path(path).is_dir() and not path.startswith(sys.base_prefix)]
    (packages / "ours.pth").write_text("\n".join([sysconfig.get_path("purelib"), *ours]) + "\n", encoding="utf-8")
    (packages / "crashing.py").write_text(CRASHING, encoding="utf-8")
    (packages / "unimportable.py").write_text("import no_such_module", encoding="utf-8")
    policies = {"crashing": "crashing:Crashing", "unimportable": "unimportable:Policy"}
    install_distribution(packages, "faulty", "gpuenergyd.policies", policies)
    return FaultyPlugins(str(environment / "bin" / "python"), packages)


@pytest.mark.thorough
@pytest.mark.torch
def test_a_policy_that_crashes_is_the_reason_for_no_saving_with_its_exception_file_and_line(
    folder: Path, tmp_path: Path, plugins: FaultyPlugins
) -> None:
    demo = start(
        folder, "--out", str(tmp_path / "report.html"), "--gpus", "2", "--microbatches", "2", "--policy", "crashing",
        "--baseline-iterations", "2", python=plugins.python,
    )  # fmt: skip

    stdout, stderr = demo.communicate()

    assert (demo.returncode, stderr) == (0, "")
    assert (
        "without a measured saving: policy 'crashing' failed: ValueError: no clock for this job"
        f" ({plugins.folder / 'crashing.py'}:9)."
    ) in stdout.splitlines()[-1]


def test_a_policy_that_cannot_be_imported_is_refused(folder: Path, tmp_path: Path, plugins: FaultyPlugins) -> None:
    demo = start(folder, "--out", str(tmp_path / "report.html"), "--policy", "unimportable", python=plugins.python)

    stdout, stderr = demo.communicate()

    assert demo.returncode == 2
    assert stderr == (
        "gpuenergyd: policy 'unimportable' is broken: ModuleNotFoundError: No module named 'no_such_module'"
        f" ({plugins.folder / 'unimportable.py'}:1)\n"
    )
    assert "baseline: " not in stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--carbon-hour-s", "1"),
            "--carbon-hour-s 1: an iteration takes about 2.0 s, and an hour of the trace needs 3",
        ),
        (("--carbon-hour-s", "6"), "give --carbon-hours 20 or more, or --carbon-hour-s 10 or more"),
        (("--max-slowdown", "0.01"), "within a slowdown budget of 1 % and tuned; give --carbon-hours 40 or more"),
        (
            ("--carbon-hours", "6", "--baseline-iterations", "100"),
            "--carbon-hours 6 --carbon-hour-s 30: a job of 180 s",
        ),
    ],
)
def test_a_carbon_demo_that_is_too_short_for_a_plan_is_refused_at_once_with_the_valid_range(
    arguments: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["demo", "--carbon-trace", "synthetic", "--out", str(tmp_path / "report.html"), *arguments])

    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert expected in captured.err


@pytest.mark.thorough
@pytest.mark.torch
def test_a_demo_on_a_grid_is_slower_in_dirty_hours_and_its_report_shows_both_savings(tmp_path: Path) -> None:
    demo = held_demo(
        tmp_path,
        *("--gpus", "2", "--microbatches", "2", "--max-slowdown", "0.1"),
        *("--carbon-trace", "synthetic", "--carbon-hours", "24", "--carbon-hour-s", "10"),
    )

    assert demo.exit_code == 0, demo.texts
    assert demo.status["carbon"]["replayed_hour_s"] == 10.0
    with open_history(demo.database) as history:
        (report,) = job_reports(history)
        targets = [
            (row.intensity, row.permitted_time_s)
            for row in history.targets(demo.job["job_id"])
            if row.permitted_time_s is not None and row.intensity is not None
        ]
    figures = report.to_dict()
    assert figures["is_grid_replayed"]
    assert figures["num_targets"] >= len(targets) >= 24
    usual = median(intensity for intensity, _ in targets)
    dirty_s = fmean(time_s for intensity, time_s in targets if intensity > usual)
    clean_s = fmean(time_s for intensity, time_s in targets if intensity < usual)
    assert dirty_s > 1.01 * clean_s
    assert report.carbon is not None
    emissions = report.carbon.to_dict()
    assert emissions["saved_by_frontier_g"] > 0
    assert emissions["saved_by_timing_g"] > 0
    assert json.loads(demo.stdout)["saved_by_timing_g"] == emissions["saved_by_timing_g"]
    (line,) = (line for line in report.carbon.lines() if "by choosing the hours" in line)
    assert "by running slower" in line
