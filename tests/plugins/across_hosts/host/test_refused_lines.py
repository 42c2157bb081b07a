"""Every refusal of a daemon in a pipeline across hosts, with the line that its log, status and history have."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.reorder import RankMemory, ReorderOffer
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.daemon.jobs.training_budget import TrainingTarget
from gpuenergyd.errors import JobError, ProtocolError
from gpuenergyd.wire.messages import TrainingBudget
from gpuenergyd_across_hosts.host import host_stage, pipeline_member
from gpuenergyd_across_hosts.host.validation import check_memory
from gpuenergyd_across_hosts.messages.compact_observations import pack
from gpuenergyd_across_hosts.messages.pipeline_messages import MemberPlan, MemberQuery, PostedPlan
from tests.support.host_of_siblings import refused, run_at_once, running_host
from tests.support.job_run import CLOCKS, FIRST_ASKED, SCHEDULE
from tests.support.job_stage import ME
from tests.support.led_pipeline import LedPipeline

PLAN = PostedPlan("p.1", PlanPurpose.TUNED, ((4, ((1200, 0, 0),)),), ())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"plan_id": ""}, "plan_id and reason: at most 256 characters, and a plan_id is not empty"),
        ({"reason": "r" * 500}, "plan_id and reason: at most 256 characters, and a plan_id is not empty"),
        ({"straggler_time_s": -1.0}, r"straggler_time_s -1.0 must be in \(0, 86400\) s"),
        ({"permitted_slowdown_ratio": -0.5}, r"permitted_slowdown_ratio -0.5 must be in \[0, 100\)"),
        ({"permitted_slowdown_ratio": 1e9}, r"permitted_slowdown_ratio 1000000000.0 must be in \[0, 100\)"),
        ({"clocks": ((4, ((333, 0, 0),)),)}, "cannot run at"),
        ({"changes": ((1, ((("X", 0, 0, 1200), 0, 1),)),)}, "instruction kind 'X'; known: "),
        ({"clocks": ((0, ((1200, 0, 0),)),)}, "a block repeated 0 times: counts are positive, all rows at most"),
    ],
)
async def test_a_posted_plan(changes: dict[str, Any], line: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running_host() as host:
        message = MemberPlan(host.join(0), replace(PLAN, **changes))
        refused(host, lambda: run_at_once(host.members.post_plan(message, ME)), line, caplog)


async def test_a_plan_for_a_rank_whose_order_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    async with running_host() as host:
        token = host.join(0)
        (runner,) = host.stage.jobs
        runner.job.ranks.schedule = None
        message = MemberPlan(token, PLAN)
        refused(
            host,
            lambda: run_at_once(host.members.post_plan(message, ME)),
            "the rank has not joined its job yet",
            caplog,
        )


async def test_a_message_of_an_ordinary_job() -> None:
    async with running_host() as host:
        token = host.join(0, is_pipeline_member=False)
        with pytest.raises(JobError, match=r"job \S+ is not a member of a pipeline across hosts"):
            host.members.state(MemberQuery(token), ME)


async def test_another_number_of_microbatches_than_is_registered_in_range() -> None:
    async with running_host() as host:
        for changes, line in (
            ({"num_microbatches": 0}, r"num_microbatches 0 must be in \[1, "),
            ({"order": ()}, "order: a rank must run at least one instruction"),
            ({"num_stage_ranks": 2}, "num_stage_ranks 2 must be 1 for a member of a pipeline across hosts"),
        ):
            with pytest.raises(ProtocolError, match=line):
                host.join(0, **changes)


async def test_more_kinds_of_instruction_than_a_message_can_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_stage, "MAX_CLASSES", 1)

    async with running_host() as host:
        token = host.join(0)
        line = "pipeline rank 0: 2 kinds of instruction; at most 1 are accepted"
        refused(host, lambda: host.ask(token, 0), line, caplog)


async def test_a_plan_that_is_too_long_to_be_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reply is that of a leader; a plan of that size would need some 100,000 clock changes without a pattern."""
    monkeypatch.setattr(pipeline_member, "MAX_REPLY_BYTES", 100)
    reply = await LedPipeline().train(FIRST_ASKED + 2)
    assert reply.slices

    class Leader:
        """Has a plan."""

        async def handle_report(self, report: object) -> object:
            del report
            return reply

        def close(self) -> None:
            """Do nothing."""

    async with running_host() as host:
        token = host.join(0)
        (runner,) = host.stage.jobs
        leader: Any = Leader()
        leader.job_id = "whole"
        host.members._leaders[runner.job_id] = leader
        report: Any = type("Report", (), {"rank_token": token})()
        line = r"the plan takes \d+ bytes; at most 100 can be sent"
        refused(host, lambda: run_at_once(host.members.plan_pipeline(report, ME)), line, caplog)


