"""Job options from the environment: a slowdown that is out of range or probably a mistake is named."""

import logging

import pytest

from gpuenergyd.client.environment import MAX_SLOWDOWN_VARIABLE, find_job_options


@pytest.mark.parametrize("value", ["5", "1.01", "-0.1", "nan", "inf", "much"])
def test_a_slowdown_out_of_range_is_ignored_with_the_valid_range(value: str, caplog: pytest.LogCaptureFixture) -> None:
    options = find_job_options("job", environ={MAX_SLOWDOWN_VARIABLE: value})

    assert options.max_slowdown_ratio is None
    assert options.from_environment == ()
    assert caplog.messages == [
        f"gpuenergyd: {MAX_SLOWDOWN_VARIABLE}='{value}' is ignored: must be a ratio from 0 to 1, e.g. 0.05 for 5 %"
    ]


@pytest.mark.parametrize(("value", "is_warned_about"), [("0", False), ("0.5", False), ("0.51", True), ("1", True)])
def test_a_slowdown_that_is_probably_a_percentage_is_warned_about(
    value: str, *, is_warned_about: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    options = find_job_options("job", environ={MAX_SLOWDOWN_VARIABLE: value})

    assert options.max_slowdown_ratio == float(value)
    assert ("longer; 0.05 is 5 %" in caplog.text) is is_warned_about
