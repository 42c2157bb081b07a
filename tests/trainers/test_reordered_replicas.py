"""Two replicas of a torch pipeline whose ranks get a plan with an order at different times: losses stay equal."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402  after the skip
from torch.distributed.pipelining import Schedule1F1B  # noqa: E402

from gpuenergyd.core.pipeline.graph import one_forward_one_backward  # noqa: E402
from gpuenergyd.core.pipeline.reorder import split_in_place  # noqa: E402
from gpuenergyd_sim.training.gpt_model import build_stage, loss_of, make_batch  # noqa: E402
from gpuenergyd_trainers.joining.ordered_rank import order_rows  # noqa: E402
from gpuenergyd_trainers.torch_pipelining import attach  # noqa: E402
from tests.client.fake_daemon import FakeDaemon, plan_slice, wait_for_report  # noqa: E402
from tests.trainers.executed import TracedStage, share_trace  # noqa: E402
from tests.trainers.pipeline_processes import run_ranks  # noqa: E402

pytestmark = pytest.mark.torch
NUM_REPLICAS, NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 2, 2, 4, 13
SPLIT = split_in_place(one_forward_one_backward(NUM_STAGES, NUM_MICROBATCHES))
SENT_AT = {(0, 0): 2, (0, 1): 3, (1, 0): 2, (1, 1): 5}
"""The iteration with whose report a rank gets the plan with the order, long after its first iteration."""
BACK_AT = 9


def train(rank: int, socket_path: str | None) -> Any:
    """Train one rank; return losses, gradients and kinds of instructions of each step."""
    replica, pp_rank = divmod(rank, NUM_STAGES)
    groups: list[Any] = [dist.new_group([r * NUM_STAGES + s for s in range(NUM_STAGES)]) for r in range(NUM_REPLICAS)]
    siblings = [dist.new_group([r * NUM_STAGES + s for r in range(NUM_REPLICAS)]) for s in range(NUM_STAGES)]
    model = build_stage(pp_rank, NUM_STAGES, seed=5)
    stage = TracedStage(model, pp_rank, NUM_STAGES, torch.device("cpu"), group=groups[replica])
    trace = share_trace([stage])
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    handle = None
    if socket_path is not None:
        handle = attach(
            schedule, job="replicas", run_key="r", gpu_uuid=f"GPU-{rank}", socket_path=socket_path, dp_rank=replica,
            allow_reorder=True,
        )  # fmt: skip
    found = []
    for step in range(NUM_STEPS):
        trace.clear()
        inputs, targets = make_batch(step, NUM_MICROBATCHES, seed=5 + replica)
        losses: list[Any] = []
        keywords: dict[str, Any] = {"target": targets, "losses": losses} if stage.is_last else {}
        schedule.step(*((inputs,) if stage.is_first else ()), **keywords)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=siblings[pp_rank])
        gradients = [bytes(own.grad.numpy()) for own in model.parameters() if own.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        kinds = "".join(sorted({kind for kind, *_ in trace}))
        found.append(([float(loss.detach()).hex() for loss in losses], gradients, kinds))
        if socket_path is not None and step >= 2:
            wait_for_report(socket_path, pp_rank, step - 2)
        dist.barrier()
    if handle is not None:
        assert handle.num_errors == 0
        handle.detach()
    return found


def test_ranks_that_hear_of_an_order_late_run_1f1b_until_then_and_keep_their_losses(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        for (replica, pp_rank), sent_at in SENT_AT.items():
            there = {**plan_slice(1, 3), "order": order_rows(SPLIT, pp_rank)}
            daemon.plans_after[replica, pp_rank] = sent_at, [there, plan_slice(2, BACK_AT)]
        ranks = run_ranks(NUM_REPLICAS * NUM_STAGES, tmp_path, train, daemon.socket_path)
    alone_folder = tmp_path / "alone"
    alone_folder.mkdir()
    alone = run_ranks(NUM_REPLICAS * NUM_STAGES, alone_folder, train, None)

    for rank, steps in enumerate(ranks):
        split = [step for step, own in enumerate(steps) if own[2] == "FIW"]
        # Step 0 is no iteration. A rank gets its plan with the report of an iteration, during the next one.
        assert split == list(range(split[0], BACK_AT + 1))
        assert SENT_AT[divmod(rank, NUM_STAGES)] + 2 <= split[0] <= BACK_AT
    assert any(len({steps[step][2] for steps in ranks}) > 1 for step in range(NUM_STEPS))
    for own, other in zip(ranks, alone, strict=True):
        assert [step[:2] for step in own] == [step[:2] for step in other]
