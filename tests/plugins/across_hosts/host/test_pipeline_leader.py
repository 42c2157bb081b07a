"""The pipeline leader plans for all members from their reports, and its replies carry one slice for each stage."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from gpuenergyd.core.job.messages import SendPlan, TargetChanged
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import GpuView, JobView, Lever
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import JobError, ProtocolError
from gpuenergyd.store.records import ControlEventRecord, EstimateRecord
from gpuenergyd_across_hosts.messages.pipeline_messages import PipelineReply
from tests.support.job_run import CLOCKS, FIRST_ASKED, SCHEDULE, plan
from tests.support.led_pipeline import LedPipeline, UniformPolicy

ASKED = FIRST_ASKED + 2
"""Iterations after which the plan of the first answer is in the reply."""


async def test_members_run_at_full_speed_until_the_baseline_is_measured() -> None:
    pipeline = LedPipeline()

    reply = await pipeline.train(FIRST_ASKED - 1)

    assert (reply.pipeline_id, reply.plan_id, reply.slices) == ("whole", None, ())
    assert pipeline.policy.views == []


async def test_the_policy_plans_for_all_members_and_each_stage_gets_its_slice() -> None:
    pipeline = LedPipeline()

    reply = await pipeline.train(ASKED)

    (view,) = pipeline.policy.views[:1]
    assert [gpu.gpu_uuid for gpu in view.gpus] == ["GPU-0", "GPU-1"]
    assert reply.plan_id is not None
    assert reply.plan_id.startswith("whole.")
    assert [one.clocks for one in reply.slices] == [((len(order), ((1200, 0, 0),)),) for order in SCHEDULE.orders]
    assert {one.plan_id for one in reply.slices} == {reply.plan_id}
    assert {one.purpose for one in reply.slices} == {PlanPurpose.TUNED}
    assert {one.straggler_time_s for one in reply.slices} == {None}


@pytest.mark.parametrize("rights", [{"is_observing": True}, {"levers": frozenset({Lever.POWER_LIMITS})}])
async def test_where_clocks_may_not_be_set_no_plan_is_asked_for(rights: Any) -> None:
    pipeline = LedPipeline(**rights)

    reply = await pipeline.train(2 * ASKED)

    assert pipeline.policy.views == []
    assert reply.slices == ()


async def test_an_iteration_counts_once_all_stages_have_reported_it() -> None:
    pipeline = LedPipeline()
    ahead = pipeline.part(0)
    pipeline.index = -1
    await pipeline.report(ahead)
    assert pipeline.leader.job.num_iterations == 0
    pipeline.index = 0
    reply = await pipeline.report(ahead, pipeline.part(1))
    assert (pipeline.leader.job.num_iterations, reply.merged_iteration) == (1, 0)
    await pipeline.report(ahead, pipeline.part(1))  # repeated
    assert pipeline.leader.job.num_iterations == 1


async def test_a_report_whose_facts_are_not_known_is_ignored_and_its_facts_are_asked_for() -> None:
    pipeline = LedPipeline()
    await pipeline.report()
    pipeline.index += 1
    other = pipeline.part(1, facts_id="of another order")
    reply = await pipeline.report(pipeline.part(0), other)
    assert (reply.missing_facts, reply.merged_iteration) == (((1, 0),), 0)
    reply = await pipeline.report(other, facts=(pipeline.facts(1, facts_id="of another order"),))
    assert (reply.missing_facts, reply.merged_iteration) == ((), 1)


async def test_a_leader_that_has_lost_everything_asks_for_all_facts_and_goes_on() -> None:
    before, after = LedPipeline(), LedPipeline()
    await before.train(3)
    after.index, after.are_facts_known = before.index, True
    reply = await after.report()
    assert (reply.missing_facts, reply.merged_iteration) == (((0, 0), (1, 0)), -1)
    after.are_facts_known = False
    reply = await after.report()
    assert (reply.missing_facts, reply.merged_iteration) == ((), after.index)


async def test_slices_are_sent_once_and_plans_of_another_daemon_have_other_ids() -> None:
    pipeline, other = LedPipeline(), LedPipeline()
    reply = await pipeline.train(ASKED)
    again = await pipeline.report(known_plan_id=reply.plan_id)
    assert reply.slices
    assert (again.plan_id, again.slices) == (reply.plan_id, ())
    assert (await other.train(ASKED)).plan_id != reply.plan_id


def test_the_parts_of_a_stage_on_several_hosts_are_merged() -> None:
    async def run() -> LedPipeline:
        pipeline = LedPipeline()
        pipeline.leader = replace(pipeline.leader, num_tp_ranks=2)
        split = pipeline.part(0), pipeline.part(0, (1,))
        whole = pipeline.part(1, (0, 1))
        facts = pipeline.facts(0), pipeline.facts(0, (1,)), pipeline.facts(1, (0, 1))
        reply = await pipeline.report(*split, num_tp_ranks=2, facts=facts)
        assert reply.merged_iteration == -1
        await pipeline.report(whole, num_tp_ranks=2)
        return pipeline

    (observation,) = asyncio.run(run()).leader.job.observations
    assert [rank.energy_j for rank in observation.ranks] == [200.0, 200.0]


def test_the_size_of_a_pipeline_cannot_change_during_a_run() -> None:
    async def run() -> None:
        pipeline = LedPipeline()
        await pipeline.report()
        await pipeline.report(num_tp_ranks=2)

    with pytest.raises(ProtocolError, match="2 x 2 ranks; the pipeline began with 2 x 1"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 1}, "version 1 of pipeline messages; this daemon speaks version 5"),
        ({"tp_ranks": (1, 0)}, r"tp_ranks \[1, 0\] must ascend within \[0, 1\)"),
        ({"pp_rank": 7}, r"must be in \[0, 2\)"),
        ({"order": ((10**9, ((("F", 0), 0, 1),)),)}, "all rows at most"),
        ({"order": ((1, ((("X", 0), 0, 1),)),)}, "instruction kind 'X'"),
        ({"gpu": GpuView("GPU-0", "A100", (), 0.01)}, "supported_sm_clocks_mhz must be a non-empty"),
        (
            {"gpu": GpuView("GPU-0", "A100", CLOCKS, 0.01, power_limit_range_w=(300.0, 100.0))},
            r"power_limit_range_w \(300.0, 100.0\) must be two ascending powers",
        ),
        ({"gpu": GpuView("GPU-0", "A100", CLOCKS, -1.0)}, "switch_latency_s -1.0 must be in"),
        ({"gpu": GpuView("GPU-0", "A100", CLOCKS, 0.01, num_gpus=0)}, "num_gpus 0 must be in"),
        ({"gpu": GpuView("GPU-0", "A100", CLOCKS, 0.01, num_host_gpus=10**9)}, "num_host_gpus 1000000000 in"),
        ({"gpu": GpuView("GPU-0", "A100", CLOCKS, 0.01, power_limit_range_w=(-1.0, 400.0))}, "two ascending powers"),
        ({"gpu": GpuView("GPU-0", "A100", CLOCKS, 0.01, power_limit_range_w=(400.0, 100.0))}, "two ascending powers"),
    ],
)
async def test_facts_out_of_range_are_refused(changes: dict[str, Any], problem: str) -> None:
    pipeline = LedPipeline()

    with pytest.raises(ProtocolError, match=problem):
        await pipeline.report(facts=(replace(pipeline.facts(0), **changes),))


def test_the_hosts_of_a_stage_must_run_one_order_and_have_a_clock_in_common() -> None:
    def report(**changes: Any) -> PipelineReply:
        pipeline = LedPipeline()
        pipeline.leader = replace(pipeline.leader, num_tp_ranks=2)
        facts = (pipeline.facts(0), pipeline.facts(0, (1,), **changes), pipeline.facts(1, (0, 1)))
        return asyncio.run(pipeline.report(facts=facts, num_tp_ranks=2))

    with pytest.raises(JobError, match="the hosts of pipeline rank 0 run different orders"):
        report(order=LedPipeline().facts(1).order)
    with pytest.raises(JobError, match="have no clock in common"):
        report(gpu=GpuView("GPU-9", "A100", (CLOCKS[0] + 1,), 0.01))


async def test_the_busy_time_under_a_plan_is_the_same_when_its_successor_has_been_sent() -> None:
    first = plan("first")
    mixed = tuple(
        replace(
            rank,
            sm_clocks_mhz=tuple(
                CLOCKS[0] if (k < 4) == (rank.pp_rank == 0) else 600 for k in range(len(rank.sm_clocks_mhz))
            ),
        )
        for rank in first.ranks
    )
    pipeline = LedPipeline()
    pipeline.policy.plan = replace(first, ranks=mixed)
    plan_id = (await pipeline.train(ASKED)).plan_id
    pipeline.clocks_mhz = CLOCKS[0], 600
    await pipeline.train(2)
    pipeline.policy.plan = plan("second")
    while (await pipeline.train(1)).plan_id == plan_id:
        pass
    pipeline.plan_id = plan_id
    await pipeline.report()
    busy_s = [o.busy_s for o in pipeline.leader.job.observations if o.plan_id == "first"]

    assert len(busy_s) > 2
    assert busy_s == [pytest.approx(busy_s[0])] * len(busy_s)


async def test_a_new_target_is_planned_for() -> None:
    pipeline = LedPipeline()
    await pipeline.train(ASKED)
    pipeline.leader.handle(TargetChanged(PerformanceTarget(max_slowdown_ratio=0.1)))
    await pipeline.train(2)

    assert pipeline.policy.views[0].target.max_slowdown_ratio == 0.0
    assert pipeline.policy.views[-1].target.max_slowdown_ratio == 0.1


async def test_a_block_at_full_speed_is_in_the_reply_and_the_plan_stays_installed() -> None:
    pipeline = LedPipeline()
    reply = await pipeline.train(ASKED + JobRules().first_proof_after)
    plan_id = reply.plan_id
    while reply.block is None:
        reply = await pipeline.train(1)
    assert reply.block[1] == JobRules().proof_iterations
    assert reply.plan_id == plan_id
    assert (await pipeline.report(known_plan_id=plan_id)).slices == ()
    pipeline.plan_id = "baseline"
    await pipeline.train(1, known_plan_id=plan_id)
    pipeline.plan_id = plan_id
    again = await pipeline.train(3, known_plan_id=plan_id)
    assert again.block == reply.block, "the leading rank knows it by its id"
    iterations = pipeline.leader.job.knowledge.iterations.kept
    assert [o.plan_id for o in iterations[-3:]] == ["tuned"] * 3


async def test_slices_say_what_another_target_than_the_registered_one_permits() -> None:
    pipeline = LedPipeline()
    registered = await pipeline.train(ASKED)
    pipeline.leader.handle(TargetChanged(PerformanceTarget(permitted_time_s=1.25)))
    await pipeline.train(1)
    pipeline.policy.plan = plan("slower")
    before, after = registered, await pipeline.train(3)
    assert {one.permitted_slowdown_ratio for one in before.slices} == {None}
    assert [one.permitted_slowdown_ratio for one in after.slices] == [pytest.approx(0.25)] * 2


async def test_the_saving_of_the_whole_is_recorded_at_the_end_under_the_id_of_the_pipeline() -> None:
    pipeline = LedPipeline()
    block_id, num_left = None, 0
    for _ in range(ASKED + 60):
        reply = await pipeline.train(1)
        if reply.block is not None and reply.block[0] != block_id:
            block_id, num_left = reply.block
        if num_left:
            pipeline.plan_id, num_left = "baseline", num_left - 1
    pipeline.leader.close()

    estimate = pipeline.history.events[-1]
    assert isinstance(estimate, EstimateRecord)
    assert (estimate.job_id, estimate.baseline_energy_j) == ("whole", 200.0)
    assert estimate.saving_ratio == pytest.approx(0.0)


async def test_the_pace_of_a_slower_replica_is_followed_recorded_and_shown_in_the_status() -> None:
    pipeline = LedPipeline()
    await pipeline.train(ASKED + 4)
    assert pipeline.leader.status_fields()["straggler_time_s"] is None
    await pipeline.train(40, slowest_other_time_s=2.0)

    status = pipeline.leader.status_fields()
    assert status["straggler_time_s"] == pytest.approx(2.0, rel=0.006), "the plan was prepared for a shorter pace"
    assert status["straggler_reason"]
    events = [record for record in pipeline.history.events if isinstance(record, ControlEventRecord)]
    assert "straggler" in [event.action for event in events]
    assert {event.job_id for event in events} == {"own"}
    assert {event.actor for event in events} == {"pipeline whole"}


@pytest.mark.parametrize("name", ["slowest_other_time_s", "age_s", "least_other_overhead_s"])
@pytest.mark.parametrize("time_s", [-1.0, math.nan, math.inf, 1e9])
async def test_an_invalid_pace_of_another_replica_is_refused_with_its_value(name: str, time_s: float) -> None:
    with pytest.raises(ProtocolError, match=f"{name} {time_s}"):
        await LedPipeline().report(**{name: time_s})


async def test_waiting_for_a_replica_with_less_overhead_does_not_make_the_own_pace_slower() -> None:
    """Else two replicas follow each other: the one that waits seems slow, and is followed all the more."""
    overhead_s = 0.01
    pipeline = LedPipeline()
    await pipeline.train(ASKED)
    alone_s = (await pipeline.train(1, least_other_overhead_s=overhead_s)).own_time_s
    assert alone_s is not None
    pipeline.iteration_time_s *= 1.1
    reply = await pipeline.train(100, least_other_overhead_s=overhead_s)

    assert reply.own_time_s == pytest.approx(alone_s)
    newest = pipeline.leader.job.observations[-1]
    assert newest.busy_s is not None
    assert newest.waited_s == pytest.approx(newest.iteration_time_s - newest.busy_s - overhead_s)


class PolicyOfPaces(UniformPolicy):
    """Answers a question about a straggler's pace with another plan."""

    for_straggler = plan("slower", clock=900)

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan:
        found = await super().next_plan(job_id, policy, view)
        return self.for_straggler if view.target.is_forced else found


