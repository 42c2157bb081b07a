"""The options of a demo, and its end: enough iterations under one plan, or no prospect of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd_sim.demo.grid import DemoGrid
from gpuenergyd_sim.demo.request import DemoRequest
from gpuenergyd_sim.demo.virtual_files import VirtualFiles
from gpuenergyd_sim.driver.world_kinds import WorldKind

REQUEST = DemoRequest(
    driver="simulated", num_gpus=4, gpu_model="a100-sxm", num_microbatches=8, baseline_iterations=10,
    tuned_iterations=12, policy="bubble-aware", max_slowdown_ratio=0.0, seed=0, time_limit_s=600.0,
)  # fmt: skip
TRIED_AGAIN = {"phase": "trial", "plan_purpose": "trial", "saving_ratio": 0.12}
TUNED = {"phase": "tuned", "plan_purpose": "tuned", "saving_ratio": 0.12}


@pytest.mark.parametrize(
    ("job", "is_finished"),
    [
        (TUNED | {"num_iterations_of_plan": 12, "num_tuned_iterations": 12}, False),
        (TUNED | {"num_iterations_of_plan": 13, "num_tuned_iterations": 13}, True),
        (TUNED | {"num_iterations_of_plan": 1, "num_tuned_iterations": 60}, True),
        (TRIED_AGAIN | {"num_iterations_of_plan": 1, "num_tuned_iterations": 12}, True),
        (TRIED_AGAIN | {"num_iterations_of_plan": 1, "num_tuned_iterations": 11}, False),
        (TRIED_AGAIN | {"num_iterations_of_plan": 1, "num_tuned_iterations": 0, "saving_ratio": None}, False),
    ],
)
def test_a_demo_ends_with_a_settled_plan_or_when_the_job_tries_settings_again(
    job: dict[str, Any], *, is_finished: bool
) -> None:
    assert REQUEST.is_finished(job) is is_finished


AT_FULL_SPEED = {
    "phase": "tuned",
    "plan_purpose": "baseline",
    "num_tuned_iterations": 0,
    "num_iterations_of_plan": 30,
    "num_baseline_iterations": 30,
    "plan_reason": "nothing to save",
    "phase_reason": "the plan was too slow",
    "policy": "bubble-aware",
    "is_given_up": False,
}


@pytest.mark.parametrize(
    ("changed", "has_no_plan"),
    [
        ({}, True),
        ({"phase": "fallback"}, True),
        ({"is_given_up": True, "num_tuned_iterations": 5}, True),
        (
            {"phase": "fallback", "phase_reason": "policy bubble-aware failed: ValueError", "num_tuned_iterations": 5},
            True,
        ),
        (
            {
                "phase": "fallback",
                "phase_reason": "policy bubble-aware failed: policy 'bubble-aware' did not answer within 30 s",
                "num_tuned_iterations": 5,
            },
            False,
        ),
        ({"num_baseline_iterations": 29}, False),
        ({"num_tuned_iterations": 1}, False),
        # A busy host: the policy has not replied yet, has just begun a trial, or its plan has just come.
        ({"phase": "baseline", "num_baseline_iterations": 100, "num_iterations_of_plan": 100}, False),
        ({"phase": "trial", "plan_purpose": "trial", "num_baseline_iterations": 100}, False),
        ({"plan_purpose": "tuned", "num_iterations_of_plan": 0, "num_baseline_iterations": 100}, False),
        ({"num_iterations_of_plan": 1, "num_baseline_iterations": 100}, False),
    ],
)
def test_a_policy_makes_no_plan_once_it_has_replied_and_had_enough_iterations(
    changed: dict[str, Any], *, has_no_plan: bool
) -> None:
    assert (REQUEST.reason_for_no_plan(AT_FULL_SPEED | changed) is not None) is has_no_plan


def test_the_reason_for_no_plan_is_that_of_the_daemon() -> None:
    assert REQUEST.reason_for_no_plan(AT_FULL_SPEED) == "policy 'bubble-aware' made no plan: nothing to save"
    assert REQUEST.reason_for_no_plan(AT_FULL_SPEED | {"phase": "fallback"}) == (
        "policy 'bubble-aware' made no plan: the plan was too slow"
    )


@pytest.mark.parametrize("grid", [None, DemoGrid("synthetic", 30.0, 12)])
def test_a_request_survives_its_file(grid: DemoGrid | None, tmp_path: Path) -> None:
    request = replace(REQUEST, grid=grid, kills_worker_after_s=5.0, simulation=WorldKind.KIND)
    files = VirtualFiles(tmp_path)
    files.write_request(request)

    assert files.read_request() == request
    assert files.read_request().gpus == "4 ideal simulated a100-sxm GPUs"


@pytest.mark.parametrize(
    ("driver", "gpus"),
    [("simulated", "4 simulated a100-sxm GPUs (late clocks, slow reads, stalls)"), ("nvml", "4 simulated GPUs")],
)
def test_the_demo_says_how_its_gpus_behave(driver: str, gpus: str) -> None:
    assert replace(REQUEST, driver=driver).gpus == gpus
