"""Power limits in plans: their range, full speed without them, the iterations that they disturb, and their storage."""

from dataclasses import replace

import pytest

from gpuenergyd.core.job.description import stage_gpu
from gpuenergyd.core.job.issued_plans import SETTLING_ITERATIONS, IssuedPlans
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, check_plan, full_speed_plan
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.errors import PlanError
from gpuenergyd.store.encoding.compressed_json import decode_clocks, encode_clocks
from gpuenergyd.wire.daemon_codec import decode, encode

SCHEDULE = one_forward_one_backward(2, 2)
CLOCKS = [(1410, 1200)] * 2


def limited(*limits_w: float | None) -> ClockPlan:
    ranks = tuple(
        RankClocks(r, (None,) * len(order), power_limit_w=limits_w[r]) for r, order in enumerate(SCHEDULE.orders)
    )
    return ClockPlan("limited", PlanPurpose.TUNED, ranks)


def test_a_limit_must_be_within_the_range_of_its_gpus() -> None:
    plan = limited(300.0, None)
    check_plan(plan, SCHEDULE, CLOCKS, [(100.0, 400.0), None])

    with pytest.raises(PlanError, match="rank 0 cannot be limited to 300 W; supported: 100 to 250 W"):
        check_plan(plan, SCHEDULE, CLOCKS, [(100.0, 250.0), None])
    with pytest.raises(PlanError, match="the power of rank 0 cannot be limited"):
        check_plan(plan, SCHEDULE, CLOCKS)


def test_only_ranks_with_a_limit_are_listed() -> None:
    plan = limited(None, 250.0)

    assert plan.power_limits_w == ((1, 250.0),)
    assert not plan.sets_clocks


def test_full_speed_without_clocks_only_withdraws_limits() -> None:
    plan = full_speed_plan("block", SCHEDULE, CLOCKS, reason="proof", sets_clocks=False)

    assert len(plan.ranks) == 2
    assert not plan.sets_clocks
    assert plan.power_limits_w == ()
    assert full_speed_plan("block", SCHEDULE, CLOCKS, reason="proof").sets_clocks


def test_the_first_iterations_under_another_limit_do_not_count() -> None:
    plans = IssuedPlans()
    first = plans.send(limited(300.0, 300.0), last_reported=10).apply_at_iteration
    plans.send(limited(300.0, 300.0), last_reported=20)
    second = plans.send(full_speed_plan("block", SCHEDULE, CLOCKS, reason=""), last_reported=30).apply_at_iteration

    again = IssuedPlans()
    again.restore(plans.snapshot())
    settling = {at + k for at in (first, second) for k in range(SETTLING_ITERATIONS)}
    for own in (plans, again):
        assert {i for i in range(50) if own.is_settling(i)} == settling
    again.send(full_speed_plan("block", SCHEDULE, CLOCKS, reason=""), last_reported=40)
    assert not again.is_settling(again.last_apply_at)


def test_a_stage_has_the_limits_that_all_its_gpus_have() -> None:
    gpu = GpuView("a", "A100", (1410,), 0.01, power_limit_range_w=(100.0, 400.0))

    merged = stage_gpu(0, [gpu, replace(gpu, power_limit_range_w=(150.0, 300.0))])

    assert merged.power_limit_range_w == (150.0, 300.0)
    assert stage_gpu(0, [gpu, replace(gpu, power_limit_range_w=None)]).power_limit_range_w is None
    assert stage_gpu(0, [gpu, replace(gpu, power_limit_range_w=(400.0, 500.0))]).power_limit_range_w is None


def test_limits_are_stored_and_sent_to_the_policy_host() -> None:
    plan = limited(300.0, None)

    assert decode_clocks(encode_clocks(plan.ranks)) == plan.ranks
    assert decode(encode(plan), ClockPlan, max_bytes=10_000) == plan