async def followed_straggler(policy: PolicyOfPaces) -> tuple[LedPipeline, PipelineReply, PipelineReply]:
    """Return a pipeline, and the replies to the first and second report of a straggler."""
    pipeline = LedPipeline(policy=policy)
    await pipeline.train(ASKED + 4)
    first = await pipeline.train(1, slowest_other_time_s=1.3)
    return pipeline, first, await pipeline.train(1, slowest_other_time_s=1.3)


async def test_a_plan_for_a_straggler_is_prepared_at_its_first_reading_and_sent_with_the_second() -> None:
    pipeline, first, second = await followed_straggler(PolicyOfPaces())

    assert first.straggler_time_s is None
    assert second.straggler_time_s == pytest.approx(1.3, rel=0.006)
    assert second.slices[0].straggler_time_s == pytest.approx(1.3, rel=0.006)
    assert second.plan_id != first.plan_id
    forced = [view for view in pipeline.policy.views if view.target.is_forced]
    assert len(forced) == 1, "asked once, before the straggler was confirmed"


@pytest.mark.parametrize(("clock_mhz", "may_be_mixed"), [(900, True), (1410, False)])
async def test_a_straggler_s_plan_may_replace_the_one_in_force_at_once_if_no_mix_of_both_is_slower(
    clock_mhz: int, *, may_be_mixed: bool
) -> None:
    policy = PolicyOfPaces()
    policy.for_straggler = plan("other", clock=clock_mhz)

    _, first, second = await followed_straggler(policy)

    assert first.replaces == ()
    assert second.replaces == ((first.plan_id,) if may_be_mixed else ())


async def test_a_suspected_straggler_that_is_none_changes_nothing() -> None:
    pipeline = LedPipeline(policy=PolicyOfPaces())
    before = await pipeline.train(ASKED + 4)
    await pipeline.train(1, slowest_other_time_s=1.3)
    after = await pipeline.train(4, slowest_other_time_s=1.0)

    assert (after.plan_id, after.straggler_time_s) == (before.plan_id, None)


def test_the_epochs_of_old_plans_are_forgotten() -> None:
    delivery = LedPipeline().leader._delivery
    ids = []
    for epoch in range(1, 200):
        delivery.send(SendPlan(plan(f"tuned-{epoch}"), epoch, epoch))
        ids.append(delivery.plan_id)

    assert [delivery.epoch_of(plan_id) for plan_id in ids[-3:]] == [197, 198, 199]
    assert delivery.epoch_of(ids[0]) is None
    assert delivery.epoch_of("baseline") == 0
