"""Every torch.distributed.pipelining schedule with several stages per rank: order learned and right, losses equal."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import pipelining  # noqa: E402  after the skip

from gpuenergyd.core.schedules import make_schedule, stage_of_chunk  # noqa: E402
from gpuenergyd_trainers.gpt_model import build_stage, loss_of, make_batch  # noqa: E402
from gpuenergyd_trainers.torch_pipelining import attach  # noqa: E402
from gpuenergyd_trainers.wrapping import WrappedAttribute  # noqa: E402
from tests.client.fake_daemon import FakeDaemon  # noqa: E402
from tests.trainers.pipeline_processes import Pace, run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

NUM_RANKS = 4
NUM_CHUNKS = 2
NUM_STAGES = NUM_RANKS * NUM_CHUNKS
NUM_MICROBATCHES = 8
NUM_STEPS = 6
INTERLEAVED = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "looped-bfs": pipelining.ScheduleLoopedBFS,
    "interleaved-zb": pipelining.ScheduleInterleavedZeroBubble,
}
V_SHAPED = {"zbv": pipelining.ScheduleZBVZeroBubble, "dualpipev": pipelining.ScheduleDualPipeV}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as fake:
        yield fake


def stage_indices(schedule_name: str, rank: int) -> tuple[int, int]:
    return (rank, 2 * NUM_RANKS - 1 - rank) if schedule_name in V_SHAPED else (rank, NUM_RANKS + rank)


def trace_into(trace: list[tuple[str, int, int]], chunk_index: int, kind: str) -> Any:
    def make(compute: Any) -> Any:
        def traced(chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            is_partial = kind == "B" and not kwargs.get("full_backward", True)
            trace.append(("I" if is_partial else kind, chunk_id, chunk_index))
            return compute(chunk_id, *args, **kwargs)

        return traced

    return make


def train(rank: int, schedule_name: str, socket_path: str | None) -> Any:
    models = [build_stage(index, NUM_STAGES, seed=2) for index in stage_indices(schedule_name, rank)]
    stages = [
        pipelining.PipelineStage(model, index, NUM_STAGES, torch.device("cpu"))
        for model, index in zip(models, stage_indices(schedule_name, rank), strict=True)
    ]
    schedule: Any = {**INTERLEAVED, **V_SHAPED}[schedule_name](stages, NUM_MICROBATCHES, loss_fn=loss_of)
    trace: list[tuple[str, int, int]] = []
    for chunk_index, stage in enumerate(stages):
        for name, kind in (
            ("forward_one_chunk", "F"),
            ("backward_one_chunk", "B"),
            ("backward_weight_one_chunk", "W"),
        ):
            WrappedAttribute(stage, name, trace_into(trace, chunk_index, kind))
    handle = attach(schedule, job="test", run_key="r", gpu_uuid=f"GPU-{rank}", socket_path=socket_path or "/none")
    if socket_path is None:
        handle.detach()
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    has_last = any(stage.is_last for stage in stages)
    # Two iterations are learned from; the second is the first that is reported.
    pace = Pace(handle, rank, socket_path, first_iteration=1)
    exact_losses, traces = [], []
    for step in range(NUM_STEPS):
        trace.clear()
        inputs, targets = make_batch(step, NUM_MICROBATCHES, seed=2)
        losses: list[Any] = []
        arguments = (inputs,) if rank == 0 else ()
        schedule.step(*arguments, **({"target": targets, "losses": losses} if has_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        exact_losses.append([float(loss.detach()).hex() for loss in losses])
        traces.append(tuple(trace))
        pace.keep()
    result = exact_losses, traces, handle.num_errors, handle.is_attached
    handle.detach()
    pace.finish()
    return result


@pytest.mark.parametrize("schedule_name", [*INTERLEAVED, *V_SHAPED])
def test_learned_order_is_the_executed_one_and_losses_are_untouched(
    tmp_path: Path, daemon: FakeDaemon, schedule_name: str
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    plain = run_ranks(NUM_RANKS, alone, train, schedule_name, None)
    joined = run_ranks(NUM_RANKS, tmp_path, train, schedule_name, daemon.socket_path)

    generated = make_schedule(schedule_name, NUM_RANKS, NUM_MICROBATCHES, NUM_CHUNKS)
    assert [losses for losses, *_ in joined] == [losses for losses, *_ in plain]
    assert any(losses[0] for losses, *_ in joined)
    if schedule_name in V_SHAPED:
        assert stage_of_chunk(schedule_name, NUM_RANKS) == generated.stage_of_chunk
        assert generated.stage_of_chunk == tuple(stage_indices(schedule_name, rank) for rank in range(NUM_RANKS))
    registered = [daemon.registrations.get_nowait() for _ in range(NUM_RANKS)]
    reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]
    for rank, (_, traces, num_errors, is_attached) in enumerate(joined):
        registration = next(r for r in registered if r["pp_rank"] == rank)
        order = [tuple(row) for row in registration["order"]]
        mine = [report for report in reports if daemon.tokens[report["rank_token"]] == rank]
        assert is_attached
        assert num_errors == 0
        assert (registration["schedule_name"], registration["num_chunks"]) == (schedule_name, NUM_CHUNKS)
        assert order == [(str(i.kind), i.microbatch_index, i.chunk_index) for i in generated.orders[rank]]
        assert all(list(trace) == order for trace in traces)
        # Step 0 infers shapes, iterations 0 and 1 are learned from.
        assert [report["iteration_index"] for report in mine] == list(range(1, NUM_STEPS - 1))
        assert all([tuple(row[:3]) for row in report["instructions"]] == order for report in mine)
