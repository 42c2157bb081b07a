"""Pipelines of the public tutorial's shape with real CPU times, beside a daemon with idle simulated GPUs."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from gpuenergyd.store import open_history
from tests.support import pipelining_tutorial
from tests.support.daemon_process import running_daemon
from tests.support.waiting import wait_until
from tests.trainers.forked_programs import run_forked

# The programs run as they are: warnings of torch's tracing are no errors.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

NUM_RANKS, NUM_STEPS = 2, 40


@pytest.mark.thorough
@pytest.mark.parametrize("split", pipelining_tutorial.SPLITS)
def test_a_pipeline_of_the_tutorials_shape_ends_with_a_plan_or_one_reason(tmp_path: Path, split: str) -> None:
    script = Path(pipelining_tutorial.__file__)
    with running_daemon(tmp_path / "daemon") as daemon:
        gpu_uuids = [gpu["gpu_uuid"] for gpu in daemon.status()["gpus"][:NUM_RANKS]]
        outputs = run_forked(
            tmp_path,
            script,
            ["--split", split, "--steps", str(NUM_STEPS)],
            num_ranks=NUM_RANKS,
            GPUENERGYD_SOCKET=str(daemon.socket_path),
            GPUENERGYD_GPU_UUID=",".join(gpu_uuids),
        )
        wait_until(lambda: not daemon.status()["jobs"])
        wait_until(daemon.is_as_found)
        assert daemon.stop() == 0
    with open_history(daemon.database_path) as history:
        (job,) = history.job_summaries()
        reasons = [event.reason for event in history.control_events(job.job_id)]
    errors = [path.read_text(encoding="utf-8") for path in tmp_path.glob("*.errors")]

    assert outputs[-1].count("loss") == NUM_STEPS
    assert (job.schedule_name, job.num_ranks) == ("gpipe", NUM_RANKS)
    assert 0 < job.num_iterations < NUM_STEPS
    assert job.outcome_reason
    assert not any(reason.startswith("policy") for reason in reasons)
    assert not any("Traceback" in text for text in (daemon.log, *errors))
