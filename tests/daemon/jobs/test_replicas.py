"""Replicas of one training under one daemon: the slowest sets the pace of the others, as long as it is slow."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.store import open_history
from gpuenergyd.wire.messages import IterationReport, PaceReport
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.job_stage import ME, Stage, registration, settle
from tests.support.waiting import wait_until

TWO_REPLICAS = ("--replicas", "2", "--ranks", "2", "--policy", "uniform", "--max-slowdown", "0.5")


def jobs_by_first_gpu(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """Return both replicas, the one that may become slow last."""
    status = daemon.status()
    index_of = {gpu["gpu_uuid"]: gpu["index"] for gpu in status["gpus"]}
    return sorted(status["jobs"], key=lambda job: index_of[job["ranks"][0]["gpu_uuid"]] if job["ranks"] else -1)


def waits_for_slow_replica(daemon: DaemonProcess) -> bool:
    """Return whether the fast replica was told of a pace far beyond what chance and its own budget explain."""
    fast, slow = jobs_by_first_gpu(daemon)
    straggler_pace_s = fast["straggler_time_s"] or 0.0
    return bool(straggler_pace_s > 1.8 * fast["own_time_s"] and fast["straggler"] == slow["job_id"])


def is_back_at_own_pace(daemon: DaemonProcess) -> bool:
    fast, _ = jobs_by_first_gpu(daemon)
    return bool((fast["straggler_time_s"] or 0.0) < 1.5 * fast["own_time_s"])


@pytest.mark.thorough
def test_a_slow_replica_sets_the_pace_of_the_other_until_it_recovers(tmp_path: Path) -> None:
    slow_while = tmp_path / "slow"
    arguments = (*TWO_REPLICAS, "--slow-while", str(slow_while))
    with running_daemon(tmp_path / "daemon") as daemon:
        with training(daemon, arguments=arguments) as run:
            wait_until(lambda: [job["phase"] for job in jobs_by_first_gpu(daemon)] == ["tuned", "tuned"])

            slow_while.touch()
            wait_until(lambda: waits_for_slow_replica(daemon))
            fast, slow = jobs_by_first_gpu(daemon)
            slow_while.unlink()
            wait_until(lambda: is_back_at_own_pace(daemon))

            assert run.finish() == 0
        wait_until(lambda: not daemon.status()["jobs"])
        assert daemon.stop() == 0
    with open_history(daemon.database_path) as history:
        events = [event for event in history.control_events(fast["job_id"]) if event.action == "straggler"]
    assert f"straggler: {slow['job_id']} takes" in fast["straggler_reason"]
    assert any(slow["job_id"] in event.reason and event.after.endswith("s per iteration") for event in events)
    assert any(event.after == "own pace" or "takes" in event.reason for event in events)


async def test_ranks_of_a_plain_loop_have_no_straggler() -> None:
    stage = Stage()
    loop = replace(registration(0), num_pp_ranks=1, num_microbatches=1, order=(("F", 0, 0),), schedule_name="loop")
    for dp_rank in range(2):
        own = replace(loop, dp_rank=dp_rank, num_dp_ranks=2, gpu_uuid=f"GPU-{dp_rank}")
        stage.tokens.append(stage.jobs.register(own, ME, os.pidfd_open(ME.pid)).rank_token)
    for index in range(12):
        for dp_rank, token in enumerate(stage.tokens):
            end_ns = time.monotonic_ns()
            begin_ns = end_ns - 1_000_000 * (1 + 3 * dp_rank)
            rows = (("F", 0, 0, begin_ns, end_ns),)
            stage.jobs.handle_report(IterationReport(token, index, 0, begin_ns, end_ns, end_ns, rows), ME)
        await settle()
    elsewhere = [stage.jobs.handle_pace(PaceReport(stage.tokens[0], 10.0), ME) for _ in range(3)]

    assert [job.job.num_iterations for job in stage.jobs] == [12, 12]
    assert stage.events("straggler") == []
    assert all(reply is not None and reply.straggler_time_s is None for reply in elsewhere)
    assert all(view.num_dp_ranks == 2 for view in stage.policy.views)


PHASES = (("F", 0, 0), ("B", 0, 0), ("O", 0, 0))
"""Phases of a loop, all of which are work."""


def register_loops(stage: Stage, num_ranks: int) -> None:
    """Register the ranks of a data-parallel loop with phases, each a job of its own."""
    loop = replace(registration(0), num_pp_ranks=1, num_microbatches=1, order=PHASES, schedule_name="loop")
    for dp_rank in range(num_ranks):
        own = replace(loop, dp_rank=dp_rank, num_dp_ranks=2 * num_ranks, gpu_uuid=f"GPU-{dp_rank}")
        stage.tokens.append(stage.jobs.register(own, ME, os.pidfd_open(ME.pid)).rank_token)


async def iterate_loops(stage: Stage, index: int, phase_ms: tuple[int, ...]) -> None:
    """Report an iteration of each rank, with phases of this length; all end together."""
    end_ns = time.monotonic_ns()
    begin_ns = end_ns - 1_000_000 * (len(PHASES) * max(phase_ms) + 1)
    for token, each_ms in zip(stage.tokens, phase_ms, strict=True):
        edges = [begin_ns + 1_000_000 * each_ms * number for number in range(len(PHASES) + 1)]
        rows = tuple((*phase, a, b) for phase, a, b in zip(PHASES, edges, edges[1:], strict=False))
        stage.jobs.handle_report(IterationReport(token, index, 0, begin_ns, end_ns, end_ns, rows), ME)
    await settle()


async def test_a_report_that_covers_the_host_sets_the_pace_of_all_its_ranks_and_returns_the_slowest() -> None:
    stage = Stage()
    register_loops(stage, 3)
    stage.jobs.handle_pace(PaceReport(stage.tokens[0], None, covers_host=True), ME)
    for index in range(6):
        await iterate_loops(stage, index, (10, 12, 10))
    reply = stage.jobs.handle_pace(PaceReport(stage.tokens[0], None, covers_host=True), ME)
    alone = stage.jobs.handle_pace(PaceReport(stage.tokens[0], None), ME)
    slow_s = 1.5 * 3 * 0.012
    for _ in range(2):
        stage.jobs.handle_pace(PaceReport(stage.tokens[0], slow_s, covers_host=True), ME)
    followed_s = [runner.job.target.straggler_time_s for runner in stage.jobs]
    stage.jobs.handle_pace(PaceReport(stage.tokens[0], None, covers_host=True), ME)
    left_s = [runner.job.target.straggler_time_s for runner in stage.jobs]

    assert reply is not None
    assert alone is not None
    assert reply.own_time_s is not None
    assert alone.own_time_s is not None
    assert reply.own_time_s > 1.1 * alone.own_time_s
    assert reply.num_readings > 0
    assert all(pace_s is not None and pace_s > 0.95 * slow_s for pace_s in followed_s)
    assert all(pace_s is None or pace_s < 0.95 * slow_s for pace_s in left_s)
