"""Shared by all tests: fixed hypothesis examples, fault numbers in test ids, and a check for leaked resources."""

import asyncio
import os
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.faults import fault_id
from tests.support.leaks import PendingTasks, leaked_since, open_resources

# As in the policy host: threads of the linear algebra libraries cost CPU time and save none on such small matrices.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# A busy machine must not fail what is right: no deadlines, and the same examples each time.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("tests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Put the fault numbers of `@pytest.mark.fault(7, 12)` into the test's id: `test_...[F07+F12]`."""
    numbers = [n for marker in metafunc.definition.iter_markers("fault") for n in marker.args]
    if numbers:
        metafunc.fixturenames.append("_fault")
        metafunc.parametrize("_fault", [numbers], indirect=True, ids=["+".join(map(fault_id, sorted(numbers)))])


@pytest.fixture
def _fault(request: pytest.FixtureRequest) -> list[int]:
    """Return the numbers of the faults that this test provokes."""
    numbers: list[int] = request.param
    return numbers


@pytest.fixture(autouse=True)
def _no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves a child process, a thread, a socket or a pending asyncio task behind."""
    pending = PendingTasks()
    run = asyncio.run

    def watched_run(main: Coroutine[Any, Any, Any], **options: Any) -> Any:
        return run(pending.watched(main), **options)

    monkeypatch.setattr(asyncio, "run", watched_run)
    before = open_resources()
    yield
    leaked = [*leaked_since(before), *pending.names]
    assert not leaked, f"this test leaked: {leaked}"
