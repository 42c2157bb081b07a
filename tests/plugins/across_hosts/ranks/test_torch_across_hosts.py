"""A torch pipeline over gloo on two hosts, attached with one line: one plan on both, and equal losses."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.store import JobSummary, open_history
from gpuenergyd.store.reading.trainings import find_trainings
from gpuenergyd.store.records import RankRecord
from gpuenergyd_across_hosts.ranks.pipeline_member import PipelineMember
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.training.gpt_pipeline import GptRank
from gpuenergyd_trainers.joining import membership
from gpuenergyd_trainers.torch_pipelining import attach
from tests.support.daemon_process import DaemonProcess
from tests.support.host_trainer import enter_namespace
from tests.support.two_hosts import NoNetworkNamespaceError, TwoHosts, two_hosts
from tests.support.waiting import LIMIT_S, wait_until
from tests.trainers.pipeline_processes import run_ranks

pytestmark = pytest.mark.torch
NUM_RANKS, NUM_MICROBATCHES = 2, 2
PORT = 29_571
DURATION_SCALE = 0.2
FOLLOWED_ITERATIONS = 3
"""Iterations of the plan after its first block at full speed."""
ROUND_S = 0.03


def make_rank(rank: int) -> GptRank:
    return GptRank("1f1b", rank, NUM_RANKS, NUM_MICROBATCHES, seed=5)


def step(training: GptRank, index: int) -> list[str]:
    return [float(loss.detach()).hex() for loss in training.step(index)]


def train_alone(rank: int, num_steps: int) -> list[list[str]]:
    training = make_rank(rank)
    return [step(training, index) for index in range(num_steps)]


def train_attached(rank: int, daemon: DaemonProcess) -> tuple[list[list[str]], list[int], int]:
    """Train until the ranks have run a block at full speed between iterations of a plan.

    Return losses, the plan of each iteration, and internal errors.
    """
    host, socket_path = SimulatedHost.open(daemon.world_path), str(daemon.socket_path)
    gpu_uuid = host.identities()[0].gpu_uuid
    training = make_rank(rank)
    training.simulate_on(host, gpu_uuid, duration_scale=DURATION_SCALE)
    handle = attach(
        training.schedule, job="two-hosts", gpu_uuid=gpu_uuid, socket_path=socket_path, timer=training.timer
    )
    losses: list[list[str]] = []
    epochs: list[int] = []
    deadline = time.monotonic() + LIMIT_S
    asked_at: int | None = None
    is_enough = False
    while not is_enough:
        losses.append(step(training, len(losses)))
        epochs.append(handle.plan_epoch)
        if asked_at is None and rank == 0 and is_block_asked_for(daemon):
            asked_at = len(epochs) - 1
        followed = rank > 0 or (asked_at is not None and has_followed_a_block(epochs, asked_at))
        answer = torch.tensor([int(followed or time.monotonic() > deadline)])
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        is_enough = bool(answer.item())
    num_errors = handle.num_errors
    handle.detach()
    host.close()
    return losses, epochs, num_errors


def has_followed_a_block(epochs: list[int], asked_at: int) -> bool:
    """Return whether a plan was followed again after a block at full speed that was asked for at an iteration."""
    runs = [(epoch, len(list(own))) for epoch, own in groupby(epochs[asked_at:])]
    lengths = zip(runs, runs[1:], runs[2:], strict=False)
    return any(
        one == other > 0 == epoch and num >= JobRules().proof_iterations and num_after >= FOLLOWED_ITERATIONS
        for (one, _), (epoch, num), (other, num_after) in lengths
    )


def is_block_asked_for(daemon: DaemonProcess) -> bool:
    """Return whether the leader has asked for a block at full speed."""
    return any(job["pipeline"] and job["pipeline"]["num_proof_iterations"] for job in daemon.status()["jobs"])


def enter_host(hosts: TwoHosts, rank: int, *, port: int = PORT) -> str:
    """Move a rank to its host; return how the group finds its members."""
    enter_namespace(hosts.names[rank])
    os.environ.update(
        MASTER_ADDR=hosts.addresses[0], MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(NUM_RANKS),
        LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="hop", TORCHELASTIC_RUN_ID="two-hosts",
    )  # fmt: skip
    # Ranks agree on a plan in some rounds, however short iterations are; this process is the test's own.
    setattr(membership, "PipelineMember", partial(PipelineMember, period_s=ROUND_S))  # noqa: B010  not exported
    return "env://"


def train_on_host(rank: int, hosts: TwoHosts) -> tuple[list[list[str]], list[int], int]:
    return train_attached(rank, hosts.daemons[rank])


@pytest.mark.thorough
def test_a_torch_pipeline_across_hosts_follows_one_plan_with_equal_losses(tmp_path: Path) -> None:
    settings = {"policy": "uniform", "warmup_iterations": 0, "baseline_iterations": 2, "max_slowdown_ratio": 0.5}
    try:
        with two_hosts(tmp_path, **settings) as hosts:
            prepare = partial(enter_host, hosts)
            found = run_ranks(NUM_RANKS, tmp_path, train_on_host, hosts, limit_s=LIMIT_S + 60, prepare=prepare)
            wait_until(hosts.is_as_found)
            logs = [daemon.log for daemon in hosts.daemons]
            databases = [daemon.database_path for daemon in hosts.daemons]
    except NoNetworkNamespaceError as error:
        pytest.skip(f"no network namespaces here: {error}")
    num_steps = len(found[0][0])
    alone = run_ranks(NUM_RANKS, tmp_path, train_alone, num_steps)

    assert [losses for losses, _, _ in found] == alone
    assert [num_errors for _, _, num_errors in found] == [0, 0]
    assert all(epochs.count(0) < len(epochs) for _, epochs, _ in found)
    assert all("joined (GPU-" in log for log in logs)
    assert "-whole: trial" in logs[0], "one daemon plans for both hosts"
    assert "-whole: " not in logs[1]
    with open_history(databases[0]) as history:
        assert "proof of savings" in {event.reason for event in history.control_events()}
    assert_is_one_training(databases)
    assert_is_one_row(databases)


def assert_is_one_training(databases: list[Path]) -> None:
    """Each host's history has one job, and both together one training of two stages."""
    jobs: list[JobSummary] = []
    ranks: list[RankRecord] = []
    for path in databases:
        with open_history(path) as history:
            jobs += (own := history.job_summaries())
            ranks += history.ranks([job.job_id for job in own])
            (part,) = find_trainings(own, ranks)
            assert part.world_size == NUM_RANKS
    (training,) = find_trainings(jobs, ranks)
    assert (training.num_ranks, training.world_size) == (NUM_RANKS, NUM_RANKS)
    assert sorted(part.key.stage or 0 for part in training.parts) == [0, 1]


