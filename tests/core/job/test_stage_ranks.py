"""A job with several ranks per stage: it waits for all of them, and plans for one GPU per stage."""

from dataclasses import replace

import pytest

from gpuenergyd.core.job.description import stage_gpu
from gpuenergyd.core.job.messages import GpuViewChanged, JobPhase
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.errors import JobError
from tests.support.job_run import CLOCKS, joined, new_job

SLOW, FAST = SwitchLatency(0.03, 0.02, call_s=0.004), SwitchLatency(0.01, 0.01, call_s=0.004)
FIRST = GpuView("GPU-0", "A100", (1410, 1200, 900), 0.01, 80.0)
SECOND = GpuView("GPU-1", "A100", (1410, 900, 600), 0.02, 84.0)


def gpu(name: str, **properties: object) -> GpuView:
    return GpuView(name, "A100", CLOCKS, **{"switch_latency_s": 0.01, **properties})  # type: ignore[arg-type]


def test_a_job_begins_when_all_ranks_of_all_stages_have_joined() -> None:
    job = new_job(num_stage_ranks=2)

    for pp_rank in range(2):
        for stage_rank in range(2):
            assert job.phase is JobPhase.JOINING
            job.handle(joined(pp_rank, stage_rank=stage_rank, gpu=gpu(f"GPU-{pp_rank}.{stage_rank}")))

    assert job.phase is JobPhase.WARMUP
    assert job.ranks.gpu_uuids == ("GPU-0.0", "GPU-0.1", "GPU-1.0", "GPU-1.1")
    assert [job.ranks.gpus[r].num_gpus for r in range(2)] == [2, 2]
    assert new_job(num_stage_ranks=2).ranks.gpu_uuids == ()


def test_ranks_that_do_not_fit_their_stage_are_refused_by_name() -> None:
    job = new_job(num_stage_ranks=2)
    job.handle(joined(1))

    with pytest.raises(JobError, match=r"rank 1\.0 of job 'gpt' is already registered"):
        job.handle(joined(1))
    with pytest.raises(JobError, match=r"rank 1\.2: each stage of job 'gpt' has 2 ranks"):
        job.handle(joined(1, stage_rank=2))
    with pytest.raises(
        JobError, match=r"rank 1\.1 of job 'gpt' runs other instructions than another rank of its stage"
    ):
        job.handle(joined(1, stage_rank=1, order=joined(0).order))
    with pytest.raises(JobError, match="no clock in common"):
        job.handle(joined(1, stage_rank=1, gpu=replace(gpu("GPU-9"), supported_sm_clocks_mhz=(1411,))))
    assert sorted(job.ranks.own_gpus) == [2]


def test_a_new_latency_of_any_gpu_changes_the_stage() -> None:
    job = new_job(num_stage_ranks=2)
    job.handle(joined(0))
    job.handle(joined(0, stage_rank=1, gpu=gpu("GPU-9")))

    job.handle(GpuViewChanged(0, gpu("GPU-9", switch_latency_s=0.5), 1))

    assert job.ranks.gpus[0].switch_latency_s == 0.5


def test_a_snapshot_keeps_each_rank() -> None:
    job, restored = new_job(num_stage_ranks=2), new_job(num_stage_ranks=2)
    for pp_rank in range(2):
        for stage_rank in range(2):
            job.handle(joined(pp_rank, stage_rank=stage_rank, gpu=gpu(f"GPU-{pp_rank}.{stage_rank}")))

    restored.restore(job.snapshot())

    assert restored.ranks.gpu_uuids == job.ranks.gpu_uuids
    assert restored.ranks.schedule == job.ranks.schedule


def test_the_gpus_of_a_stage_are_planned_for_as_one() -> None:
    pair = [
        gpu("GPU-0", blocking_power_w=80.0, switching=FAST, host="a"),
        gpu("GPU-1", blocking_power_w=90.0, switching=SLOW, switch_latency_s=0.03, host="a"),
    ]

    stage = stage_gpu(3, [pair[0], replace(pair[1], supported_sm_clocks_mhz=CLOCKS[1:])])

    assert (stage.num_gpus, stage.blocking_power_w, stage.supported_sm_clocks_mhz) == (2, 170.0, CLOCKS[1:])
    assert stage.switch_latency == replace(SLOW, num_calls=2, host="a")
    assert stage_gpu(3, [pair[0], replace(pair[1], blocking_power_w=None)]).blocking_power_w is None
    with pytest.raises(JobError, match="the ranks of pipeline stage 3 are on 2 hosts"):
        stage_gpu(3, [pair[0], replace(pair[1], host="b")])


def test_a_stage_has_common_clocks_the_slowest_changes_and_the_sum_of_powers() -> None:
    assert stage_gpu(0, [FIRST, SECOND]) == GpuView("GPU-0", "A100", (1410, 900), 0.02, 164.0, num_gpus=2)


def test_the_merge_of_merged_gpus_is_that_of_all() -> None:
    four = [FIRST, SECOND, replace(FIRST, switch_latency_s=0.03), SECOND]

    assert stage_gpu(0, [stage_gpu(0, four[:2]), stage_gpu(0, four[2:])]) == stage_gpu(0, four)


def test_gpus_without_a_common_clock_are_refused() -> None:
    with pytest.raises(JobError, match="the GPUs of pipeline rank 0 have no clock in common"):
        stage_gpu(0, [FIRST, replace(SECOND, supported_sm_clocks_mhz=(1000,))])
