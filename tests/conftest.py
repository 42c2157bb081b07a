"""What all tests share: the same examples on every run, and fault numbers in the ids of tests that provoke faults."""

import pytest
from hypothesis import HealthCheck, settings

from tests.support.faults import fault_id

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
