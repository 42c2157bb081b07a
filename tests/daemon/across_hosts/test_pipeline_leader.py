"""The pipeline leader plans for all members from their reports, and its replies carry one slice for each stage."""

import asyncio
from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import JobError, ProtocolError
from tests.support.job_run import CLOCKS, FIRST_ASKED, SCHEDULE
from tests.support.led_pipeline import LedPipeline

ASKED = FIRST_ASKED + 2
"""Iterations after which the plan of the first answer is in the reply."""


def test_members_run_at_full_speed_until_the_baseline_is_measured() -> None:
    pipeline = LedPipeline()

    reply = asyncio.run(pipeline.train(FIRST_ASKED - 1))

    assert (reply.pipeline_id, reply.plan_id, reply.slices) == ("whole", None, ())
    assert pipeline.policy.views == []


def test_the_policy_plans_for_all_members_and_each_stage_gets_its_slice() -> None:
    pipeline = LedPipeline()

    reply = asyncio.run(pipeline.train(ASKED))

    (view,) = pipeline.policy.views[:1]
    assert [gpu.gpu_uuid for gpu in view.gpus] == ["GPU-0", "GPU-1"]
    assert reply.plan_id is not None
    assert reply.plan_id.startswith("whole.")
    assert [one.sm_clocks_mhz for one in reply.slices] == [(1200,) * len(order) for order in SCHEDULE.orders]
    assert {one.plan_id for one in reply.slices} == {reply.plan_id}
    assert {one.purpose for one in reply.slices} == {PlanPurpose.TUNED}
    assert {one.straggler_time_s for one in reply.slices} == {None}


def test_where_clocks_may_not_be_set_no_plan_is_asked_for() -> None:
    pipeline = LedPipeline(is_observing=True)

    reply = asyncio.run(pipeline.train(ASKED))

    assert pipeline.policy.views == []
    assert reply.slices == ()


def test_an_iteration_counts_once_all_members_have_reported_it() -> None:
    async def run() -> None:
        pipeline = LedPipeline()
        ahead = pipeline.member(0)
        pipeline.index = -1
        behind = pipeline.member(1)
        await pipeline.report(ahead, behind)
        assert pipeline.leader.job.num_iterations == 0
        pipeline.index = 0
        await pipeline.report(ahead, pipeline.member(1))
        await pipeline.report(ahead, pipeline.member(1))  # repeated
        assert pipeline.leader.job.num_iterations == 1

    asyncio.run(run())


def test_a_report_must_hold_each_member_once() -> None:
    pipeline = LedPipeline()

    with pytest.raises(ProtocolError, match="must be given once"):
        asyncio.run(pipeline.report(pipeline.member(0)))
    with pytest.raises(ProtocolError, match="must be given once"):
        asyncio.run(pipeline.report(pipeline.member(0), pipeline.member(0)))


def test_members_cannot_change_during_a_run() -> None:
    async def run() -> None:
        pipeline = LedPipeline()
        await pipeline.report()
        doubled = [replace(pipeline.member(pp), tp_rank=tp) for pp in range(2) for tp in range(2)]
        await pipeline.report(*doubled, num_tp_ranks=2)

    with pytest.raises(ProtocolError, match="4 members; the pipeline began with 2"):
        asyncio.run(run())


def test_tensor_parallel_ranks_of_a_stage_must_run_one_order_and_have_a_clock_in_common() -> None:
    pipeline = LedPipeline()
    plain = [pipeline.member(pp) for pp in range(2)]
    twins = [replace(member, tp_rank=1) for member in plain]
    other_order = replace(twins[0], state=replace(twins[0].state, order=twins[0].state.order[::-1]))
    gpu = replace(twins[0].state.gpu, supported_sm_clocks_mhz=(CLOCKS[0] + 1,))
    other_clocks = replace(twins[0], state=replace(twins[0].state, gpu=gpu))

    with pytest.raises(JobError, match="tensor-parallel rank 1 of pipeline rank 0 runs another order"):
        asyncio.run(pipeline.report(*plain, other_order, twins[1], num_tp_ranks=2))
    with pytest.raises(JobError, match="the GPUs of pipeline rank 0 have no clock in common"):
        asyncio.run(LedPipeline().report(*plain, other_clocks, twins[1], num_tp_ranks=2))


def test_a_new_target_is_planned_for() -> None:
    async def run() -> LedPipeline:
        pipeline = LedPipeline()
        await pipeline.train(ASKED)
        pipeline.target = PerformanceTarget(max_slowdown_ratio=0.1)
        await pipeline.train(2)
        return pipeline

    pipeline = asyncio.run(run())

    assert pipeline.policy.views[0].target.max_slowdown_ratio == 0.0
    assert pipeline.policy.views[-1].target.max_slowdown_ratio == 0.1


def test_the_pace_of_a_slower_replica_is_followed_recorded_and_shown_in_the_status() -> None:
    async def run() -> LedPipeline:
        pipeline = LedPipeline()
        await pipeline.train(ASKED + 4)
        assert pipeline.leader.status_fields()["straggler_time_s"] is None
        await pipeline.train(40, slowest_other_time_s=2.0)
        return pipeline

    pipeline = asyncio.run(run())

    status = pipeline.leader.status_fields()
    assert status["straggler_time_s"] == pytest.approx(2.0)
    assert status["straggler_reason"]
    actions = [event.action for event in pipeline.history.events]
    assert "straggler" in actions
    assert {event.job_id for event in pipeline.history.events} == {"own"}
    assert {event.actor for event in pipeline.history.events} == {"pipeline whole"}
