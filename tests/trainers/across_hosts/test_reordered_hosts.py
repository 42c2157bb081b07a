"""Two hosts with a replica each: all ranks run split backwards in an iteration or none does; losses stay equal."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402  after the skip
from torch.distributed.pipelining import Schedule1F1B  # noqa: E402

from gpuenergyd.core.pipeline.graph import one_forward_one_backward  # noqa: E402
from gpuenergyd.core.pipeline.reorder import split_in_place  # noqa: E402
from gpuenergyd_trainers.across_hosts.host_orders import HostOrders  # noqa: E402
from gpuenergyd_trainers.demo.gpt_model import build_stage, loss_of, make_batch  # noqa: E402
from gpuenergyd_trainers.joining import membership  # noqa: E402
from gpuenergyd_trainers.joining.ordered_rank import order_rows  # noqa: E402
from gpuenergyd_trainers.torch_pipelining import attach  # noqa: E402
from tests.client.fake_daemon import FakeDaemon, plan_slice, wait_for_report  # noqa: E402
from tests.trainers.executed import TracedStage, share_trace  # noqa: E402
from tests.trainers.pipeline_processes import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch
NUM_HOSTS, NUM_STAGES, NUM_MICROBATCHES = 2, 2, 4
NUM_RANKS = NUM_HOSTS * NUM_STAGES
SPLIT = split_in_place(one_forward_one_backward(NUM_STAGES, NUM_MICROBATCHES))
SENT_AT = {(0, 0): 2, (0, 1): 3, (1, 0): 2, (1, 1): 5}
"""By host and stage: the iteration with whose report a rank gets the plan with the order."""
LEAVER = 3
NUM_SPLIT_STEPS = 5
"""Split steps after which the last rank leaves."""
MOST_STEPS = 3000
PERIOD_S = 0.01


def make_rank(rank: int) -> tuple[TracedStage, list[Any], Any, Any]:
    host, pp_rank = divmod(rank, NUM_STAGES)
    groups: list[Any] = [dist.new_group([h * NUM_STAGES + s for s in range(NUM_STAGES)]) for h in range(NUM_HOSTS)]
    siblings = [dist.new_group([h * NUM_STAGES + s for h in range(NUM_HOSTS)]) for s in range(NUM_STAGES)]
    model = build_stage(pp_rank, NUM_STAGES, seed=5)
    stage = TracedStage(model, pp_rank, NUM_STAGES, torch.device("cpu"), group=groups[host])
    return stage, share_trace([stage]), siblings[pp_rank], model


def train(rank: int, socket_paths: tuple[str, ...], port: int, num_steps: int) -> Any:
    """Train one rank; return losses, gradients and kinds of instructions of each step, and client errors."""
    host, pp_rank = divmod(rank, NUM_STAGES)
    stage, trace, siblings, model = make_rank(rank)
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handle = None
    if socket_paths:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": str(pp_rank),
            "LOCAL_WORLD_SIZE": str(NUM_STAGES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        setattr(membership, "HostOrders", partial(HostOrders, period_s=PERIOD_S))  # noqa: B010  not exported
        handle = attach(
            schedule, job="hosts", run_key="r", gpu_uuid=f"GPU-{rank}", socket_path=socket_paths[host], dp_rank=host,
            allow_reorder=True,
        )  # fmt: skip
    found: list[tuple[Any, ...]] = []
    num_split = num_plain_after = 0
    for step in range(num_steps):
        trace.clear()
        inputs, targets = make_batch(step, NUM_MICROBATCHES, seed=5 + host)
        losses: list[Any] = []
        keywords: dict[str, Any] = {"target": targets, "losses": losses} if stage.is_last else {}
        schedule.step(*((inputs,) if stage.is_first else ()), **keywords)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=siblings)
        gradients = [bytes(own.grad.numpy()) for own in model.parameters() if own.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        kinds = "".join(sorted({kind for kind, *_ in trace}))
        found.append(([float(loss.detach()).hex() for loss in losses], gradients, kinds))
        if socket_paths and 2 <= step <= max(SENT_AT.values()) + 3:
            wait_for_report(socket_paths[host], pp_rank, step - 2)
        states = torch.tensor([int(kinds == "FIW")])
        dist.all_reduce(states)  # all ranks count alike
        num_split += int(states[0]) == NUM_RANKS
        if handle is not None and num_split == NUM_SPLIT_STEPS and rank == LEAVER and handle.is_attached:
            assert handle.num_errors == 0
            handle.detach()
        num_plain_after += num_split >= NUM_SPLIT_STEPS and int(states[0]) == 0
        if num_plain_after == NUM_SPLIT_STEPS:
            break
    if handle is not None:
        assert handle.num_errors == 0
        handle.detach()
    return found


@pytest.mark.thorough
def test_hosts_change_orders_in_the_same_iteration_and_keep_their_losses(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # public
    folders = [tmp_path / f"host-{host}" for host in range(NUM_HOSTS)]
    for folder in folders:
        folder.mkdir()
    with FakeDaemon(folders[0]) as first, FakeDaemon(folders[1]) as second:
        for (host, pp_rank), sent_at in SENT_AT.items():
            there = {**plan_slice(1, 3), "order": order_rows(SPLIT, pp_rank)}
            there["training_id"] = f"{tmp_path.parent.name}{tmp_path.name}-{host}"
            (first, second)[host].plans_after[host, pp_rank] = sent_at, [there]
        ranks = run_ranks(NUM_RANKS, tmp_path, train, (first.socket_path, second.socket_path), store.port, MOST_STEPS)
    num_steps = len(ranks[0])
    alone_folder = tmp_path / "alone"
    alone_folder.mkdir()
    alone = run_ranks(NUM_RANKS, alone_folder, train, (), 0, num_steps)

    staying = [steps for rank, steps in enumerate(ranks) if rank != LEAVER]
    by_step = [{steps[step][2] for steps in staying} for step in range(num_steps)]
    assert num_steps < MOST_STEPS
    assert all(len(kinds) == 1 for kinds in by_step)
    split = [step for step, kinds in enumerate(by_step) if kinds == {"FIW"}]
    assert split[0] > max(SENT_AT.values())
    together = [step for step in split if ranks[LEAVER][step][2] == "FIW"]
    assert together == split[: len(together)]
    assert len(together) >= NUM_SPLIT_STEPS
    for own, other in zip(ranks, alone, strict=True):
        assert [step[:2] for step in own] == [step[:2] for step in other]
