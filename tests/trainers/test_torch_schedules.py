"""Each torch.distributed.pipelining schedule with several stages per rank: correct learned order, equal losses.

So have programs that run the instructions by functions of their own, as torchtitan's graph pipelines do.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from gpuenergyd.core.pipeline.schedules import make_schedule, stage_of_chunk
from gpuenergyd_sim.training.gpt_pipeline import PIPELINES, GptRank
from gpuenergyd_trainers.torch_pipelining import attach
from tests.client.fake_daemon import FakeDaemon
from tests.support.thorough import thorough
from tests.trainers.executed import TracedStage, share_trace
from tests.trainers.pipeline_processes import LoggedLines, Pace, run_ranks
from tests.trainers.registered_functions import OWN_FUNCTIONS

pytestmark = pytest.mark.torch

NUM_RANKS = 4
NUM_CHUNKS = 2
NUM_MICROBATCHES = 8
NUM_STEPS = 4
V_SHAPED = ("zbv", "dualpipev")
SCHEDULES = ("interleaved", "looped-bfs", "interleaved-zb", *V_SHAPED)


def train(rank: int, schedule_name: str, socket_path: str | None, functions: str = "torch's own") -> Any:
    training = GptRank(schedule_name, rank, NUM_RANKS, NUM_MICROBATCHES, seed=2, stage_class=TracedStage)
    trace = share_trace(training.stages)
    logged = LoggedLines()
    OWN_FUNCTIONS[functions](training.schedule)
    handle = attach(
        training.schedule, job="test", run_key="r", gpu_uuid=f"GPU-{rank}", socket_path=socket_path or "/none"
    )
    if socket_path is None:
        handle.detach()
    # Two iterations are learned from; the second is the first that is reported.
    pace = Pace(handle, rank, socket_path, first_iteration=1)
    exact_losses, traces = [], []
    for step in range(NUM_STEPS):
        trace.clear()
        losses = training.step(step)
        exact_losses.append([float(loss.detach()).hex() for loss in losses])
        traces.append(tuple(trace))
        pace.keep()
    result = exact_losses, traces, handle.num_errors, handle.is_attached, logged.warnings
    handle.detach()
    pace.finish()
    return result


@pytest.mark.parametrize(
    "schedule_name", ["interleaved", *thorough(*(name for name in SCHEDULES if name != "interleaved"))]
)
def test_the_learned_order_is_the_executed_one_and_losses_are_unchanged(
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
        assert generated.stage_of_chunk == tuple(
            PIPELINES[schedule_name].stage_indices(rank, NUM_RANKS) for rank in range(NUM_RANKS)
        )
    check_executed(daemon, joined, schedule_name)


@pytest.mark.parametrize(
    ("functions", "schedule_name"),
    [
        ("of the program", "interleaved"),
        *thorough(("of the program", "interleaved-zb"), ("that call the stages", "dualpipev")),
    ],
)
def test_instructions_in_registered_functions_are_marked_and_losses_are_unchanged(
    tmp_path: Path, daemon: FakeDaemon, functions: str, schedule_name: str
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    plain = run_ranks(NUM_RANKS, alone, train, schedule_name, None)
    joined = run_ranks(NUM_RANKS, tmp_path, train, schedule_name, daemon.socket_path, functions)

    assert [losses for losses, *_ in joined] == [losses for losses, *_ in plain]
    check_executed(daemon, joined, schedule_name)


def check_executed(daemon: FakeDaemon, joined: list[Any], schedule_name: str) -> None:
    """Assert that each rank registered and reported the order that it ran."""
    generated = make_schedule(schedule_name, NUM_RANKS, NUM_MICROBATCHES, NUM_CHUNKS)
    registered = [daemon.registrations.get_nowait() for _ in range(NUM_RANKS)]
    reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]
    for rank, (_, traces, num_errors, is_attached, warnings) in enumerate(joined):
        registration = next(r for r in registered if r["pp_rank"] == rank)
        order = [tuple(row) for row in registration["order"]]
        mine = [report for report in reports if daemon.tokens[report["rank_token"]] == rank]
        assert is_attached
        assert (num_errors, warnings) == (0, [])
        assert (registration["schedule_name"], registration["num_chunks"]) == (schedule_name, NUM_CHUNKS)
        assert order == [(str(i.kind), i.microbatch_index, i.chunk_index) for i in generated.orders[rank]]
        assert all(list(trace) == order for trace in traces)
        # Step 0 infers shapes, iterations 0 and 1 are learned from.
        assert [report["iteration_index"] for report in mine] == list(range(1, NUM_STEPS - 1))
        assert all([tuple(row[:3]) for row in report["instructions"]] == order for report in mine)


@pytest.mark.thorough
def test_a_program_that_overlaps_in_a_function_of_its_own_is_reported_once_as_not_followed(
    tmp_path: Path, daemon: FakeDaemon
) -> None:
    joined = run_ranks(NUM_RANKS, tmp_path, train, "dualpipev", daemon.socket_path, "of the program")

    for rank, (*_, num_errors, is_attached, warnings) in enumerate(joined):
        assert (num_errors, is_attached) == (0, False)
        assert warnings == [
            (
                f"gpuenergyd: job test, rank {rank}: not followed: it overlaps forwards and backwards in a function of"
                " its own; training continues at full speed"
            )
        ]
    assert daemon.registrations.empty()
