"""Plain loops in virtual time under clocks, power limits or both: saving within the permitted slowdown, and proofs."""

import pytest

from gpuenergyd.core.job.issued_plans import PROOF_PLAN_ID
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.outcome import OutcomeKind, find_outcome
from gpuenergyd.core.policy_api.policy import ClockPolicy, Lever
from gpuenergyd_policies.cost import Cost
from gpuenergyd_policies.uniform import Uniform
from tests.support.plain_jobs import loop_training, random_loop_work

LIMIT_RANGE_W = (100.0, 400.0)


@pytest.mark.parametrize("levers", [tuple(Lever), (Lever.POWER_LIMITS,)])
@pytest.mark.parametrize("policy", [Cost(eta="1"), Uniform()])
def test_a_loop_saves_within_its_permitted_slowdown(policy: ClockPolicy, levers: tuple[Lever, ...]) -> None:
    run = loop_training(
        policy,
        random_loop_work(3),
        max_slowdown_ratio=0.1,
        seed=1,
        levers=frozenset(levers),
        power_limit_range_w=LIMIT_RANGE_W,
    )

    run.run(110)

    assert run.job.phase is JobPhase.TUNED
    assert find_outcome(run.job).kind is OutcomeKind.SAVED
    estimate = run.job.estimate()
    assert estimate is not None
    assert estimate.saving is not None
    assert estimate.saving.saving_ratio is not None
    assert estimate.saving.saving_ratio.estimate > 0.03
    assert estimate.saving.slowdown_ratio.estimate < 0.105
    assert any(plan_id == PROOF_PLAN_ID for _, _, plan_id in run.history)
    if levers == (Lever.POWER_LIMITS,):
        assert not any(changes for _, _, _, by_rank in run.slices for changes in by_rank)
        assert run.job.current_plan.power_limits_w


def test_settling_iterations_do_not_count() -> None:
    run = loop_training(
        Cost(),
        random_loop_work(3),
        max_slowdown_ratio=0.1,
        seed=1,
        levers=frozenset({Lever.POWER_LIMITS}),
        power_limit_range_w=LIMIT_RANGE_W,
    )

    run.run(60)

    changed_at = [at for (at, limits), (_, before) in zip(run.power_limits[1:], run.power_limits, strict=False)
                  if limits != before]  # fmt: skip
    regular = {o.iteration_index for o in run.job.observations if o.is_regular}
    assert changed_at
    assert not regular & {at + k for at in changed_at for k in (0, 1)}
