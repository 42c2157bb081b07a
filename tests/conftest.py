"""What all tests share: a test that provokes one of the 52 faults carries its number in its id."""

import pytest

from tests.support.faults import fault_id


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
