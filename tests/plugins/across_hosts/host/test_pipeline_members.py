"""Siblings of a stage are merged on their host, one of them carries, and every refusal is visible."""

import logging
import math
from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.wire import MAX_REPLY_BYTES
from gpuenergyd_across_hosts.host import host_stage
from gpuenergyd_across_hosts.messages.compact_observations import unpack
from gpuenergyd_across_hosts.messages.pipeline_messages import (
    MemberPlace,
    MemberPlan,
    PipelineReport,
    PlanAgreement,
    PostedPlan,
)
from tests.support.host_of_siblings import refused, run_at_once, running_host
from tests.support.job_stage import ME

CLASSES = host_stage.stage_classes


async def test_the_lowest_rank_carries_the_merged_observations_of_all() -> None:
    async with running_host() as host:
        first, second = host.join(0), host.join(1)
        for token, forward_s in ((first, 0.25), (second, 0.5)):
            host.observe(token, 0, forward_s)
        host.observe(first, 1, 0.25)
        host.ask(second, 1, iteration_index=3, installed=("p.1", "p.2"))
        reply = host.ask(first, 0, iteration_index=2, installed=("p.2",))

        assert reply.is_carrier
        assert reply.report is not None
        assert reply.facts is not None
        assert not host.ask(second, 1, iteration_index=3, installed=("p.1", "p.2")).is_carrier
        assert (reply.report.tp_ranks, reply.facts.tp_ranks) == ((0, 1), (0, 1))
        assert (reply.report.oldest_iteration, reply.report.newest_iteration) == (2, 3)
        assert reply.report.installed == ("p.2",)
        assert reply.facts.gpu.blocking_power_w == 160.0
        classes = host.members._stages[next(iter(host.members._stages))]._classes
        (merged,) = unpack(reply.report.observations, classes, reply.report.plan_ids)
        assert (merged.iteration_index, merged.energy_j) == (0, 200.0)
        assert {sample.time_s for sample in merged.instruction_samples} == {0.5}


async def test_facts_are_sent_once_and_observations_until_the_leader_has_them() -> None:
    async with running_host() as host:
        token = host.join(0)
        host.observe(token, 0, 0.25)
        before = host.ask(token, 0)
        assert before.facts is not None
        assert before.report is not None
        again = host.ask(token, 0, known_facts=before.facts.facts_id)
        assert again.facts is None
        assert again.report == before.report
        after = host.ask(token, 0, known_facts="older facts", agreement=PlanAgreement(merged_iteration=0))
        assert after.facts == before.facts
        assert after.report is not None
        assert after.report.observations == ""


async def test_only_plans_of_the_agreement_are_reported_as_installed() -> None:
    async with running_host() as host:
        token = host.join(0)
        installed = tuple(f"p.{number}" for number in range(8))
        reply = host.ask(token, 0, installed=installed, agreement=PlanAgreement("p.7", (("p.6", 3, 9), ("p.9", 9, 12))))
        assert reply.report is not None
        assert reply.report.installed == ("p.6", "p.7")


async def test_the_agreement_passes_from_the_carrying_rank_to_the_others() -> None:
    async with running_host() as host:
        first, second = host.join(0), host.join(1)
        agreement = PlanAgreement("p.1", (("p.1", 3, 9),), None, 2)
        assert host.ask(second, 1).agreement is None
        host.ask(first, 0, agreement=agreement)
        assert host.ask(second, 1).agreement == agreement


async def test_ranks_of_another_run_are_no_siblings() -> None:
    async with running_host() as host:
        first, second = host.join(0), host.join(1)
        assert host.ask(first, 0).is_carrier
        assert host.ask(second, 1, run="another").is_carrier


