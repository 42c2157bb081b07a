"""A job that ran out of memory in another order tries none again: not in its next run, nor under the next daemon."""

import asyncio
import json
import os
import zlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.jobs.past_jobs import PastJobStore, signature_of
from gpuenergyd.store.records import PastJobRecord
from gpuenergyd.wire.messages import RankRelease
from tests.support.job_stage import ME, FakeHistory, Stage, play, registration, settle
from tests.support.stored_history import write_records
from tests.support.waiting import LIMIT_S

REASON = "a GPU ran out of memory in another order than 1F1B"
DESCRIPTION = JobDescription("gpt-1", "gpt", 1, "1f1b", 4, 1, "bubble-aware", PerformanceTarget())
GPU = GpuView("GPU-0", "A100", (1410, 900), 0.01)


def stage_with_history(database: Path) -> tuple[Stage, FakeHistory]:
    """Return the jobs of a daemon of its own, which reads past jobs from a history."""
    stage, history = Stage(), FakeHistory()
    stage.jobs.services = replace(stage.jobs.services, history=history, past_jobs=PastJobStore(database, history))
    return stage, history


def keep(database: Path, history: FakeHistory) -> None:
    """Store what a daemon has written about past jobs."""
    write_records(database, *(record for record in history.records if isinstance(record, PastJobRecord)))


def run(database: Path, *, refusal: str = "", allow: bool = True, name: str = "gpt") -> str:
    """Run a job under a daemon of its own; return why its order may not change."""
    found: list[str] = []

    async def scenario() -> None:
        stage, history = stage_with_history(database)
        for pp_rank in range(2):
            own = replace(registration(pp_rank), allow_reorder=allow, reorder_refusal="", job_name=name)
            stage.tokens.append(stage.jobs.register(own, ME, os.pidfd_open(ME.pid)).rank_token)
        (runner,) = stage.jobs
        await runner.idle(LIMIT_S)
        found.append(runner.job.knowledge.reordering.view(2, 1).refusal)
        stage.jobs.release(RankRelease(stage.tokens[0], reorder_refusal=refusal), ME)
        await settle()
        await stage.jobs.close("test over")
        keep(database, history)

    play(scenario)
    return found[0]


def test_no_later_run_of_the_job_tries_another_order(tmp_path: Path) -> None:
    database = tmp_path / "history.sqlite3"
    assert run(database) == ""
    assert run(database, refusal=REASON) == ""
    assert run(database, refusal="").startswith(f"{REASON} (in job ")
    assert run(database).startswith(REASON)
    assert run(database, name="another") == ""
    assert run(database, allow=False) == ""


def run_member(database: Path, *, refusal: str = "", stage_order: int = 0) -> str:
    """Run a member of a pipeline across hosts under a daemon of its own; return why its order may not change."""
    found: list[str] = []

    async def scenario() -> None:
        stage, history = stage_with_history(database)
        own = replace(
            registration(stage_order), pp_rank=0, num_pp_ranks=1, is_pipeline_member=True, allow_reorder=True,
            reorder_refusal="",
        )  # fmt: skip
        token = stage.jobs.register(own, ME, os.pidfd_open(ME.pid)).rank_token
        (runner,) = stage.jobs
        await runner.idle(LIMIT_S)
        found.append(runner.job.knowledge.reordering.barred)
        stage.jobs.release(RankRelease(token, reorder_refusal=refusal), ME)
        await settle()
        await stage.jobs.close("test over")
        keep(database, history)

    play(scenario)
    return found[0]


def test_a_member_of_a_pipeline_across_hosts_remembers_for_its_leader(tmp_path: Path) -> None:
    database = tmp_path / "history.sqlite3"
    assert run_member(database, refusal=REASON) == ""
    assert run_member(database).startswith(f"{REASON} (in job ")
    assert run_member(database, stage_order=1) == "", "another stage is another job"


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


def found_in(database: Path, signature: str) -> str | None:
    return asyncio.run(PastJobStore(database, FakeHistory()).order_refusal(signature))


def test_a_refusal_that_version_0_3_0_stored_still_holds(tmp_path: Path) -> None:
    whole_run = {
        "job_id": "gpt-1",
        "full_speed": [],
        "profile": [],
        "figures": [],
        "order_refusal": REASON,
        "is_of_this_run": False,
    }
    signature = "47f221ace5a64170120dac4060209a4123ca8d318ff94e60676b1c1080a2140d"
    blob = zlib.compress(json.dumps(whole_run).encode())
    database = tmp_path / "history.sqlite3"
    write_records(database, PastJobRecord(signature, "gpt-1", datetime(2026, 11, 1, tzinfo=UTC), blob))

    assert found_in(database, signature_of(job(), 1000)) == f"{REASON} (in job gpt-1)"
    across_hosts = signature_of(job(), 1000, "across hosts", 2)
    assert across_hosts == "c9dfd14e802e7007d7cfb536587b59b9abb45d7e068f3e90a0a681fb62e380ec"
    assert found_in(database, across_hosts) is None


@pytest.mark.parametrize("blob", [b"no zlib", zlib.compress(b"{}"), zlib.compress(b"[1, 2"), b""])
def test_a_refusal_that_cannot_be_read_is_none(tmp_path: Path, blob: bytes) -> None:
    database = tmp_path / "history.sqlite3"
    write_records(database, PastJobRecord("f" * 64, "gpt-1", datetime(2026, 11, 1, tzinfo=UTC), blob))

    assert found_in(database, "f" * 64) is None


def test_without_a_history_there_is_no_refusal(tmp_path: Path) -> None:
    assert found_in(tmp_path / "none.sqlite3", "f" * 64) is None
