"""A DeepSpeed PipelineEngine on two CPU processes; requires DeepSpeed."""

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed")

from gpuenergyd.core.pipeline.schedules import make_schedule  # noqa: E402  after the skips
from gpuenergyd_trainers.deepspeed import attach  # noqa: E402
from tests.client.fake_daemon import FakeDaemon  # noqa: E402
from tests.trainers.pipeline_processes import Pace, run_ranks  # noqa: E402
from tests.trainers.unchanged_programs import run_unchanged  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

NUM_RANKS = 2
NUM_MICROBATCHES = 4
NUM_STEPS = 5


def train(rank: int, socket_path: str | None, num_replicas: int = 1) -> Any:
    # What it would compile on first use is a faster all-reduce on one host, which a pipeline has no need of.
    deepspeed.ops.__compatible_ops__ = {}
    num_ranks = str(NUM_RANKS * num_replicas)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=num_ranks, LOCAL_SIZE=num_ranks)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(1)
    layers = [deepspeed.pipe.LayerSpec(torch.nn.Linear, 8, 8) for _ in range(4)]
    model = deepspeed.pipe.PipelineModule(layers=layers, num_stages=NUM_RANKS, loss_fn=torch.nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": NUM_MICROBATCHES,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000,
        },
    )
    before = dict(vars(engine))
    handle = attach(engine, job="test", run_key="r", gpu_uuid=f"GPU-{rank}", socket_path=socket_path or "/none")
    if socket_path is None:
        handle.detach()
    generator = torch.Generator().manual_seed(2)
    data = iter([(torch.randn(2, 8, generator=generator),) * 2 for _ in range(NUM_STEPS * NUM_MICROBATCHES)])
    pace = Pace(handle, rank // num_replicas, socket_path)
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(float(engine.train_batch(data_iter=data)).hex())
        pace.keep()
    was_attached, num_errors = handle.is_attached, handle.num_errors
    handle.detach()
    pace.finish()
    added = sorted(set(vars(engine)) - set(before))
    return losses, was_attached, num_errors, [name for name in added if name in {"_INSTRUCTION_MAP", "train_batch"}]


def test_the_engine_reports_1f1b_iterations_and_losses_are_unchanged(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    plain = run_ranks(NUM_RANKS, alone, train, None)
    with FakeDaemon(tmp_path) as daemon:
        joined = run_ranks(NUM_RANKS, tmp_path, train, daemon.socket_path)
        reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]

    planned = make_schedule("1f1b", NUM_RANKS, NUM_MICROBATCHES)
    assert [result[0] for result in joined] == [result[0] for result in plain]
    assert [result[1:] for result in joined] == [(True, 0, [])] * NUM_RANKS
    for rank in range(NUM_RANKS):
        mine = [report for report in reports if daemon.tokens[report["rank_token"]] == rank]
        order = [(str(i.kind), i.microbatch_index, 0) for i in planned.orders[rank]]
        assert [report["iteration_index"] for report in mine] == list(range(NUM_STEPS - 1))
        assert all([tuple(row[:3]) for row in report["instructions"]] == order for report in mine)


def test_replicas_on_one_host_register_as_pipelines_of_their_own(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        joined = run_ranks(2 * NUM_RANKS, tmp_path, train, daemon.socket_path, 2)
        registrations = [daemon.registrations.get_nowait() for _ in range(daemon.registrations.qsize())]

    assert [result[1:3] for result in joined] == [(True, 0)] * 2 * NUM_RANKS
    names = ("dp_rank", "pp_rank", "stage_rank", "num_pp_ranks", "num_stage_ranks", "gpu_uuid")
    assert sorted(tuple(registration[name] for name in names) for registration in registrations) == [
        (dp, pp, 0, NUM_RANKS, 1, f"GPU-{2 * pp + dp}") for dp in range(2) for pp in range(NUM_RANKS)
    ]


UNCHANGED = f"""
import os
import deepspeed
import torch

deepspeed.ops.__compatible_ops__ = {{}}
os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
torch.manual_seed(1)
layers = [deepspeed.pipe.LayerSpec(torch.nn.Linear, 8, 8) for _ in range(4)]
model = deepspeed.pipe.PipelineModule(layers=layers, num_stages={NUM_RANKS}, loss_fn=torch.nn.functional.mse_loss)
engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config={{
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": {NUM_MICROBATCHES},
    "optimizer": {{"type": "SGD", "params": {{"lr": 0.1}}}}, "zero_allow_untested_optimizer": True,
    "steps_per_print": 1000}})
generator = torch.Generator().manual_seed(2)
data = iter([(torch.randn(2, 8, generator=generator),) * 2 for _ in range(12 * {NUM_MICROBATCHES})])
losses = [float(engine.train_batch(data_iter=data)).hex() for _ in range(12)]
with open(os.path.join(os.environ["OUT"], "losses-" + os.environ["RANK"]), "w") as out:
    print(*losses, file=out)
torch.distributed.barrier()
os._exit(0)
"""


@pytest.mark.thorough
def test_an_unmodified_program_joins_under_gpuenergyd_run_with_equal_losses(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    joined = run_unchanged(tmp_path, UNCHANGED, num_joining=NUM_RANKS, launcher=torchrun)

    planned = make_schedule("1f1b", NUM_RANKS, NUM_MICROBATCHES)
    for rank in range(NUM_RANKS):
        joined_losses, losses = (
            (tmp_path / run / f"losses-{rank}").read_text(encoding="ascii") for run in ("joined", "without")
        )
        assert joined_losses == losses
        assert len(losses.split()) == 12
        registration = next(r for r in joined.registrations if r["pp_rank"] == rank)
        assert registration["gpu_uuid"] == f"GPU-{rank}"
        assert registration["order"] == [[str(i.kind), i.microbatch_index, 0] for i in planned.orders[rank]]
    assert joined.reports
