"""Megatron-core's virtual stages and combined steps on CPU, with CUDA calls replaced; requires megatron-core."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuenergyd.core.pipeline.graph import InstructionKind, Schedule
from gpuenergyd.store import open_history
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_trainers.joining.ordered_rank import order_rows
from gpuenergyd_trainers.megatron import planned_schedule
from tests.client.fake_daemon import FakeDaemon
from tests.support.daemon_process import DaemonProcess
from tests.support.megatron_training import MegatronTraining
from tests.support.thorough import thorough
from tests.support.waiting import wait_until
from tests.trainers.pipeline_processes import run_ranks
from tests.trainers.unchanged_programs import run_unchanged

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

SIZES = [
    (pp, microbatches, chunks, group)
    for pp in (2, 3, 4)
    for chunks in (2, 3)
    for microbatches in (4, 6, 9)
    for group in (pp, pp + 1, microbatches)
    if pp <= group <= microbatches and (microbatches % group == 0 or microbatches % group >= pp)
]


def config_of(pp: int, chunks: int, group: int, *, is_combined: bool, overlaps_p2p: bool = True) -> Any:
    return SimpleNamespace(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks,
        microbatch_group_size_per_vp_stage=group,
        overlap_moe_expert_parallel_comm=is_combined,
        overlap_p2p_comm=overlaps_p2p,
    )


def megatrons_order(pp: int, rank: int, sizes: tuple[int, int, int], *, is_combined: bool) -> list[int]:
    """Return chunks in the order that Megatron's own functions give: c + 1 for a forward, -c - 1 for a backward."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table  # type: ignore[import-not-found]  # noqa: PLC0415
    from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order  # type: ignore[import-not-found]  # noqa: PLC0415

    microbatches, chunks, group = sizes
    pipeline = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: pp, rank=lambda: rank), virtual_pipeline_model_parallel_size=chunks
    )
    _, _, warmup, _ = get_pp_rank_microbatches(
        microbatches, chunks, group, overlap_moe_expert_parallel_comm=is_combined, p2p_communicator=pipeline
    )
    order: list[int] = convert_schedule_table_to_order(warmup, chunks, get_schedule_table(microbatches, chunks, group))
    return order


@pytest.mark.parametrize("is_combined", [False, True])
def test_orders_are_those_of_megatrons_own_schedule_table(*, is_combined: bool) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.pipeline_parallel.schedules import get_schedule_table  # noqa: PLC0415

    for pp, microbatches, chunks, group in SIZES:
        schedule = planned_schedule(config_of(pp, chunks, group, is_combined=is_combined), pp, microbatches)
        table = get_schedule_table(microbatches, chunks, group)

        for rank in range(pp):
            ran = [part for _, parts in schedule.computations(rank) for part in parts]
            signs = [(1 if i.kind is InstructionKind.F else -1) * (i.chunk_index + 1) for i in ran]
            forwards = [(i.microbatch_index, i.chunk_index) for i in ran if i.kind is InstructionKind.F]
            backwards = [(i.microbatch_index, chunks - 1 - i.chunk_index) for i in ran if i.kind is InstructionKind.B]
            sizes = microbatches, chunks, group
            assert signs == megatrons_order(pp, rank, sizes, is_combined=is_combined)
            assert forwards == backwards == table


LAYOUTS = {
    "virtual stages": MegatronTraining((), chunks=2, overlaps_p2p=True, microbatches=4),
    "groups of three": MegatronTraining((), chunks=2, overlaps_p2p=True, microbatches=6, group_size=3),
    "pairs": MegatronTraining((), pp=3, chunks=2, microbatches=3),
    "combined": MegatronTraining((), chunks=2, overlaps_p2p=True, microbatches=4, is_combined=True),
    "combined without a pipeline": MegatronTraining((), pp=1, microbatches=4, is_combined=True),
}


