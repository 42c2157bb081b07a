"""Ranks that register again with another number of microbatches, against fakes."""

import os
from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.daemon.jobs.plan_source import PostedPlans
from gpuenergyd.errors import JobError
from gpuenergyd.wire.messages import RankRegistered, RankRegistration
from tests.support.job_stage import ME, Stage, plan, registration, settle

LONGER = one_forward_one_backward(2, 3)


def longer(pp_rank: int) -> RankRegistration:
    order = tuple((str(i.kind), i.microbatch_index, i.chunk_index) for i in LONGER.orders[pp_rank])
    return replace(registration(pp_rank), num_microbatches=3, order=order)


def register(stage: Stage, one: RankRegistration) -> RankRegistered:
    return stage.jobs.register(one, ME, os.pidfd_open(os.getpid()))


async def test_the_job_is_restored_at_the_first_and_has_another_schedule_at_the_last_new_registration() -> None:
    stage = Stage(plan("tuned-1", 1200))
    job_id = stage.join()
    await stage.iterate(times=3)
    (runner,) = stage.jobs
    assert stage.phase == "tuned"

    first = register(stage, longer(0))
    await settle()
    during = runner.job.description.num_microbatches
    second = register(stage, longer(1))
    await settle()

    assert [one.rank_token for one in (first, second)] == stage.tokens
    assert {one.job_id for one in (first, second)} == {job_id}
    assert during == 2
    assert stage.worker.calls[-1] == ("restore", ("GPU-0", "GPU-1"))
    assert runner.job.description.num_microbatches == 3
    assert runner.job.ranks.schedule is not None
    assert runner.job.ranks.schedule.orders == LONGER.orders
    assert (runner.job.phase, runner.job.phase_reason) == (
        "baseline",
        "2 -> 3 microbatches per iteration: measuring full speed again",
    )
    assert stage.jobs.registration(job_id).num_microbatches == 3
    await stage.jobs.close("test over")


async def test_a_registration_that_is_only_repeated_changes_nothing() -> None:
    stage = Stage(plan("tuned-1", 1200))
    stage.join()
    await stage.iterate(times=3)
    register(stage, registration(0))
    register(stage, registration(1))

    assert stage.phase == "tuned"
    await stage.jobs.close("test over")


async def test_a_new_registration_that_contradicts_the_job_otherwise_is_refused() -> None:
    stage = Stage()
    stage.join()
    with pytest.raises(JobError, match="schedule_name 'gpipe' of rank 0 contradicts '1f1b'"):
        register(stage, replace(longer(0), schedule_name="gpipe"))
    await stage.jobs.close("test over")


async def test_a_rank_of_a_pipeline_across_hosts_changes_for_itself_and_forgets_the_plan_of_its_leader() -> None:
    stage = Stage()
    member = replace(registration(0), num_pp_ranks=1, is_pipeline_member=True, order=(("F", 0, 0), ("B", 0, 0)))
    register(stage, member)
    (runner,) = stage.jobs
    runner.post_plan(plan("of-the-leader", 1200))
    order = (("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0))
    register(stage, replace(member, num_microbatches=3, order=order))
    await settle()

    assert runner.job.description.num_microbatches == 3
    assert isinstance(runner.plans, PostedPlans)
    assert runner.plans.posted is None
    await stage.jobs.close("test over")
