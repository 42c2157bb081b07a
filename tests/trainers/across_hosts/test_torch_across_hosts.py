"""A torch pipeline over gloo on two hosts, attached with one line: one plan on both, and equal losses."""

import multiprocessing
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from gpuenergyd.gpu.drivers.simulated import SimulatedHost
from gpuenergyd.store import JobSummary, open_history
from gpuenergyd.store.reading.trainings import find_trainings
from gpuenergyd.store.records import RankRecord
from gpuenergyd_trainers.demo.gpt_pipeline import GptRank
from gpuenergyd_trainers.torch_pipelining import attach
from tests.support.host_trainer import enter_namespace
from tests.support.two_hosts import NoNetworkNamespaceError, TwoHosts, two_hosts
from tests.support.waiting import wait_until
from tests.trainers.pipeline_processes import run_ranks

pytestmark = pytest.mark.torch
NUM_RANKS, NUM_MICROBATCHES = 2, 2
PORT = 29_571
DURATION_SCALE = 0.2
FOLLOWED_ITERATIONS = 3
LIMIT_S = 200.0


def make_rank(rank: int) -> GptRank:
    return GptRank("1f1b", rank, NUM_RANKS, NUM_MICROBATCHES, seed=5)


def step(training: GptRank, index: int) -> list[str]:
    return [float(loss.detach()).hex() for loss in training.step(index)]


def train_alone(rank: int, num_steps: int) -> list[list[str]]:
    training = make_rank(rank)
    return [step(training, index) for index in range(num_steps)]


def train_attached(rank: int, world_path: Path, socket_path: str) -> tuple[list[list[str]], list[int], int]:
    """Train until both ranks have followed a plan; return losses, the plan of each iteration, and internal errors."""
    host = SimulatedHost.open(world_path)
    gpu_uuid = host.identities()[0].gpu_uuid
    training = make_rank(rank)
    training.simulate_on(host, gpu_uuid, duration_scale=DURATION_SCALE)
    handle = attach(
        training.schedule, job="two-hosts", gpu_uuid=gpu_uuid, socket_path=socket_path, timer=training.timer
    )
    losses: list[list[str]] = []
    epochs: list[int] = []
    deadline = time.monotonic() + LIMIT_S
    is_enough = False
    while not is_enough:
        losses.append(step(training, len(losses)))
        epochs.append(handle.plan_epoch)
        followed = sum(epoch > 0 for epoch in epochs) >= FOLLOWED_ITERATIONS
        answer = torch.tensor([int(followed or time.monotonic() > deadline)])
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        is_enough = bool(answer.item())
    num_errors = handle.num_errors
    handle.detach()
    host.close()
    return losses, epochs, num_errors


def be_rank(rank: int, hosts: TwoHosts, sender: Any) -> None:
    enter_namespace(hosts.names[rank])
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR=hosts.addresses[0],
        MASTER_PORT=str(PORT),
        RANK=str(rank),
        WORLD_SIZE=str(NUM_RANKS),
        LOCAL_WORLD_SIZE="1",
        GLOO_SOCKET_IFNAME="hop",
        TORCHELASTIC_RUN_ID="two-hosts",
    )
    dist.init_process_group("gloo")
    daemon = hosts.daemons[rank]
    sender.send_bytes(pickle.dumps(train_attached(rank, daemon.world_path, str(daemon.socket_path))))
    dist.destroy_process_group()


def run_on(hosts: TwoHosts) -> list[tuple[list[list[str]], list[int], int]]:
    """Run one rank on each host; return their results."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(NUM_RANKS)]
    ranks = [context.Process(target=be_rank, args=(rank, hosts, pipes[rank][1])) for rank in range(NUM_RANKS)]
    try:
        for process in ranks:
            process.start()
        assert all(receiver.poll(LIMIT_S + 60) for receiver, _ in pipes), "a rank said nothing"
        found = [pickle.loads(receiver.recv_bytes()) for receiver, _ in pipes]
        for process in ranks:
            process.join(30)
        return found
    finally:
        for process in ranks:
            process.kill()
            process.join()
        for pipe in pipes:
            for end in pipe:
                end.close()


def test_a_torch_pipeline_across_hosts_follows_one_plan_with_equal_losses(tmp_path: Path) -> None:
    settings = {"policy": "uniform", "warmup_iterations": 0, "baseline_iterations": 2, "max_slowdown_ratio": 0.5}
    try:
        with two_hosts(tmp_path, **settings) as hosts:
            found = run_on(hosts)
            wait_until(hosts.is_as_found, 60)
            logs = [daemon.log for daemon in hosts.daemons]
    except NoNetworkNamespaceError as error:
        pytest.skip(f"no network namespaces here: {error}")
    num_steps = len(found[0][0])
    alone = run_ranks(NUM_RANKS, tmp_path, train_alone, num_steps)

    assert [losses for losses, _, _ in found] == alone
    assert [num_errors for _, _, num_errors in found] == [0, 0]
    for _, epochs, _ in found:
        assert sum(epoch > 0 for epoch in epochs) >= FOLLOWED_ITERATIONS
    assert all("joined (GPU-" in log for log in logs)
    assert "-whole: profiling" in logs[0], "one daemon plans for both hosts"
    assert "-whole: " not in logs[1]
    assert_is_one_training([daemon.database_path for daemon in hosts.daemons])


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
