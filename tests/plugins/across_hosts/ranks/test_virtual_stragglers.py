"""Stragglers among replicas in virtual time; benchmarks/runs/stragglers.py runs many more of them."""

import pytest

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import AccountRules
from gpuenergyd_other_policies.uniform import Uniform
from tests.support.straggler_episodes import Trial, run_trial

NOISE_RATIO = 0.005
RICH = JobRules(account=AccountRules(first_income_s=60.0))
"""Profiling and following are paid at once: with the usual account, this short a job cannot afford either."""


@pytest.mark.thorough
@pytest.mark.parametrize("slow_stages", ["those of one host", "all"])
def test_pipelines_across_hosts_follow_each_straggler_within_six_iterations_and_leave_it_within_four(
    slow_stages: str,
) -> None:
    trial = Trial(
        are_replicas_whole=False, ratio=1.2, noise_ratio=NOISE_RATIO, seed=1, num_episodes=2,
        is_whole_replica_slow=slow_stages == "all", policy=Uniform, rules=RICH,
    )  # fmt: skip

    ran = run_trial(trial)

    responses = [ran.response(*episode) for episode in trial.episodes()]
    assert all(followed is not None and followed <= 6 for followed, _ in responses), responses
    assert all(left is not None and left <= 4 for _, left in responses), responses
    assert ran.num_false_alarms == len(responses)


@pytest.mark.thorough
def test_pipelines_across_hosts_without_a_straggler_follow_none() -> None:
    ran = run_trial(Trial(are_replicas_whole=False, ratio=1.0, noise_ratio=NOISE_RATIO, seed=2, num_episodes=2))

    assert ran.num_false_alarms == 0
