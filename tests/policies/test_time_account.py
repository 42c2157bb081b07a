"""What the shipped policies cost a training is within its time account, for replicas that share one as well."""

from collections.abc import Callable

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd_other_policies.cost import Cost
from gpuenergyd_other_policies.envelope import Envelope
from gpuenergyd_other_policies.uniform import Uniform
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.remembered_plans import RememberedBubbleAware
from tests.support.thorough import thorough
from tests.support.virtual_replicas import VirtualReplicas


def training(policy: ClockPolicy, *, seconds: float = 1.0, **options: object) -> VirtualTraining:
    """Return an uneven pipeline whose iterations at full speed take about so many seconds."""
    work = a100_stages((1.0, 0.93, 1.10), scale=seconds / 1.25)
    return VirtualTraining(one_forward_one_backward(3, 6), work, policy, noise_ratio=0.002, **options)  # type: ignore[arg-type]


def lost_s(run: VirtualTraining) -> float:
    """Return the time that was lost against the baseline, which is at full speed."""
    assert run.job.baseline is not None
    return sum(time_s - run.job.baseline.iteration_time_s for time_s, _, _ in run.history)


@pytest.mark.parametrize("seconds", [0.2, *thorough(2.0)])
@pytest.mark.parametrize("policy", [RememberedBubbleAware, Uniform, Cost, Envelope])
def test_no_shipped_policy_costs_more_than_the_account_has(policy: Callable[[], ClockPolicy], seconds: float) -> None:
    run = training(policy(), seconds=seconds)

    run.run(120)

    account = run.job.account
    assert account is not None
    assert account.cost_s <= account.income_s
    assert lost_s(run) <= account.income_s + 0.05 * seconds
    assert account.num_experiments


@pytest.mark.thorough
def test_replicas_share_an_account_and_pay_experiments_in_the_same_iterations_once() -> None:
    replicas = [training(RememberedBubbleAware(), seed=seed) for seed in range(2)]
    account = replicas[0].job.control.experiments.account
    for number, own in enumerate(replicas):
        own.job.control.experiments.account = account
        own.job.knowledge.job_id = f"replica-{number}"

    VirtualReplicas(tuple(replicas)).run(120)

    assert [own.job.phase for own in replicas] == [JobPhase.TUNED] * 2
    assert max(map(lost_s, replicas)) <= account.income_s + 0.05
    assert 110 < account.num_iterations <= 120  # not once for each replica
