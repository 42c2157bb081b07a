"""Which lines do the tests run? Child processes and compiled kernels included.

    python benchmarks/line_coverage.py [--json] [PYTEST-ARGUMENT ...]

The whole suite runs under coverage, in an environment of its own beside the one in use; then the planner's tests once
more without numba, because no tool sees inside a compiled kernel. Fails below 92 % of all lines, below 98 % in core and
policies, or where a test fails. Needs the checkout, and PyPI for coverage.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence.running import ROOT
from evidence.twin import make_twin

FOLDER = ROOT / "build" / "coverage"
PACKAGES = {
    "core": ("gpuenergyd/core/",),
    "policies": ("policies/gpuenergyd_policies/",),
    "core and policies": ("gpuenergyd/core/", "policies/gpuenergyd_policies/"),
    "carbon": ("gpuenergyd/carbon/",),
    "cli": ("gpuenergyd/cli/",),
    "client": ("gpuenergyd/client/",),
    "daemon": ("gpuenergyd/daemon/",),
    "gpu": ("gpuenergyd/gpu/",),
    "report": ("gpuenergyd/report/",),
    "store": ("gpuenergyd/store/",),
    "wire": ("gpuenergyd/wire/",),
    "trainers": ("trainers/gpuenergyd_trainers/",),
    "all": ("",),
}
OWED = {"all": 0.92, "core and policies": 0.98}
WITHOUT_NUMBA = ("tests/planning",)
PARALLEL = ("-n", "2", "--dist", "worksteal")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help="add to what was counted before")
    options, arguments = parser.parse_known_args()
    if not options.keep:
        shutil.rmtree(FOLDER / "data", ignore_errors=True)
    (FOLDER / "data").mkdir(parents=True, exist_ok=True)
    python = make_twin(FOLDER / "environment", ROOT, ["coverage"])
    given = arguments or list(PARALLEL)
    failed = run_tests(python, given, {})
    if not arguments:
        environ = {"NUMBA_DISABLE_JIT": "1", "TEST_CPU_S": "20"}
        failed += run_tests(python, [*PARALLEL, "-p", "evidence.impatience", *WITHOUT_NUMBA], environ)
    num_processes = len(list((FOLDER / "data").iterdir()))
    coverage(python, "combine", "--quiet", "--append")
    result = summary(counted(python), num_processes, failed)
    if options.json:
        print(json.dumps(result))
    else:
        coverage(python, "report")
        show(result)
    return 0 if result["is_met"] else 1


def run_tests(python: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Run tests under coverage and return the names of those that failed; what they say goes to stderr."""
    command = [str(python), "-m", "coverage", "run", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(command, cwd=ROOT, env={**given, **environ}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        failed = []
        for line in process.stdout:
            sys.stderr.write(line)
            if found := re.match(r"(?:FAILED|ERROR) (\S+)", line):
                failed.append(found[1])
    if process.returncode not in {0, 1}:
        raise SystemExit(f"pytest ended with status {process.returncode}")
    return failed


def coverage(python: Path, *arguments: str) -> None:
    """Ask coverage about what was counted."""
    subprocess.run([str(python), "-m", "coverage", *arguments], cwd=ROOT, check=True)


def counted(python: Path) -> Mapping[str, Any]:
    """Return lines and lines that ran, by file."""
    path = FOLDER / "lines.json"
    coverage(python, "json", "--quiet", "-o", str(path))
    files: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["files"]
    return files


def summary(files: Mapping[str, Any], num_processes: int, failed: Sequence[str]) -> dict[str, Any]:
    """Return the share of lines that ran, by package, and the files with most lines that did not."""
    packages = {}
    for name, folders in PACKAGES.items():
        sums = [file["summary"] for path, file in files.items() if path.startswith(folders)]
        num = sum(one["num_statements"] for one in sums)
        num_run = sum(one["covered_lines"] for one in sums)
        packages[name] = {"num_lines": num, "num_run": num_run, "ratio": num_run / num if num else 0.0}
    missed = sorted(((len(file["missing_lines"]), path) for path, file in files.items()), reverse=True)
    return {
        "packages": packages,
        "owed": OWED,
        "most_missed": [{"path": path, "num_missed": num} for num, path in missed[:10]],
        "num_processes": num_processes,
        "failed_tests": list(failed),
        "is_met": not failed and all(packages[name]["ratio"] >= ratio for name, ratio in OWED.items()),
    }


def show(result: Mapping[str, Any]) -> None:
    for name, one in result["packages"].items():
        owed = f", {100 * OWED[name]:.0f} % are owed" if name in OWED else ""
        print(f"{name:<18}{100 * one['ratio']:6.2f} % of {one['num_lines']} lines{owed}")
    print(f"counted in {result['num_processes']} processes; {len(result['failed_tests'])} tests failed")


if __name__ == "__main__":
    sys.exit(main())
