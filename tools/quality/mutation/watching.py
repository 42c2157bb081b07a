"""A pytest plugin that records which test runs which line and how long each test takes.

Under coverage each test, with its fixtures, becomes a coverage context. TEST_SECONDS names the file for the durations.
"""

import importlib
import importlib.util
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

# Not installed where mutants are tested.
coverage: Any = importlib.import_module("coverage") if importlib.util.find_spec("coverage") else None
_seconds: dict[str, float] = defaultdict(float)
_not_passed: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Turn off shrinking: only whether a test fails matters."""
    phases = [phase for phase in Phase if phase not in {Phase.shrink, Phase.explain}]
    settings.register_profile("mutation", settings.get_profile("thorough"), phases=phases)
    settings.load_profile("mutation")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Make the test, with its fixtures, a coverage context."""
    current = coverage.Coverage.current() if coverage else None
    if current:
        current.switch_context(item.nodeid)
    yield
    if current:
        current.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the durations of set-up, call and tear-down."""
    if report.outcome != "passed":
        _not_passed.add(report.nodeid)
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish() -> None:
    """Write the durations of the tests that passed."""
    if path := os.environ.get("TEST_SECONDS"):
        Path(path).write_text(
            json.dumps({name: s for name, s in _seconds.items() if name not in _not_passed}), encoding="utf-8"
        )
