"""The examples run unmodified, learn and join; those of a framework are run by its own tests."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from gpuenergyd.store import open_history
from tests.support.daemon_process import running_daemon
from tests.support.waiting import wait_until
from tests.trainers.example_runs import check_example, run_program

pytestmark = pytest.mark.torch

NUM_RANKS = 2
MANY_STEPS = 24
"""Steps that leave some after both ranks have joined, even on a slow machine."""


def test_the_data_parallel_example_learns_and_joins(tmp_path: Path) -> None:
    check_example(tmp_path, "ddp_images", num_ranks=NUM_RANKS)


@pytest.mark.thorough
def test_a_pipeline_example_is_measured_by_a_real_daemon_and_its_gpus_are_restored(tmp_path: Path) -> None:
    with running_daemon(tmp_path / "daemon", policy="uniform", warmup_iterations=0, baseline_iterations=2) as daemon:
        gpu_uuids = [gpu["gpu_uuid"] for gpu in daemon.status()["gpus"][:NUM_RANKS]]
        losses = run_program("gpt_pipeline", tmp_path, str(daemon.socket_path), gpu_uuids, num_steps=MANY_STEPS)
        wait_until(daemon.is_as_found)
        wait_until(lambda: not daemon.status()["jobs"])
        assert daemon.stop() == 0
    with open_history(daemon.database_path) as history:
        (job,) = history.job_summaries()

    assert losses[-1] < losses[0]
    assert (job.job_name, job.schedule_name, job.num_ranks) == ("gpt-example", "1f1b", NUM_RANKS)
    assert 0 < job.num_iterations < MANY_STEPS
    assert job.energy_j is not None
    assert job.energy_j > 0
