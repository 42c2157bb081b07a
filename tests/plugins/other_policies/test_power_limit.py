"""The power-limit policy: one given limit on all GPUs, within the permitted slowdown, or full speed with the reason."""

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import AccountRules
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.errors import UsageError
from gpuenergyd_other_policies.power_limit import EqualPowerLimit
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.plain_jobs import GpuLoopWork, loop_training, random_gpu_work

COMPUTE_BOUND = random_gpu_work(0, "compute-bound")
FULL_SPEED_W = COMPUTE_BOUND.power_w(COMPUTE_BOUND.gpu.supported_sm_clocks_mhz[0])


def train(
    work: GpuLoopWork, watts: int, *, max_slowdown_ratio: float, levers: frozenset[Lever] = frozenset(Lever)
) -> VirtualTraining:
    run = loop_training(
        EqualPowerLimit(watts=str(watts)),
        work,
        max_slowdown_ratio=max_slowdown_ratio,
        seed=1,
        levers=levers,
        rules=JobRules(account=AccountRules(first_income_s=60.0)),  # limits that are too slow are the guard's
        power_limit_range_w=(work.gpu.min_power_limit_w, work.gpu.default_power_limit_w),
    )
    run.run(60)
    return run


@pytest.mark.parametrize("levers", [frozenset(Lever), frozenset({Lever.POWER_LIMITS})])
def test_every_gpu_gets_the_limit_and_no_other_plan_is_tried(levers: frozenset[Lever]) -> None:
    limit_w = round(0.8 * FULL_SPEED_W)

    run = train(COMPUTE_BOUND, limit_w, max_slowdown_ratio=0.3, levers=levers)

    plan = run.job.current_plan
    assert run.job.phase is JobPhase.TUNED
    assert dict(plan.power_limits_w) == {0: limit_w}
    assert run.job.knowledge.num_iterations_for[PlanPurpose.TRIAL] == 0
    estimate = run.job.estimate()
    assert estimate is not None
    assert estimate.saving is not None
    assert estimate.saving.saving_ratio is not None
    assert estimate.saving.saving_ratio.low > 0


def test_a_limit_that_is_too_slow_is_withdrawn_for_good() -> None:
    limit_w = round(0.6 * FULL_SPEED_W)

    run = train(COMPUTE_BOUND, limit_w, max_slowdown_ratio=0.01)

    assert not run.job.current_plan.power_limits_w
    assert f"a limit of {limit_w} W takes" in run.job.current_plan.reason


@pytest.mark.parametrize(
    ("watts", "levers", "reason"),
    [(20, frozenset(Lever), "20 W is out of range"), (300, frozenset({Lever.CLOCKS}), "cannot be limited")],
)
def test_what_cannot_be_set_stays_at_full_speed_with_the_reason(
    watts: int, levers: frozenset[Lever], reason: str
) -> None:
    run = train(COMPUTE_BOUND, watts, max_slowdown_ratio=0.3, levers=levers)

    assert not run.job.current_plan.power_limits_w
    assert reason in run.job.phase_reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "watts = missing: must be a whole number from 1 to 5000"),
        ({"watts": "0"}, "watts = 0"),
        ({"watts": "3e2"}, "watts = 3e2"),
        ({"watts": "300", "clock": "1"}, "no option 'clock'; valid is watts"),
    ],
)
def test_a_limit_is_given_in_whole_watts(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EqualPowerLimit(**options)
