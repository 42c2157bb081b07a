"""`make coverage` tells shares of lines by package, and a failed or broken run of the tests misses its target."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report.page import rendered_page
from benchmarks.report.results import Result, circumstances, write_result
from tools.quality.line_counts import NUM_LEAST_COVERED, PytestRun, pytest_run, summary, summary_lines

FINE = PytestRun("tests", num_passed=3, num_failed=0, num_skipped=1, duration_s=2.0)


def counted(num: int, num_run: int) -> dict[str, Any]:
    return {"summary": {"num_statements": num, "covered_lines": num_run}}


def test_totals_and_names_of_failures_are_read_from_the_last_lines() -> None:
    lines = [
        "FAILED tests/a.py::test_one[x] - AssertionError: 1 passed in 2s",
        "ERROR tests/b.py::test_two",
        "===== 1 failed, 12 passed, 3 skipped, 2 warnings, 1 error in 61.20s (0:01:01) =====",
    ]

    run = pytest_run("tests", lines, status=1, duration_s=61.5)

    assert (run.num_passed, run.num_failed, run.num_skipped) == (12, 2, 3)
    assert run.failed == ("tests/a.py::test_one[x]", "tests/b.py::test_two")


def test_a_run_cut_short_fails_without_losing_what_was_counted() -> None:
    cut = pytest_run("tests", ["..........  [ 20%]"], status=-9, duration_s=5.0)
    result = summary({"gpuenergyd/core/a.py": counted(100, 100)}, [FINE, cut], num_processes=2)

    assert cut.failed == ("pytest itself, with exit status -9",)
    assert result["packages"]["all"]["ratio"] == 1.0
    assert not result["is_met"]


def test_exit_status_1_without_a_failed_test_is_a_failure() -> None:
    assert pytest_run("tests", [], status=1, duration_s=1.0).failed
    assert not pytest_run("tests", [], status=0, duration_s=1.0).failed


def test_the_coverage_target_includes_higher_ones_for_core_and_policies() -> None:
    files = {"gpuenergyd/core/a.py": counted(100, 98), "gpuenergyd/daemon/a.py": counted(100, 86)}

    assert summary(files, [FINE], num_processes=1)["is_met"]
    assert not summary(files | {"gpuenergyd/core/a.py": counted(100, 97)}, [FINE], num_processes=1)["is_met"]
    assert not summary(files | {"gpuenergyd/daemon/a.py": counted(100, 85)}, [FINE], num_processes=1)["is_met"]


def test_least_covered_files_come_first_and_those_without_a_miss_not_at_all() -> None:
    files = {f"gpuenergyd/cli/{k:02}.py": counted(100, 50 + k) for k in range(30)}
    files |= {"gpuenergyd/cli/whole.py": counted(10, 10), "gpuenergyd/cli/empty.py": counted(0, 0)}

    least = summary(files, [FINE], num_processes=1)["least_covered"]

    assert len(least) == NUM_LEAST_COVERED
    assert least[0] == {"path": "gpuenergyd/cli/00.py", "num_lines": 100, "num_missed": 50}
    assert [one["num_missed"] for one in least] == list(range(50, 50 - NUM_LEAST_COVERED, -1))


def test_summary_names_packages_files_runs_and_failures() -> None:
    broken = PytestRun("tests", num_passed=1, num_failed=1, num_skipped=0, duration_s=7.4, failed=("tests/a.py::b",))

    lines = summary_lines(summary({"gpuenergyd/core/a.py": counted(200, 150)}, [broken], num_processes=4))

    assert "core               75.00 % of 200 lines" in lines
    assert "all                75.00 % of 200 lines, at least 92 % required" in lines
    assert "   75.00 % of  200 lines  gpuenergyd/core/a.py" in lines
    assert "tests: 1 passed, 1 failed, 0 skipped, 7 s" in lines
    assert lines[-2:] == ["failed: tests/a.py::b", "counted in 4 processes"]


def test_page_compares_covered_lines_and_failed_tests_with_their_targets(tmp_path: Path) -> None:
    broken = replace(FINE, name="lightning", num_failed=1, failed=("tests/a.py::b",))
    figures = summary({"gpuenergyd/core/a.py": counted(2000, 1500)}, [FINE, broken], num_processes=4)
    given = circumstances("python benchmarks/runs/line_coverage.py", datetime(2026, 1, 2, tzinfo=UTC), 1.5, 0.25)
    write_result(Result("line-coverage", figures, given), tmp_path)

    page = rendered_page(tmp_path)

    assert "| core and policies (2,000 lines) | **75.0 %** | at least 98 % |" in page
    assert "| failed tests | **1** | 0 |" in page
