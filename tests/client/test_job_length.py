"""The length of a job from environment variables."""

import pytest

from gpuenergyd.client.environment import JobLengthVariables, find_job_length


def test_iterations_hours_and_deadline_are_read_from_the_environment() -> None:
    output = find_job_length(
        {
            "GPUENERGYD_JOB_ITERATIONS": "5000",
            "GPUENERGYD_JOB_HOURS": "1.5",
            "GPUENERGYD_JOB_DEADLINE": "2030-01-31T10:00:00+02:00",
        }
    )

    assert output == JobLengthVariables(5000, 1.5, "2030-01-31T08:00:00+00:00")


@pytest.mark.parametrize("text", ["", "soon", "-3", "0", "nan", "inf", "1e400"])
def test_invalid_values_count_as_not_set(text: str) -> None:
    variables = ("GPUENERGYD_JOB_ITERATIONS", "GPUENERGYD_JOB_HOURS", "GPUENERGYD_JOB_DEADLINE")

    assert find_job_length(dict.fromkeys(variables, text)) == JobLengthVariables()
