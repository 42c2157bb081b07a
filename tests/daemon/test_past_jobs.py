"""A job with other microbatches starts from the curves that an earlier one left in the daemon's history."""

import os
import sqlite3
from functools import partial
from pathlib import Path

from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.store import HistoryWriter, WriterOptions
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.job_stage import FakeWorker, settle
from tests.support.virtual_daemon import (
    LATENCY_S,
    CountingPastJobs,
    DaemonTraining,
    PolicyInProcess,
    until,
    virtual_daemon,
)
from tests.support.waiting import LIMIT_S

RANK_SHARES = (1.0, 0.9, 1.1)


def job(num_microbatches: int) -> DaemonTraining:
    schedule = one_forward_one_backward(len(RANK_SHARES), num_microbatches)
    return DaemonTraining(schedule, a100_stages(RANK_SHARES), FullSpeed(), switch_latency_s=LATENCY_S)


def num_stored(database: Path) -> int:
    with sqlite3.connect(database) as connection:
        if not connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'models'").fetchone()[0]:
            return 0  # the history's thread has not created its tables yet
        query = f"SELECT count(*) FROM models WHERE signature LIKE 'past:{os.geteuid()}:%'"
        return int(connection.execute(query).fetchone()[0])


def has_answered(past_jobs: CountingPastJobs, num_answers: int) -> bool:
    return len(past_jobs.read_for) >= num_answers


def has_past_jobs(runner: JobRunner) -> bool:
    return bool(runner.job.knowledge.past_jobs)


async def test_a_job_with_other_microbatches_gets_the_curves_of_the_one_before(tmp_path: Path) -> None:
    database = tmp_path / "history.sqlite3"
    url = f"sqlite:///{database}"
    history = HistoryWriter(url, WriterOptions(reserve_bytes=0))
    history.start()
    policy = PolicyInProcess(BubbleAware)
    found: list[tuple[PastJob, ...]] = []
    job_ids: list[str] = []
    past_jobs = CountingPastJobs(url, history)
    jobs = virtual_daemon(policy, FakeWorker(), history, past_jobs, len(RANK_SHARES))
    begin_s: float | None = None
    for run_key, num_microbatches in (("1", 6), ("2", 9)):
        training = job(num_microbatches)
        runner = training.join(jobs, run_key, begin_s)
        job_ids.append(runner.job_id)
        await until(partial(has_answered, past_jobs, int(run_key)))
        await runner.idle(LIMIT_S)  # no iteration is observed before the history has answered what it knows
        if run_key == "2":
            await until(partial(has_past_jobs, runner))
        await settle()
        found.append(runner.job.knowledge.past_jobs)
        if run_key == "1":
            await training.train(24)
            await until(lambda: num_stored(database) == 1)
        begin_s = training.now_s + 1.0
        training.leave()
        await until(lambda: not list(jobs))
    await jobs.close("test over")
    history.close(10.0)

    assert found[0] == ()
    (past,) = found[1]
    assert (past.job_id, past.job_name, past.is_imported) == (job_ids[0], "virtual", False)
    assert past.learned.num_stages == len(RANK_SHARES)
    assert all(len(curve.points) > 1 for curve in past.learned.curves)
