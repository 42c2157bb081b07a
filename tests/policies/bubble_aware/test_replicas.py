"""Replicas of one training in virtual time: they follow a straggler's pace, and stop following it at once."""

import pytest

from gpuenergyd.core.job.issued_plans import PROOF_PLAN_ID
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import AccountRules
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.remembered_plans import RememberedBubbleAware
from tests.support.thorough import thorough
from tests.support.virtual_replicas import ReplicasOnHosts, VirtualReplicas

SLOW_FROM, SLOW_UNTIL = 88, 108


def replica(
    policy: ClockPolicy, *, slow_ratio: float = 1.0, scale: float = 1.0, proof_iterations: int = 0, **others: object
) -> VirtualTraining:
    """Return a pipeline that is slower by a factor of `slow_ratio` for twenty iterations."""
    return VirtualTraining(
        one_forward_one_backward(3, 6),
        a100_stages((1.0, 0.93, 1.10), scale=scale),
        policy,
        slowdown_of=lambda _, iteration: slow_ratio if SLOW_FROM <= iteration < SLOW_UNTIL else 1.0,
        rules=JobRules(
            proof_iterations=proof_iterations, account=AccountRules(first_income_s=5.0)
        ),  # a straggler that leaves costs time
        **others,  # type: ignore[arg-type]
    )


@pytest.mark.fault(46)
@pytest.mark.parametrize(
    ("together", "waits_in"),
    [
        (VirtualReplicas, "last instruction"),
        (ReplicasOnHosts, "time after it"),
        *thorough((VirtualReplicas, "time after it"), (ReplicasOnHosts, "last instruction")),
    ],
)
def test_a_straggler_is_followed_within_five_iterations_and_left_within_three(
    together: type[VirtualReplicas], waits_in: str
) -> None:
    waits = {"waits_in_last_instruction": waits_in == "last instruction"}
    slow, fast = replica(FullSpeed(), slow_ratio=1.2, **waits), replica(RememberedBubbleAware(), **waits)
    training = together((slow, fast))

    training.run(SLOW_UNTIL + 10)

    plans = [plan_id for _, _, plan_id in fast.history]
    usual_plan, slow_plan = plans[SLOW_FROM - 1], plans[SLOW_UNTIL - 1]
    usual_s, slow_s = (slow.history[k][0] for k in (SLOW_FROM - 1, SLOW_UNTIL - 1))
    assert slow_s == pytest.approx(1.2 * usual_s, rel=0.01)
    assert slow_plan != usual_plan
    assert set(plans[SLOW_FROM + 5 : SLOW_UNTIL]) == {slow_plan}
    assert set(plans[SLOW_UNTIL + 3 :]) == {usual_plan}
    # Nobody waits for the replica that has slowed down.
    assert max(time_s for time_s, _, _ in fast.history[SLOW_FROM:SLOW_UNTIL]) <= 1.005 * slow_s
    assert max(time_s for time_s, _, _ in fast.history[SLOW_UNTIL + 3 :]) <= 1.005 * usual_s
    assert fast.job.faults.num_faults == 0
    waiting_j, following_j = (fast.history[k][1] for k in (SLOW_FROM + 1, SLOW_UNTIL - 1))
    assert following_j < 0.85 * waiting_j


def test_the_reason_of_a_plan_names_the_straggler() -> None:
    slow, fast = replica(FullSpeed(), slow_ratio=1.2), replica(FullSpeed())
    training = VirtualReplicas((slow, fast))

    training.run(SLOW_FROM + 6)
    while_slow = fast.job.notices.last or ""
    training.run(SLOW_UNTIL - SLOW_FROM)

    assert "straggler: replica-0 takes" in while_slow
    assert "straggler recovered: replica-0 now takes" in (fast.job.notices.last or "")
    assert [change.job_id for _, change in training.changes] == ["replica-1", "replica-1"]


def energy_beside_a_slower_replica(max_slowdown_ratio: float) -> tuple[float, float]:
    """Return energy and time of the last iterations of a replica beside one that is 10 % slower and may take 5 %."""
    slow = replica(RememberedBubbleAware(), scale=1.1, max_slowdown_ratio=0.05)
    fast = replica(RememberedBubbleAware(), max_slowdown_ratio=max_slowdown_ratio)
    VirtualReplicas((slow, fast)).run(64)
    assert slow.job.baseline is not None
    times_s, energies_j, _ = zip(*fast.history[-4:], strict=True)
    return sum(energies_j) / 4, max(times_s) / slow.job.baseline.iteration_time_s


@pytest.mark.thorough
def test_replicas_that_differ_share_the_permitted_slowdown_of_the_training() -> None:
    """The sum of their frontiers is least where all take as long; a plan for the slowest one's own pace would wait."""
    own_j, own_ratio = energy_beside_a_slower_replica(0.0)
    shared_j, shared_ratio = energy_beside_a_slower_replica(0.05)

    assert shared_j < 0.98 * own_j
    assert max(own_ratio, shared_ratio) <= 1.06


@pytest.mark.thorough
@pytest.mark.parametrize("together", [VirtualReplicas, ReplicasOnHosts])
def test_a_replica_slowed_by_its_plan_is_no_straggler(together: type[VirtualReplicas]) -> None:
    permitted, other = replica(RememberedBubbleAware(), max_slowdown_ratio=0.1), replica(FullSpeed())
    training = together((permitted, other))

    training.run(40)

    assert permitted.history[-1][0] > 1.05 * permitted.job.baseline.iteration_time_s  # type: ignore[union-attr]
    assert training.changes == []
    assert other.job.target.straggler_time_s is None
    assert other.pace.own_time_s == pytest.approx(permitted.pace.own_time_s, rel=0.005)


def test_noise_alone_makes_no_replica_a_straggler() -> None:
    training = VirtualReplicas(tuple(replica(FullSpeed(), noise_ratio=0.01, seed=seed) for seed in (1, 2, 3)))

    training.run(80)

    assert training.changes == []


@pytest.mark.parametrize("together", [VirtualReplicas, ReplicasOnHosts])
def test_a_straggler_from_the_start_is_followed_and_its_wait_is_not_in_the_baseline(
    together: type[VirtualReplicas],
) -> None:
    slow, fast = replica(FullSpeed(), scale=1.15), replica(FullSpeed())
    training = together((slow, fast))

    training.run(30)

    assert fast.job.baseline is not None
    assert slow.job.baseline is not None
    ratio = slow.job.baseline.iteration_time_s / fast.job.baseline.iteration_time_s
    assert ratio == pytest.approx(1.15, abs=0.01)
    assert fast.job.target.straggler_time_s == pytest.approx(slow.job.baseline.iteration_time_s, rel=0.01)


@pytest.mark.thorough
def test_iterations_at_straggler_pace_count_neither_as_faults_nor_as_savings() -> None:
    proof = {"proof_iterations": JobRules().proof_iterations}
    slow, fast = replica(FullSpeed(), slow_ratio=1.5, **proof), replica(RememberedBubbleAware(), **proof)
    training = VirtualReplicas((slow, fast))

    training.run(SLOW_UNTIL + 50)

    saving = fast.job.knowledge.saving()
    assert fast.job.phase is JobPhase.TUNED
    assert fast.job.faults.num_faults == 0
    assert saving is not None
    assert saving.slowdown_ratio.high < 0.01
    assert PROOF_PLAN_ID not in {plan_id for _, _, plan_id in fast.history[SLOW_FROM + 5 : SLOW_UNTIL]}
