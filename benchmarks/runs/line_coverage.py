"""Which lines do the tests run? Child processes and compiled kernels included.

    python benchmarks/runs/line_coverage.py [--json] [PYTEST-ARGUMENT ...]

The whole suite runs under coverage, in an environment of its own beside the one in use; then the adapters' tests with
each training framework that `make frameworks` has built; then the planner's tests once more without numba, because no
tool sees inside a compiled kernel. Fails below 92 % of all lines, below 98 % in core and policies, or where a test
fails: the figures are told all the same. Needs the checkout, and PyPI for coverage.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report.running import ROOT
from docs.site.house_map import PACKAGES, PYTHON_PATH
from tests.support import framework_environments
from tools.quality.line_counts import PytestRun, pytest_run, summary, summary_lines
from tools.quality.twin import make_twin

FOLDER = ROOT / "build" / "coverage"
WITHOUT_NUMBA = ("tests/policies/planning",)
PARALLEL = ("--workers", "2")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help="add to what was counted before")
    options, arguments = parser.parse_known_args()
    if not options.keep:
        shutil.rmtree(FOLDER / "data", ignore_errors=True)
    (FOLDER / "data").mkdir(parents=True, exist_ok=True)
    python = make_twin(FOLDER / "environment", ROOT, ["coverage"])
    runs = [run_tests("tests", python, arguments or list(PARALLEL), {})]
    if not arguments:
        runs += run_frameworks(python)
        environ = {"NUMBA_DISABLE_JIT": "1", "TEST_CPU_S": "8"}
        given = [*PARALLEL, "-p", "tools.quality.impatience", *WITHOUT_NUMBA]
        runs.append(run_tests("planner's tests without numba", python, given, environ))
    num_processes = len(list((FOLDER / "data").iterdir()))
    coverage(python, "combine", "--quiet", "--append")
    result = summary(counted(python), runs, num_processes=num_processes)
    if options.json:
        print(json.dumps(result))
    else:
        coverage(python, "report", "--ignore-errors")
        print("\n".join(summary_lines(result)))
    return 0 if result["is_met"] else 1


def run_frameworks(twin: Path) -> list[PytestRun]:
    """Run each adapter's tests with its framework: in the suite they skip, whose environment is another one here."""
    [packages] = twin.parents[2].glob("lib/*/site-packages")
    path = os.pathsep.join([str(packages), PYTHON_PATH])
    runs = []
    for name in framework_environments.PACKAGES:
        if not framework_environments.is_built(name):
            sys.stderr.write(
                f"no environment for {name} here (`make frameworks`): its adapter's tests are not counted\n"
            )
            continue
        python = framework_environments.python_of(name)
        runs.append(run_tests(name, python, [f"tests/trainers/test_{name}.py"], {"PYTHONPATH": path}))
    return runs


def run_tests(name: str, python: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> PytestRun:
    """Run tests under coverage; what they say goes to stderr."""
    # Migrations are no part of a package for those who load them: files count by their place, too.
    source = ",".join(str(ROOT / folder) for folder in PACKAGES)
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", *arguments]
    command = [str(python), "-u", "-m", "coverage", "run", f"--source={source}", *pytest]
    given = {variable: value for variable, value in os.environ.items() if variable != "PYTHONPATH"}
    begin_s = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env={**given, **environ}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            sys.stderr.write(line)
            lines.append(line.rstrip())
    return pytest_run(name, lines, status=process.returncode, duration_s=time.monotonic() - begin_s)


def coverage(python: Path, *arguments: str) -> None:
    """Ask coverage about what was counted."""
    subprocess.run([str(python), "-m", "coverage", *arguments], cwd=ROOT, check=True)


def counted(python: Path) -> Mapping[str, Any]:
    """Return lines and lines that ran, by file."""
    path = FOLDER / "lines.json"
    # What tests had installed elsewhere is gone, and is no file of the checkout.
    coverage(python, "json", "--quiet", "--ignore-errors", "-o", str(path))
    files: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["files"]
    return files


if __name__ == "__main__":
    sys.exit(main())