def assert_is_one_row(databases: list[Path]) -> None:
    """In one history of both hosts, the report has one row with the joules of both GPUs and the measured saving."""
    whole = merged(databases)
    command = [sys.executable, "-m", "gpuenergyd.cli.main", "report", "--database", str(whole)]
    output = subprocess.run([*command, "--group-by", "training", "--json"], check=True, capture_output=True).stdout
    (row,) = (group for group in json.loads(output)["groups"] if group["group"] != "(idle)")
    by_gpu = subprocess.run([*command, "--group-by", "gpu", "--json"], check=True, capture_output=True).stdout
    used_j = sum(group["job_energy_j"] or 0.0 for group in json.loads(by_gpu)["groups"])
    assert row["num_gpus"] == row["num_hosts"] == NUM_RANKS
    assert row["energy_j"] == pytest.approx(used_j, abs=0.01)
    assert row["energy_j"] == sum(part["energy_j"] for part in row["by_gpu"])
    (pipeline,) = row["pipelines"]
    low, ratio, high = (pipeline[name] for name in ("saving_low_ratio", "saving_ratio", "saving_high_ratio"))
    is_measured = ratio is not None  # it takes two blocks at full speed that the ranks have followed undisturbed
    assert low < ratio < high if is_measured else low is high is None
    assert row["num_jobs_counted"] + row["num_not_significant"] == is_measured, "the whole pipeline counts once"


def merged(databases: list[Path]) -> Path:
    """Return a history with the rows of all."""
    path = databases[0].with_name("both.sqlite3")
    shutil.copy(databases[0], path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("ATTACH ? AS other", (str(databases[1]),))
        names = connection.execute("SELECT name FROM other.sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in names:
            if not name.startswith(("sqlite_", "alembic")):
                connection.execute(f'INSERT OR IGNORE INTO main."{name}" SELECT * FROM other."{name}"')
        connection.commit()
    return path
