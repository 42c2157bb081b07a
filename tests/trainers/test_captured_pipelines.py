"""A pipeline schedule of torch captured whole: attached before, its replays have instructions and follow plans."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_sim.training.gpt_pipeline import GptRank, RunAhead
from gpuenergyd_trainers.torch_pipelining import attach
from tests.support.daemon_process import running_daemon
from tests.support.waiting import wait_until
from tests.trainers.pipeline_processes import run_ranks

pytestmark = pytest.mark.torch
NUM_RANKS, NUM_MICROBATCHES = 2, 4
NUM_REPLAYS = 45
BY_TIMES = (
    "plan .* takes .* are allowed|full speed is faster, .* was made|.* times as long as (before|when the plan began)"
    "|at full speed until the time account has recovered: .*"
)


def train(rank: int, world: str, socket_path: str, signals_path: str) -> dict[str, Any]:
    """Attach, capture the schedule, and replay it; return what the daemon says at the end."""
    host = SimulatedHost.open(Path(world))
    gpu_uuid = host.identities()[rank].gpu_uuid
    training = GptRank("1f1b", rank, NUM_RANKS, NUM_MICROBATCHES)
    job: dict[str, Any] = {}
    with ExitStack() as cleanup:
        cleanup.callback(host.close)
        run_ahead = RunAhead(2.0, Path(signals_path))
        cleanup.enter_context(training.simulate_on(host, gpu_uuid, duration_scale=0.15, run_ahead=run_ahead))
        assert isinstance(training.timer, DeviceRecorder)
        handle = attach(
            training.schedule, job="captured", run_key="r", gpu_uuid=gpu_uuid, socket_path=socket_path,
            timer=training.timer,
        )  # fmt: skip
        cleanup.callback(handle.detach)
        training.step(0)  # warm-up: torch infers shapes
        graph = training.capture_step(1)
        for _ in range(NUM_REPLAYS):
            graph.replay()
        training.synchronize()
        if rank == 0:
            status = DaemonClient(socket_path).get_status
            wait_until(lambda: any(one["num_iterations"] >= NUM_REPLAYS // 2 for one in status()["jobs"]))
            (job,) = status()["jobs"]
        dist.barrier()  # a rank that leaves ends the job
        errors = handle.num_errors
    return {"job": job, "num_errors": errors, "num_unread": training.timer.num_unread_replays}


def test_replays_of_a_captured_schedule_are_the_jobs_iterations(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"warmup_iterations": 2, "baseline_iterations": 8}
    with running_daemon(tmp_path / "daemon", kind=WorldKind.KIND, **settings) as daemon:
        ranks = run_ranks(
            NUM_RANKS, tmp_path, train, str(daemon.world_path), str(daemon.socket_path), str(tmp_path / "signals")
        )

    job = ranks[0]["job"]
    assert job["captured"] == "timetable"
    assert job["num_iterations"] >= NUM_REPLAYS // 2
    assert job["num_baseline_iterations"] > 0
    # Times are real: on a busy host they may end a plan. Any other reason to fall back is an error.
    phase, reason = job["phase"], job["phase_reason"]
    is_ended_by_times = phase == "fallback" and re.fullmatch(BY_TIMES, reason)
    assert phase in {"baseline", "trial", "tuned"} or is_ended_by_times, reason
    assert all(rank["num_errors"] == 0 for rank in ranks)
