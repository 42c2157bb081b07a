"""`pytest -p tools.quality.mutation.watching`: which test runs which line, and how long each takes.

Under coverage each test becomes a context of its own, fixtures included; TEST_SECONDS names a file for the times.
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

# Mutants are tried without it.
coverage: Any = importlib.import_module("coverage") if importlib.util.find_spec("coverage") else None
_seconds: dict[str, float] = defaultdict(float)
_not_passed: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Do not look for the simplest example: that a test fails is all that is asked."""
    phases = [phase for phase in Phase if phase not in {Phase.shrink, Phase.explain}]
    settings.register_profile("mutation", settings.get_profile("tests"), phases=phases)
    settings.load_profile("mutation")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Call what runs until the test and its fixtures are done by the test's name."""
    current = coverage.Coverage.current() if coverage else None
    if current:
        current.switch_context(item.nodeid)
    yield
    if current:
        current.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up set-up, call and tear-down."""
    if report.outcome != "passed":
        _not_passed.add(report.nodeid)
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish() -> None:
    """Write the times of the tests that pass."""
    if path := os.environ.get("TEST_SECONDS"):
        Path(path).write_text(
            json.dumps({name: s for name, s in _seconds.items() if name not in _not_passed}), encoding="utf-8"
        )
