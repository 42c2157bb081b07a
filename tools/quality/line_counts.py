"""Summary of `make coverage`: line coverage by package, the least covered files, test results."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PACKAGES = {
    "core": ("gpuenergyd/core/",),
    "policies": ("policies/gpuenergyd_policies/",),
    "core and policies": ("gpuenergyd/core/", "policies/gpuenergyd_policies/"),
    "cli": ("gpuenergyd/cli/",),
    "client": ("gpuenergyd/client/",),
    "daemon": ("gpuenergyd/daemon/",),
    "gpu": ("gpuenergyd/gpu/",),
    "report": ("gpuenergyd/report/",),
    "store": ("gpuenergyd/store/",),
    "wire": ("gpuenergyd/wire/",),
    "trainers": ("trainers/gpuenergyd_trainers/",),
    "plugins": ("plugins/",),
    "all": ("",),
}
REQUIRED_RATIOS = {"all": 0.92, "core and policies": 0.98}
NUM_LEAST_COVERED = 15
_RESULT = re.compile(r"(?:FAILED|ERROR) (\S+)")
_TOTALS = re.compile(r"=+ (.*) in ([\d.]+)s\b.*=+$")
_TOTAL = re.compile(r"(\d+) (passed|failed|skipped|error)")


@dataclass(frozen=True, slots=True)
class PytestRun:
    """Result of one run of pytest."""

    name: str
    num_passed: int
    num_failed: int
    """Includes errors in fixtures and during collection."""
    num_skipped: int
    duration_s: float
    failed: tuple[str, ...] = ()
    """Names of failed tests; a run that was cut short is listed too."""


def pytest_run(name: str, lines: Sequence[str], *, status: int, duration_s: float) -> PytestRun:
    """Parse pytest's summary lines and exit status.

    A run that was cut short prints no totals: its tests count as neither passed nor failed, the run itself as failed.
    """
    totals: dict[str, int] = {}
    for line in lines:
        if match := _TOTALS.match(line):
            totals = {word: int(number) for number, word in _TOTAL.findall(match[1])}
    failed = [found[1] for line in lines if (found := _RESULT.match(line))]
    if status not in {0, 1}:
        failed.append(f"pytest itself, with exit status {status}")
    elif status == 1 and not failed:
        failed.append("an unnamed failure")
    return PytestRun(
        name,
        num_passed=totals.get("passed", 0),
        num_failed=totals.get("failed", 0) + totals.get("error", 0),
        num_skipped=totals.get("skipped", 0),
        duration_s=duration_s,
        failed=tuple(failed),
    )


def summary(files: Mapping[str, Any], runs: Sequence[PytestRun], *, num_processes: int) -> dict[str, Any]:
    """Return line coverage by package, the least covered files and the test results.

    Args:
        files: by path, as `coverage json` writes them.
        runs: all runs of pytest; a failed test misses the target too.
        num_processes: number of processes that recorded coverage.
    """
    packages = {}
    for name, folders in PACKAGES.items():
        sums = [file["summary"] for path, file in files.items() if path.startswith(folders)]
        num = sum(one["num_statements"] for one in sums)
        num_run = sum(one["covered_lines"] for one in sums)
        packages[name] = {"num_lines": num, "num_run": num_run, "ratio": num_run / num if num else 0.0}
    least = [
        {"path": path, "num_lines": one["num_statements"], "num_missed": one["num_statements"] - one["covered_lines"]}
        for path, one in ((path, file["summary"]) for path, file in files.items())
        if one["covered_lines"] < one["num_statements"]
    ]
    least.sort(key=lambda one: (-one["num_missed"] / one["num_lines"], one["path"]))
    failed = [name for run in runs for name in run.failed]
    return {
        "packages": packages,
        "required_ratios": REQUIRED_RATIOS,
        "least_covered": least[:NUM_LEAST_COVERED],
        "num_processes": num_processes,
        "test_runs": [
            {
                "name": run.name,
                "num_passed": run.num_passed,
                "num_failed": run.num_failed,
                "num_skipped": run.num_skipped,
                "duration_s": round(run.duration_s, 1),
            }
            for run in runs
        ],
        "failed_tests": failed,
        "is_met": not failed and all(packages[name]["ratio"] >= ratio for name, ratio in REQUIRED_RATIOS.items()),
    }


def summary_lines(result: Mapping[str, Any]) -> list[str]:
    """Return a summary as text, line by line."""
    lines = []
    for name, one in result["packages"].items():
        required = f", at least {100 * REQUIRED_RATIOS[name]:.0f} % required" if name in REQUIRED_RATIOS else ""
        lines.append(f"{name:<18}{100 * one['ratio']:6.2f} % of {one['num_lines']} lines{required}")
    lines.append("least covered:")
    for one in result["least_covered"]:
        ratio = 1.0 - one["num_missed"] / one["num_lines"]
        lines.append(f"  {100 * ratio:6.2f} % of {one['num_lines']:>4} lines  {one['path']}")
    for run in result["test_runs"]:
        counts = f"{run['num_passed']} passed, {run['num_failed']} failed, {run['num_skipped']} skipped"
        lines.append(f"{run['name']}: {counts}, {run['duration_s']:.0f} s")
    lines += [f"failed: {name}" for name in result["failed_tests"]]
    lines.append(f"counted in {result['num_processes']} processes")
    return lines
