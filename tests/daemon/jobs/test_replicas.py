"""Replicas of one training under one daemon: the slowest sets the pace of the others, as long as it is slow."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuenergyd.store import open_history
from gpuenergyd.wire.messages import IterationReport, PaceReport
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.job_stage import ME, Stage, play, registration, settle
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


def test_a_slow_replica_sets_the_pace_of_the_other_until_it_recovers(tmp_path: Path) -> None:
    slow_while = tmp_path / "slow"
    arguments = (*TWO_REPLICAS, "--slow-while", str(slow_while))
    with running_daemon(tmp_path / "daemon") as daemon:
        with training(daemon, arguments=arguments) as run:
            wait_until(lambda: [job["phase"] for job in jobs_by_first_gpu(daemon)] == ["tuned", "tuned"], 120)

            slow_while.touch()
            wait_until(lambda: waits_for_slow_replica(daemon), 120)
            fast, slow = jobs_by_first_gpu(daemon)
            slow_while.unlink()
            wait_until(lambda: is_back_at_own_pace(daemon), 120)

            assert run.finish() == 0
        wait_until(lambda: not daemon.status()["jobs"], 30)
        assert daemon.stop() == 0
    with open_history(daemon.database_path) as history:
        events = [event for event in history.control_events(fast["job_id"]) if event.action == "straggler"]
    assert f"straggler: {slow['job_id']} takes" in fast["straggler_reason"]
    assert any(slow["job_id"] in event.reason and event.after.endswith("s per iteration") for event in events)
    assert any(event.after == "own pace" or "takes" in event.reason for event in events)


def test_ranks_of_a_plain_loop_have_no_straggler() -> None:
    stage = Stage()
    loop = replace(registration(0), num_pp_ranks=1, num_microbatches=1, order=(("F", 0, 0),), schedule_name="loop")

    async def scenario() -> None:
        for dp_rank in range(2):
            own = replace(loop, dp_rank=dp_rank, num_dp_ranks=2, gpu_uuid=f"GPU-{dp_rank}")
            stage.tokens.append(stage.jobs.register(own, ME, os.pidfd_open(os.getpid())).rank_token)
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
        await stage.jobs.close("test over")

    play(scenario)


def test_all_replicas_of_a_training_agree_on_orders_under_one_name() -> None:
    stage = Stage()
    alone = replace(registration(0), num_pp_ranks=1, num_microbatches=1, order=(("F", 0, 0), ("B", 0, 0)))

    async def scenario() -> None:
        for dp_rank, run_key in enumerate(("a", "a", "b")):
            own = replace(alone, dp_rank=dp_rank, run_key=run_key, gpu_uuid=f"GPU-{dp_rank}")
            stage.jobs.register(own, ME, os.pidfd_open(os.getpid()))
        first, second, other = stage.jobs
        names = [runner.delivery.training_id for runner in stage.jobs]

        assert names[0] == names[1] != names[2]
        assert all(len(name) >= 32 for name in names)
        other.delivery.restore(first.delivery.snapshot())
        assert other.delivery.training_id == second.delivery.training_id
        await stage.jobs.close("test over")

    play(scenario)
