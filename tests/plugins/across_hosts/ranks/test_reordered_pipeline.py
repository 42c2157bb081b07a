"""A torch pipeline on two hosts with their own daemons: both change their order together, with equal losses."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402  after the skip
from torch.distributed.pipelining import Schedule1F1B  # noqa: E402

from gpuenergyd_sim.driver.host import SimulatedHost  # noqa: E402
from gpuenergyd_sim.training.gpt_model import build_stage, loss_of, make_batch  # noqa: E402
from gpuenergyd_trainers.torch_pipelining import attach  # noqa: E402
from tests.plugins.across_hosts.ranks.test_torch_across_hosts import enter_host  # noqa: E402
from tests.support.daemon_process import DaemonProcess  # noqa: E402
from tests.support.scripted_orders import DAEMON_PROLOGUE  # noqa: E402
from tests.support.two_hosts import NoNetworkNamespaceError, TwoHosts  # noqa: E402
from tests.support.waiting import LIMIT_S, wait_until  # noqa: E402
from tests.trainers.executed import TracedStage, share_trace  # noqa: E402
from tests.trainers.pipeline_processes import run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.thorough]
NUM_RANKS, NUM_MICROBATCHES = 2, 4
PORT = 29_573
NUM_AFTER = 5
"""Iterations in 1F1B after those with split backwards."""


def train(rank: int, daemon: DaemonProcess | None, num_steps: int) -> tuple[list[list[str]], list[str], int]:
    """Train one rank; return losses and kinds of instructions of each step, and client errors.

    Attached, the ranks train until they have run split backwards and 1F1B again.
    """
    model = build_stage(rank, NUM_RANKS, seed=5)
    stage = TracedStage(model, rank, NUM_RANKS, torch.device("cpu"))
    trace = share_trace([stage])
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handle, host = None, None
    if daemon is not None:
        host = SimulatedHost.open(daemon.world_path)
        handle = attach(
            schedule, job="reordered", gpu_uuid=host.identities()[0].gpu_uuid, socket_path=str(daemon.socket_path),
            allow_reorder=True,
        )  # fmt: skip
    losses: list[list[str]] = []
    kinds: list[str] = []
    deadline = time.monotonic() + LIMIT_S
    is_enough = False
    while not is_enough:
        trace.clear()
        inputs, targets = make_batch(len(losses), NUM_MICROBATCHES, seed=5)
        own: list[Any] = []
        keywords: dict[str, Any] = {"target": targets, "losses": own} if stage.is_last else {}
        schedule.step(*((inputs,) if stage.is_first else ()), **keywords)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([float(loss.detach()).hex() for loss in own])
        kinds.append("".join(sorted({kind for kind, *_ in trace})))
        last_split = max((k for k, found in enumerate(kinds) if found == "FIW"), default=len(kinds))
        is_back = len(kinds) - last_split > NUM_AFTER
        if daemon is None:
            is_enough = len(losses) == num_steps
        else:
            answer = torch.tensor([int(is_back or time.monotonic() > deadline)])
            dist.all_reduce(answer, op=dist.ReduceOp.MIN)
            is_enough = bool(answer.item())
    num_errors = handle.num_errors if handle is not None else 0
    if handle is not None and host is not None:
        handle.detach()
        host.close()
    return losses, kinds, num_errors


def train_alone(rank: int, num_steps: int) -> list[list[str]]:
    return train(rank, None, num_steps)[0]


def train_on_host(rank: int, hosts: TwoHosts) -> tuple[list[list[str]], list[str], int]:
    return train(rank, hosts.daemons[rank], 0)


def test_a_torch_pipeline_across_hosts_changes_its_order_together_with_equal_losses(tmp_path: Path) -> None:
    settings = {"policy": "uniform", "warmup_iterations": 0, "baseline_iterations": 2, "max_slowdown_ratio": 1.0}
    try:
        hosts = TwoHosts(tmp_path, settings)
    except NoNetworkNamespaceError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        for daemon in hosts.daemons:
            daemon.prologue = DAEMON_PROLOGUE
        hosts.start_daemons()
        prepare = partial(enter_host, hosts, port=PORT)
        found = run_ranks(NUM_RANKS, tmp_path, train_on_host, hosts, limit_s=LIMIT_S + 60, prepare=prepare)
        wait_until(hosts.is_as_found)
        logs = [daemon.log for daemon in hosts.daemons]
    finally:
        hosts.close()
    num_steps = len(found[0][0])
    alone = run_ranks(NUM_RANKS, tmp_path, train_alone, num_steps)

    (_, first, _), (_, second, _) = found
    assert first == second
    split = [step for step, kinds in enumerate(first) if kinds == "FIW"]
    assert split, logs[0][-4000:]
    assert set(first[split[-1] + 1 :]) == {"BF"}
    assert [losses for losses, _, _ in found] == alone
    assert [num_errors for _, _, num_errors in found] == [0, 0]
