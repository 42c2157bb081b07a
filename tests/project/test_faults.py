"""docs/reference/failure-modes.md matches the tests, and every fault has a test."""

import pytest

from tests.support.faults import FAULTS, PAGE, fault_id, page, proofs


def test_every_fault_has_a_test_that_provokes_it() -> None:
    proven = {number for proof in proofs() for number in proof.numbers}

    assert [fault_id(fault.number) for fault in FAULTS if fault.number not in proven] == []


def test_the_page_is_generated_from_the_tests() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(proofs()), "run: python -m tests.support.faults"


def test_tests_declare_only_existing_faults() -> None:
    assert {number for proof in proofs() for number in proof.numbers} <= {fault.number for fault in FAULTS}
    beyond = len(FAULTS) + 1
    with pytest.raises(ValueError, match=f"no fault {beyond}; there are 1 to {len(FAULTS)}"):
        fault_id(beyond)


def test_the_id_of_a_test_names_its_faults(request: pytest.FixtureRequest) -> None:
    claims = [(item, marker) for item in request.session.items for marker in item.iter_markers("fault")]

    assert [item.nodeid for item, marker in claims for n in marker.args if fault_id(n) not in item.nodeid] == []
