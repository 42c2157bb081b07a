"""What one run showed comes to the next one through a real daemon, and never to another user's or another job's."""

import asyncio
import sqlite3
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.jobs.previous_runs import PreviousRunStore, packed, signature_of, unpacked
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.store import open_history
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.waiting import wait_until

UNIFORM = ("--policy", "uniform")
DESCRIPTION = JobDescription("gpt-1", "gpt", 1, "1f1b", 4, 1, "bubble-aware", PerformanceTarget())
GPU = GpuView("GPU-0", "A100", (1410, 900), 0.01)


def job(description: JobDescription = DESCRIPTION, gpu: GpuView = GPU) -> Job:
    made = Job(description)
    made.ranks.gpus[0] = gpu
    return made


def test_a_signature_depends_on_job_user_and_gpu_models_and_not_on_the_run() -> None:
    same = signature_of(job(), 1000)
    assert signature_of(job(replace(DESCRIPTION, job_id="gpt-2"), replace(GPU, gpu_uuid="GPU-7")), 1000) == same
    others = [
        signature_of(job(), 1001),
        signature_of(job(replace(DESCRIPTION, job_name="bert")), 1000),
        signature_of(job(replace(DESCRIPTION, num_microbatches=8)), 1000),
        signature_of(job(replace(DESCRIPTION, policy="uniform")), 1000),
        signature_of(job(gpu=replace(GPU, model_name="V100")), 1000),
    ]
    assert len({same, *others}) == 6


@pytest.mark.parametrize("blob", [b"no zlib", zlib.compress(b"{}"), zlib.compress(b"[1, 2")])
def test_a_damaged_stored_run_is_refused_in_one_line(blob: bytes) -> None:
    with pytest.raises(GpuEnergyError) as caught:
        unpacked(blob)
    assert "\n" not in str(caught.value)


def test_a_stored_run_is_read_back_unchanged() -> None:
    model = PreviousRun("gpt-1", (), (), (("caution_ratio", 0.01),))
    assert unpacked(packed(model)) == model
    assert packed(None) == b""


def test_without_a_history_there_is_no_previous_run(tmp_path: Path) -> None:
    assert asyncio.run(PreviousRunStore(tmp_path / "none.sqlite3").recall("abc")) is None


def actions(daemon: DaemonProcess, action: str) -> list[str]:
    with open_history(daemon.database_path) as history:
        return [event.reason for event in history.control_events() if event.action == action]


def num_models(daemon: DaemonProcess) -> int:
    with sqlite3.connect(daemon.database_path) as connection:
        return int(connection.execute("SELECT count(*) FROM models WHERE length(model) > 0").fetchone()[0])


@pytest.mark.thorough
def test_the_second_run_of_a_job_receives_the_profile_of_the_first(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        with training(daemon, arguments=UNIFORM) as run:
            first = daemon.wait_for_phase("tuned")["job_id"]
            wait_until(lambda: num_models(daemon) == 1)
            assert run.finish() == 0
        wait_until(lambda: daemon.job() is None)
        assert actions(daemon, "recall") == []
        with training(daemon, arguments=UNIFORM) as run:
            wait_until(lambda: actions(daemon, "recall") == [f"profile of job {first}"])
            assert run.finish() == 0
        with training(daemon, arguments=(*UNIFORM, "--job", "another")) as run:
            daemon.wait_for_phase("tuned")
            assert run.finish() == 0
        wait_until(lambda: daemon.job() is None)
        assert daemon.stop() == 0

    assert actions(daemon, "recall") == [f"profile of job {first}"]
