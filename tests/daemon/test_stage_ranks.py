"""Several ranks per stage on real processes: one job, one plan per stage, clocks lowered and raised together."""

from pathlib import Path

import pytest

from gpuenergyd.store import open_history
from tests.support.daemon_process import running_daemon, training
from tests.support.waiting import wait_until

NUM_STAGES, NUM_STAGE_RANKS = 2, 2


@pytest.mark.thorough
def test_the_ranks_of_a_stage_follow_one_plan_and_their_energies_add_up(tmp_path: Path) -> None:
    arguments = ("--ranks", str(NUM_STAGES), "--stage-ranks", str(NUM_STAGE_RANKS), "--microbatches", "8")
    with running_daemon(tmp_path) as daemon:
        with training(daemon, arguments=(*arguments, "--policy", "uniform")) as run:
            job = daemon.wait_for_phase("tuned")
            wait_until(lambda: all(gpu["requested_sm_clock_mhz"] for gpu in daemon.status()["gpus"]))
            clocks = {gpu["gpu_uuid"]: gpu["requested_sm_clock_mhz"] for gpu in daemon.status()["gpus"]}
            assert run.finish() == 0
        wait_until(daemon.is_as_found)
        assert daemon.stop() == 0

    uuids_of_stage = [
        {rank["gpu_uuid"] for rank in job["ranks"] if rank["pp_rank"] == pp_rank} for pp_rank in range(NUM_STAGES)
    ]
    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
        iterations = history.iterations(summary.job_id)
        timeline = history.spans(summary.job_id, history.iterations_with_spans(summary.job_id)[-1])
        seconds = history.rollups(bucket_s=1, job_id=summary.job_id)
    assert (job["num_ranks"], job["num_stage_ranks"], len(job["ranks"])) == (4, 2, 4)
    assert [len(uuids) for uuids in uuids_of_stage] == [2, 2]
    assert [len({clocks[uuid] for uuid in uuids}) for uuids in uuids_of_stage] == [1, 1]
    assert len(summary.gpu_uuids) == 4
    assert {span.pp_rank for span in timeline} == {0, 1}
    assert any(row.energy_j is not None for row in iterations)
    assert {rollup.gpu_uuid for rollup in seconds} == set(summary.gpu_uuids)