def planned_for(training: MegatronTraining) -> Schedule:
    config = config_of(
        training.pp,
        training.chunks,
        training.group_size or training.pp,
        is_combined=training.is_combined,
        overlaps_p2p=training.overlaps_p2p,
    )
    return planned_schedule(config, training.pp, training.microbatches)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_steps_run_in_the_registered_order_with_equal_losses(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    SimulatedHost.create(tmp_path / "gpus", ["a100-sxm"] * LAYOUTS[layout].num_ranks, seed=1)
    training = replace(LAYOUTS[layout], world_paths=(tmp_path / "gpus",), iterations=4, scale=0.05)
    alone = tmp_path / "alone"
    alone.mkdir()
    plain = run_ranks(training.num_ranks, alone, training.run_rank)
    with FakeDaemon(tmp_path) as daemon:
        joined = run_ranks(training.num_ranks, tmp_path, replace(training, socket_paths=(daemon.socket_path,)).run_rank)
        registrations = [daemon.registrations.get_nowait() for _ in range(daemon.registrations.qsize())]
        reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]

    planned = planned_for(training)
    assert [losses for losses, _ in joined] == [losses for losses, _ in plain]
    orders = [order_rows(planned, rank) for rank in range(training.pp)]
    assert {one["schedule_name"] for one in registrations} == {planned.name}
    for registration in registrations:
        assert [tuple(row) for row in registration["order"]] == list(orders[registration["pp_rank"]])
    assert len(registrations) == training.num_ranks
    assert {daemon.tokens[report["rank_token"]] for report in reports} == set(range(training.pp))
    for report in reports:
        order = orders[daemon.tokens[report["rank_token"]]]
        assert [tuple(row[:3]) for row in report["instructions"]] == list(order)


@pytest.mark.parametrize("layout", ["virtual stages", *thorough("combined")])
def test_ranks_follow_plans_of_a_real_daemon_with_equal_losses(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    settings = {"policy": "uniform", "baseline_iterations": 2}
    training = replace(LAYOUTS[layout], scale=0.3, max_slowdown=0.5, num_followed=1)
    daemon = DaemonProcess(tmp_path / "host", training.num_ranks, settings).start()
    training = replace(training, world_paths=(daemon.world_path,), socket_paths=(str(daemon.socket_path),))
    alone = tmp_path / "alone"
    alone.mkdir()
    try:
        joined = run_ranks(training.num_ranks, tmp_path, training.run_rank)
        wait_until(lambda: daemon.is_as_found() and daemon.job() is None)
    finally:
        daemon.stop()
    num_iterations = len(joined[0][0])
    without = replace(training, socket_paths=(), num_followed=0, iterations=num_iterations)
    plain = run_ranks(training.num_ranks, alone, without.run_rank)
    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()

    assert [losses for losses, _ in joined] == [losses for losses, _ in plain]
    assert all(any(epochs) for _, epochs in joined)
    assert summary.schedule_name == planned_for(LAYOUTS[layout]).name
    assert len(summary.gpu_uuids) == training.num_ranks


UNCHANGED = """
import os
import torch
import torch.distributed as dist
from tests.support.megatron_stages import NoWork, bare_config, batches, forward_step, make_stage, replace_cuda_calls

replace_cuda_calls()
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
config = bare_config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2,
                     pipeline_dtype=torch.float32, overlap_p2p_comm=True, batch_p2p_comm=False)
model = [make_stage(config, parallel_state, NoWork(), chunk) for chunk in range(2)]
losses = []
for step in range(12):
    data = batches(step, 4)
    losses += get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[iter(data) for _ in model], model=model, num_microbatches=4,
        seq_length=4, micro_batch_size=1, forward_only=step == 0)
    for stage in model:
        stage.zero_grad()
with open(os.path.join(os.environ["OUT"], "losses-" + os.environ["RANK"]), "w") as out:
    print(*(entry["loss"] for entry in losses), file=out)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_an_unmodified_program_joins_under_gpuenergyd_run_with_equal_losses(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    joined = run_unchanged(tmp_path, UNCHANGED, num_joining=2, launcher=torchrun)

    planned = planned_for(LAYOUTS["virtual stages"])
    for rank in range(2):
        joined_losses, losses = (
            (tmp_path / run / f"losses-{rank}").read_text(encoding="ascii") for run in ("joined", "without")
        )
        assert joined_losses == losses
        registration = next(r for r in joined.registrations if r["pp_rank"] == rank)
        assert (registration["gpu_uuid"], registration["num_chunks"]) == (f"GPU-{rank}", 2)
        assert [tuple(row) for row in registration["order"]] == list(order_rows(planned, rank))
    assert joined.reports