def observation(time_s: float, sm_clock_mhz: int = CLOCKS[0]) -> IterationObservation:
    samples = (InstructionSample(0, InstructionKind.F, (ClockShare(sm_clock_mhz, 0.1),), 4),)
    return IterationObservation(0, "baseline", time_s, samples, (RankEnergy(0, time_s, 1.0, ()),), turnarounds_s=(0.0,))


@pytest.mark.parametrize("bad", [observation(1e9), observation(1.0, 0)])
def test_times_and_clocks_out_of_range(bad: IterationObservation) -> None:
    pipeline = LedPipeline()
    text = pack([bad], host_stage.stage_classes(SCHEDULE.orders[0], ReorderOffer()), ("baseline",))

    with pytest.raises(
        ProtocolError, match=r"rank 0: iteration 0 must hold times in \[0, 86400\] s and positive clocks"
    ):
        asyncio.run(pipeline.report(pipeline.part(0, plan_ids=("baseline",), observations=text)))


@pytest.mark.parametrize("text", ["00000", "zz~zz"])
def test_observations_that_cannot_be_read(text: str) -> None:
    pipeline = LedPipeline()

    with pytest.raises(ProtocolError, match="malformed observations: "):
        asyncio.run(pipeline.report(pipeline.part(0, observations=text)))


def test_an_iteration_that_cannot_be_sent() -> None:
    bad = replace(observation(1.0), iteration_index=2**70)

    with pytest.raises(ProtocolError, match="iteration cannot be sent to the pipeline's leader: "):
        pack([bad], host_stage.stage_classes(SCHEDULE.orders[0], ReorderOffer()), ("baseline",))


def test_a_stage_whose_gpus_are_on_several_hosts() -> None:
    pipeline = LedPipeline()
    pipeline.leader = replace(pipeline.leader, num_tp_ranks=2)
    here, there = (GpuView(f"GPU-{host}", "A100", CLOCKS, 0.01, host=host) for host in ("a", "b"))
    facts = (pipeline.facts(0, gpu=here), pipeline.facts(0, (1,), gpu=there), pipeline.facts(1, (0, 1)))

    with pytest.raises(JobError, match="the ranks of pipeline stage 0 are on 2 hosts: all tensor-"):
        asyncio.run(pipeline.report(facts=facts, num_tp_ranks=2))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"permitted_slowdown_ratio": -0.1}, r"budget.permitted_slowdown_ratio -0.1 must be in \[0, 100\]"),
        ({"permitted_slowdown_ratio": float("nan")}, r"budget.permitted_slowdown_ratio nan must be in \[0, 100\]"),
        ({"age_s": -1.0}, r"budget.age_s -1.0 must be in \[0, 1e\+09\]"),
        ({"excess_s": float("inf")}, r"budget.excess_s inf must be in \[0, 1e\+09\]"),
    ],
)
def test_a_budget_of_the_training_out_of_range(changes: dict[str, Any], line: str) -> None:
    pipeline = LedPipeline()

    with pytest.raises(ProtocolError, match=line):
        TrainingTarget(pipeline.leader, None).handle(replace(TrainingBudget(is_first=False), **changes))


@pytest.mark.parametrize("name", ["free_bytes", "microbatch_bytes", "capacity_bytes", "free_in_order_bytes"])
@pytest.mark.parametrize("amount", [-1, 2**60])
def test_amounts_of_memory_out_of_range(name: str, amount: int) -> None:
    valid = RankMemory(0, 1, 2**60 - 1, None)
    check_memory("stage 1", valid)
    with pytest.raises(ProtocolError, match=r"stage 1: amounts of memory .* must be in \[0, 2\*\*60\) bytes"):
        check_memory("stage 1", replace(valid, **{name: amount}))
