"""A pipeline across hosts is planned again for each number of microbatches of a ramp-up."""

import asyncio
from dataclasses import dataclass

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.daemon.jobs.plan_source import PostedPlans
from gpuenergyd.store.records import ControlEventRecord
from gpuenergyd_across_hosts.messages.pipeline_messages import MemberPlan, PostedPlan
from tests.support.host_of_siblings import run_at_once, running_host
from tests.support.job_stage import ME
from tests.support.remembered_plans import RememberedBubbleAware
from tests.support.virtual_pipeline import VirtualPipeline

NUM_STAGES = 3
NUM_ITERATIONS = 90
LATER = (("F", 0, 0), ("F", 1, 0), ("F", 2, 0), ("B", 0, 0), ("B", 1, 0), ("B", 2, 0))


@dataclass
class Ran:
    """What a pipeline did after its last change."""

    phase: JobPhase
    energy_j: float
    time_s: float
    refusals: list[str]


def ran(*numbers: int, num_tp_ranks: int = 1) -> list[Ran]:
    """Train with each of the numbers of microbatches in turn."""
    pipeline = VirtualPipeline(
        NUM_STAGES, RememberedBubbleAware(), num_microbatches=numbers[0], num_tp_ranks=num_tp_ranks
    )
    found = []

    async def run() -> None:
        for number in numbers:
            if number != numbers[0]:
                pipeline.change_microbatches(number)
            before = len(pipeline.followed)
            await pipeline.train(NUM_ITERATIONS)
            job = pipeline.leader.job
            assert job.description.num_microbatches == number
            assert all(len(set(plan_ids)) == 1 for plan_ids in pipeline.followed[before:]), "ranks followed two plans"
            tuned = [plan_ids[0] for plan_ids in pipeline.followed if plan_ids[0] != "baseline"]
            time_s, energy_j = pipeline.truth(tuned[-1])
            baseline_s, baseline_j = pipeline.truth("baseline")
            events = [r for history in pipeline.histories for r in history.records if isinstance(r, ControlEventRecord)]
            refusals = [event.reason for event in events if event.action == "refusal"]
            found.append(Ran(job.phase, energy_j / baseline_j, time_s / baseline_s, refusals))
        await pipeline.close()

    asyncio.run(run())
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("num_tp_ranks", [1, 2])
def test_each_number_of_microbatches_has_a_plan(num_tp_ranks: int) -> None:
    first, second, third = ran(4, 6, 9, num_tp_ranks=num_tp_ranks)
    (from_start,) = ran(9, num_tp_ranks=num_tp_ranks)

    assert [one.phase for one in (first, second, third)] == [JobPhase.TUNED] * 3
    assert third.refusals == []
    assert third.time_s < 1.005
    assert third.energy_j == pytest.approx(from_start.energy_j, abs=0.01)


async def test_siblings_report_nothing_while_their_numbers_differ() -> None:
    async with running_host() as host:
        tokens = [host.join(0), host.join(1)]
        host.ask(tokens[1], 1)
        before = host.ask(tokens[0], 0).facts
        host.join(1, num_microbatches=3, order=LATER)
        during = host.ask(tokens[0], 0)
        host.join(0, num_microbatches=3, order=LATER)
        after = host.ask(tokens[0], 0).facts

        assert before is not None
        assert (during.is_carrier, during.report) == (True, None)
        assert after is not None
        assert (before.num_microbatches, after.num_microbatches) == (2, 3)
        assert before.facts_id != after.facts_id


async def test_a_plan_for_another_number_of_microbatches_is_no_refusal_and_is_not_followed() -> None:
    async with running_host() as host:
        token = host.join(0)
        (runner,) = host.stage.jobs
        plan = PostedPlan("p.1", PlanPurpose.TUNED, ((6, ((1200, 0, 0),)),), (), num_microbatches=3)

        run_at_once(host.members.post_plan(MemberPlan(token, plan), ME), may_wait=True)

        assert host.members.status(runner.job_id)["pipeline_refusal"] is None
        assert isinstance(runner.plans, PostedPlans)
        assert runner.plans.posted is None
