"""Tests in forked workers: each is reported once, and none is lost with its worker."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.support.daemon_process import ROOT

USUAL = """
import os, pytest
def test_passes(tmp_path): assert list(tmp_path.iterdir()) == []
def test_fails(): print("what it printed"); assert os.getpid() == 0
def test_is_skipped(): pytest.skip("a reason")
"""
DEADLY = """
import os, time
def test_before(): pass
def test_ends_its_worker(): os._exit(3)
def test_after(): pass
"""


def outcomes(folder: Path, *arguments: str) -> dict[str, list[str]]:
    """Run the tests in a folder by two workers; return the ids by outcome, with the output of those that failed."""
    plugins = ("-p", "tests.support.forked_workers", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *plugins, "--workers", "2", "--junitxml=found.xml", *arguments]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, capture_output=True)
    found: dict[str, list[str]] = {}
    for case in ET.parse(folder / "found.xml").iter("testcase"):
        parts = {part.tag: "".join(part.itertext()) for part in case}
        outcome = next((tag for tag in ("failure", "error", "skipped") if tag in parts), "passed")
        found.setdefault(outcome, []).append(f"{case.get('name')}{parts.get('system-out', '')}{parts.get(outcome, '')}")
    return found


@pytest.mark.kill
def test_each_test_is_reported_once_with_its_output_and_none_is_lost_with_its_worker(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(USUAL)
    (tmp_path / "test_d.py").write_text(DEADLY)
    found = outcomes(tmp_path, "-o", "junit_logging=system-out", "-o", "junit_log_passing_tests=false")

    assert sorted(found["passed"]) == ["test_before", *["test_passes"] * 3]
    assert [len(found[outcome]) for outcome in ("failure", "skipped")] == [5, 3]
    [after, ends, *failed] = sorted(found["failure"])
    assert all("what it printed" in text for text in failed)
    assert after.startswith("test_after")
    assert ends.startswith("test_ends_its_worker")
    assert "test_d.py::test_ends_its_worker ended its worker: exit status 3" in after


def test_the_first_failure_ends_the_run_if_asked_to(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"test_{number}.py").write_text(USUAL)
    found = outcomes(tmp_path, "-x")

    assert 1 <= len(found["failure"]) < 8
