"""A second run of a known job is planned at once from the measurements of the first run."""

import asyncio
import sqlite3
from functools import partial
from pathlib import Path

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.store import HistoryWriter, WriterOptions, open_history
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.full_speed import FullSpeed
from tests.support.job_stage import FakeWorker, settle
from tests.support.virtual_daemon import (
    LATENCY_S,
    CountingMemory,
    DaemonTraining,
    PolicyInProcess,
    until,
    virtual_daemon,
)
from tests.support.virtual_training import A100Work, Work

RANK_SHARES = (1.0, 0.9, 1.1)


def run_of_the_job() -> DaemonTraining:
    work: dict[tuple[int, InstructionKind], Work] = {}
    for rank, share in enumerate(RANK_SHARES):
        work[rank, InstructionKind.F] = A100Work(0.0120 * share, 0.0382 * share, 0.25)
        work[rank, InstructionKind.B] = A100Work(0.0270 * share, 0.0660 * share, 0.27)
    schedule = one_forward_one_backward(len(RANK_SHARES), 6)
    return DaemonTraining(schedule, work, FullSpeed(), switch_latency_s=LATENCY_S)


def num_models(database: Path) -> int:
    with sqlite3.connect(database) as connection:
        return int(connection.execute("SELECT count(*) FROM models WHERE length(model) > 0").fetchone()[0])


def has_answered(memory: CountingMemory, num_answers: int) -> bool:
    """Return whether this number of jobs has loaded a previous run."""
    return memory.num_answers >= num_answers


def test_a_second_run_reaches_its_plan_within_six_iterations_of_its_baseline(tmp_path: Path) -> None:
    database = tmp_path / "history.sqlite3"
    url = f"sqlite:///{database}"
    history = HistoryWriter(url, WriterOptions(reserve_bytes=0))
    history.start()
    policy = PolicyInProcess(BubbleAware)
    plans: list[list[str | None]] = []
    job_ids: list[str] = []

    async def scenario() -> None:
        memory = CountingMemory(url)
        jobs = virtual_daemon(policy, FakeWorker(), history, memory, len(RANK_SHARES))
        begin_s: float | None = None
        for run_key in ("1", "2"):
            training = run_of_the_job()
            runner = training.join(jobs, run_key, begin_s)
            job_ids.append(runner.job_id)
            await until(partial(has_answered, memory, int(run_key)))
            await settle()
            assert (runner.job.knowledge.previous_run is not None) is (run_key == "2")
            await training.train(50 if run_key == "1" else 24)
            assert runner.job.phase is JobPhase.TUNED, runner.job.notices.last
            if run_key == "1":
                await until(lambda: num_models(database) == 1)
            plans.append([plan_id for _, _, plan_id in training.history])
            begin_s = training.now_s + 1.0
            training.leave()
            await until(lambda: not list(jobs))
        await jobs.close("test over")

    asyncio.run(scenario())
    history.close(10.0)

    first, second = plans
    assert any((plan_id or "").startswith("profile") for plan_id in first)
    assert not any((plan_id or "").startswith("profile") for plan_id in second)
    num_baseline = next(k for k, plan_id in enumerate(second) if plan_id == "tuned-1")
    rules = 2 + 10  # iterations of warm-up and baseline
    assert num_baseline <= rules + 6
    assert set(second[:num_baseline]) <= {None, BASELINE_PLAN_ID}
    with open_history(database) as read:
        reported = [e for e in read.control_events(job_ids[1]) if e.action == "recall"]
        purposes = {row.plan.purpose for row in read.plans(job_ids[1])}
    assert [event.reason for event in reported] == [f"profile of job {job_ids[0]}"]
    assert PlanPurpose.TUNED in purposes
    assert PlanPurpose.PROFILE not in purposes
