"""The end of a demo: enough iterations under one plan, or no prospect of them."""

from typing import Any

import pytest

from gpuenergyd.cli.demo.request import DemoRequest

REQUEST = DemoRequest(
    driver="simulated", num_gpus=4, gpu_model="a100-sxm", num_microbatches=8, baseline_iterations=10,
    tuned_iterations=12, policy="bubble-aware", max_slowdown_ratio=0.0, seed=0, time_limit_s=600.0,
)  # fmt: skip
PROFILED_AGAIN = {"phase": "profiling", "plan_purpose": "profile", "saving_ratio": 0.12}
TUNED = {"phase": "tuned", "plan_purpose": "tuned", "saving_ratio": 0.12}


@pytest.mark.parametrize(
    ("job", "is_finished"),
    [
        (TUNED | {"num_iterations_of_plan": 12, "num_tuned_iterations": 12}, False),
        (TUNED | {"num_iterations_of_plan": 13, "num_tuned_iterations": 13}, True),
        (TUNED | {"num_iterations_of_plan": 1, "num_tuned_iterations": 60}, True),
        (PROFILED_AGAIN | {"num_iterations_of_plan": 1, "num_tuned_iterations": 12}, True),
        (PROFILED_AGAIN | {"num_iterations_of_plan": 1, "num_tuned_iterations": 11}, False),
        (PROFILED_AGAIN | {"num_iterations_of_plan": 1, "num_tuned_iterations": 0, "saving_ratio": None}, False),
    ],
)
def test_a_demo_ends_with_a_settled_plan_or_when_the_job_is_profiled_again(
    job: dict[str, Any], *, is_finished: bool
) -> None:
    assert REQUEST.is_finished(job) is is_finished