async def test_many_stages_send_details_of_a_tuned_plan_in_some_iterations_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_stage, "LEADER_BYTES_PER_ITERATION", 64)
    purposes = {"tuned": PlanPurpose.TUNED}

    async with running_host() as host:
        token = host.join(0)
        session = host.stage.jobs.sessions.of_hex_token(token, ME)
        assert session is not None
        plans = session.runner.job.knowledge.plans
        monkeypatch.setattr(type(plans), "purpose_of", lambda _, plan_id: purposes.get(plan_id))
        texts = []
        for index in range(16):
            host.observe(token, index, 0.25, "tuned")
            reply = host.ask(token, 0, num_pp_ranks=4, agreement=PlanAgreement(merged_iteration=index - 1))
            assert reply.report is not None
            texts.append(reply.report.observations)
        classes = host.members._stages[next(iter(host.members._stages))]._classes
        found = [unpack(text, classes, ("tuned",))[0] for text in texts]
        detailed = [index for index, one in enumerate(found) if one.instruction_samples]
        sizes = [len(text) for text in texts]
        every = math.ceil(4 * sizes[0] / 64)
        assert detailed == list(range(0, 16, 1 << (every - 1).bit_length()))
        assert len(detailed) < 8
        assert sum(sizes[-8:]) / 8 * 4 < 2 * 64 + 4 * min(sizes)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (None, "its program uses another version of gpuenergyd"),
        (MemberPlace("run", 0, 0, 4096, 0, 64), "4096 x 64 ranks: .* their product at most 16384"),
        (MemberPlace("run", 0, 0, 5000, 0, 1), r"5000 x 1 rank: each number must be in \[1, 4096\]"),
        (MemberPlace("run", 0, 7, 4, 0, 1), r"place 7.0: outside of 4 x 1 rank"),
    ],
)
async def test_places_that_cannot_be_are_refused_visibly(
    place: MemberPlace | None, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_host() as host:
        token = host.join(0)
        refused(host, lambda: host.ask(token, 0, place=place), problem, caplog)
        host.ask(token, 0)
        assert host.members.status(next(iter(host.stage.jobs)).job_id)["pipeline_refusal"] is None


async def test_siblings_with_different_orders_are_refused_visibly(caplog: pytest.LogCaptureFixture) -> None:
    async with running_host() as host:
        first, second = host.join(0), host.join(1, order=(("F", 0, 0), ("B", 0, 0)))
        host.ask(second, 1)
        refused(host, lambda: host.ask(first, 0), "tensor-parallel rank 1 of pipeline rank 0 runs another", caplog)


async def test_a_pipeline_with_too_many_ranks_is_refused_visibly(caplog: pytest.LogCaptureFixture) -> None:
    async with running_host() as host:
        token = host.join(0)
        report = PipelineReport(token, 4096, 64)
        coroutine = host.members.plan_pipeline
        refused(host, lambda: run_at_once(coroutine(report, ME)), "4096 x 64 ranks", caplog)


async def test_a_member_is_guarded_by_the_target_that_its_leader_permits() -> None:
    async with running_host() as host:
        token = host.join(0)
        (runner,) = host.stage.jobs
        job = runner.job
        plan = PostedPlan("p.1", PlanPurpose.TUNED, ((4, ((1200, 0, 0),)),), (), permitted_slowdown_ratio=0.25)

        run_at_once(host.members.post_plan(MemberPlan(token, plan), ME), may_wait=True)
        assert job.target == PerformanceTarget(0.25), "no baseline yet"
        job.baseline = BaselineView(2.0, None, 9)
        run_at_once(host.members.post_plan(MemberPlan(token, plan), ME), may_wait=True)
        assert job.target == PerformanceTarget(0.0, permitted_time_s=2.5)
        registered = replace(plan, plan_id="p.2", permitted_slowdown_ratio=None)
        run_at_once(host.members.post_plan(MemberPlan(token, registered), ME), may_wait=True)
        assert job.target == PerformanceTarget(0.0)


async def test_a_message_refused_before_it_is_read_is_recorded_for_its_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_host() as host:
        host.join(0)
        (runner,) = host.stage.jobs
        with caplog.at_level(logging.WARNING, logger="gpuenergyd"):
            host.members.refuse(ME, f"message of {MAX_REPLY_BYTES} bytes; at most 1048576 are accepted")
        fields = host.members.status(runner.job_id)["pipeline_refusal"]
        assert fields is not None
        assert "at most 1048576" in fields["reason"]
        assert len(host.stage.events("refusal")) == 1
        assert "message refused" in caplog.text
