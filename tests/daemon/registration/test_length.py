"""What a registration says of its job's length is checked where it enters."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from gpuenergyd.core.carbon.slowdown_account import JobLength
from gpuenergyd.daemon.registration.length import checked_length
from gpuenergyd.errors import ProtocolError
from tests.daemon.jobs.test_registry import registration


def test_a_length_that_makes_sense_is_taken_with_its_deadline_in_utc() -> None:
    said = replace(registration(0), job_iterations=50, job_hours=1.5, job_deadline="2030-01-31T10:00:00+02:00")

    assert checked_length(said) == JobLength(50, 1.5, datetime(2030, 1, 31, 8, tzinfo=UTC))
    assert checked_length(registration(0)) == JobLength()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"job_iterations": 0}, "job_iterations 0"),
        ({"job_hours": -1.0}, "job_hours -1"),
        ({"job_hours": float("inf")}, "job_hours inf"),
        ({"job_deadline": "soon"}, "'soon'"),
        ({"job_deadline": "2030-01-31T10:00:00"}, "offset"),
    ],
)
def test_a_length_that_makes_none_is_refused_with_its_value(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        checked_length(replace(registration(0), **said))
