"""Ranks of one stage in the daemon: one job, the same plan for each, all GPUs leased, and energies that add up."""

import os
import time
from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.daemon.jobs.clock_requests import Admission
from gpuenergyd.daemon.jobs.plan_source import PostedPlans
from gpuenergyd.errors import JobError, ProtocolError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.store.records import IterationRecord, RankRecord
from gpuenergyd.wire.messages import RankRegistered, RankRegistration
from tests.support.job_stage import CLOCKS_MHZ, ME, Stage, plan, registration, report, settle

POWERS_W = (100.0, 110.0, 200.0, 250.0)
LONGER = one_forward_one_backward(2, 3)


class DoubledStage(Stage):
    """Two stages of two ranks each, on four GPUs of constant power."""

    num_stage_ranks = 2

    def join(self) -> str:
        """Register all ranks; return the job's id."""
        self.gpus.update(GpuIdentity(f"GPU-{r}", r, "A100", CLOCKS_MHZ, is_simulated=True) for r in range(4))
        now_ns = time.monotonic_ns()
        for r, power_w in enumerate(POWERS_W):
            counter = self.gpus[f"GPU-{r}"].counter
            counter.record(now_ns - 10**10, 0.0)
            counter.record(now_ns + 10**11, 110.0 * power_w)
        for r in range(4):
            own = replace(registration(r // 2), gpu_uuid=f"GPU-{r}", stage_rank=r % 2, num_stage_ranks=2)
            registered = self.jobs.register(own, ME, os.pidfd_open(ME.pid))
            self.tokens.append(registered.rank_token)
        return registered.job_id


async def test_both_ranks_of_a_stage_follow_one_plan_on_their_own_gpus() -> None:
    stage = DoubledStage(plan("tuned", 900))
    job_id = stage.join()
    given = await stage.iterate(times=4)

    assert [[one.plan_id for one in plans] for plans in given] == [["tuned"]] * 4
    assert given[0] == given[1]
    assert given[2] == given[3]
    assert given[0][0].changes[0][-1] == 900
    assert stage.worker.calls == [("lease", ("GPU-0", "GPU-1", "GPU-2", "GPU-3"))]
    for rank in range(4):
        assert stage.send(pp_rank=rank, clock_mhz=900, plan_epoch=1) is Admission.FORWARDED
    assert [gpu_uuid for gpu_uuid, *_ in stage.worker.requested_clocks] == [f"GPU-{r}" for r in range(4)]
    ranks = [record for record in stage.history.records if isinstance(record, RankRecord)]
    assert [(rank.pp_rank, rank.stage_rank) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    runner = stage.jobs.runner(job_id)
    assert runner is not None
    assert sorted(runner.pids) == [0, 1, 2, 3]
    await stage.jobs.close("done")
    assert stage.worker.calls[-1] == ("restore", ("GPU-0", "GPU-1", "GPU-2", "GPU-3"))


async def test_the_energy_of_an_iteration_is_that_of_all_gpus_and_the_view_has_one_entry_per_stage() -> None:
    stage = DoubledStage(plan("tuned", 900))
    await stage.begin(times=3)

    view = stage.policy.views[-1]
    observation = view.observations[-1]
    powers_w = [(rank.energy_j or 0.0) / rank.window_s for rank in observation.ranks]
    assert powers_w == pytest.approx([POWERS_W[0] + POWERS_W[1], POWERS_W[2] + POWERS_W[3]])
    assert [(gpu.gpu_uuid, gpu.num_gpus) for gpu in view.gpus] == [("GPU-0", 2), ("GPU-2", 2)]
    rows = [record for record in stage.history.records if isinstance(record, IterationRecord)]
    assert rows[-1].energy_j == pytest.approx(sum(POWERS_W) * rows[-1].iteration_time_s)


async def test_an_iteration_waits_for_the_report_of_each_rank() -> None:
    stage = DoubledStage()
    job_id = stage.join()
    runner = stage.jobs.runner(job_id)
    assert runner is not None
    for r in (0, 1, 3):
        stage.jobs.handle_report(report(stage.tokens[r], r // 2, 0, 0), ME)
    assert runner.job.num_iterations == 0

    stage.jobs.handle_report(report(stage.tokens[2], 1, 0, 0), ME)

    assert runner.job.num_iterations == 1


async def test_registrations_that_contradict_each_other_are_refused() -> None:
    stage = Stage()
    first = replace(registration(0), num_stage_ranks=2)
    stage.jobs.register(first, ME, os.pidfd_open(ME.pid))

    with pytest.raises(JobError, match="num_stage_ranks 1 of rank 1 contradicts 2 of rank 0"):
        stage.jobs.register(registration(1), ME, -1)
    with pytest.raises(ProtocolError, match=r"stage_rank 2 must be in \[0, 1\]"):
        stage.jobs.register(replace(first, stage_rank=2), ME, -1)
    with pytest.raises(ProtocolError, match="num_stage_ranks 2 must be 1 for a member of a pipeline across hosts"):
        stage.jobs.register(replace(first, num_pp_ranks=1, is_pipeline_member=True), ME, -1)


def longer(pp_rank: int) -> RankRegistration:
    order = tuple((str(i.kind), i.microbatch_index, i.chunk_index) for i in LONGER.orders[pp_rank])
    return replace(registration(pp_rank), num_microbatches=3, order=order)


def register(stage: Stage, one: RankRegistration) -> RankRegistered:
    return stage.jobs.register(one, ME, os.pidfd_open(ME.pid))


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


async def test_a_registration_that_is_only_repeated_changes_nothing() -> None:
    stage = Stage(plan("tuned-1", 1200))
    await stage.begin(times=3)
    register(stage, registration(0))
    register(stage, registration(1))

    assert stage.phase == "tuned"


async def test_a_new_registration_that_contradicts_the_job_otherwise_is_refused() -> None:
    stage = Stage()
    stage.join()
    with pytest.raises(JobError, match="schedule_name 'gpipe' of rank 0 contradicts '1f1b'"):
        register(stage, replace(longer(0), schedule_name="gpipe"))


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
