"""What the environment says of a job's length: taken where it makes sense, and never a reason to stop."""

import pytest

from gpuenergyd.client.environment import JobLengthVariables, find_job_length


def test_iterations_hours_and_a_deadline_are_found() -> None:
    said = find_job_length(
        {
            "GPUENERGYD_JOB_ITERATIONS": "5000",
            "GPUENERGYD_JOB_HOURS": "1.5",
            "GPUENERGYD_JOB_DEADLINE": "2030-01-31T10:00:00+02:00",
        }
    )

    assert said == JobLengthVariables(5000, 1.5, "2030-01-31T08:00:00+00:00")


@pytest.mark.parametrize("text", ["", "soon", "-3", "0", "nan", "inf", "1e400"])
def test_what_makes_no_sense_is_as_if_nobody_had_said_it(text: str) -> None:
    variables = ("GPUENERGYD_JOB_ITERATIONS", "GPUENERGYD_JOB_HOURS", "GPUENERGYD_JOB_DEADLINE")

    assert find_job_length(dict.fromkeys(variables, text)) == JobLengthVariables()
