"""Megatron-core's 1F1B on two CPU processes with CUDA calls replaced; requires megatron-core."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.store import open_history
from gpuenergyd_trainers.joining.place_sources import megatron_place
from gpuenergyd_trainers.megatron import attach
from tests.client.fake_daemon import FakeDaemon
from tests.support.daemon_process import DaemonProcess
from tests.support.megatron_training import MegatronTraining
from tests.support.waiting import wait_until
from tests.trainers.pipeline_processes import Pace, run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

NUM_RANKS = 2
NUM_MICROBATCHES = 4
WIDTH = 8
SEQUENCE = 4


class CountingTimers:
    """Timers that a training script has set before attaching."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """Return the timer of a name."""
        del log_level
        return SimpleNamespace(
            start=lambda barrier=False: self.calls.append(("start", name)),  # noqa: ARG005  Megatron's signature
            stop=lambda barrier=False: self.calls.append(("stop", name)),  # noqa: ARG005  Megatron's signature
        )


def train(rank: int, socket_path: str | None, num_tp_ranks: int = 1) -> Any:
    monkeypatch = pytest.MonkeyPatch()
    zeros = torch.zeros

    def zeros_on_cpu(*args: Any, **kwargs: Any) -> Any:
        return zeros(*args, **{**kwargs, "device": "cpu"})

    monkeypatch.setattr(torch, "zeros", zeros_on_cpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    import megatron.core.parallel_state as state  # type: ignore[import-not-found]  # noqa: PLC0415  after the replacing
    from megatron.core import ModelParallelConfig  # noqa: PLC0415
    from megatron.core.enums import ModelType  # type: ignore[import-not-found]  # noqa: PLC0415
    from megatron.core.pipeline_parallel.schedules import (  # type: ignore[import-not-found]  # noqa: PLC0415
        forward_backward_pipelining_without_interleaving as run_step,
    )

    state.initialize_model_parallel(tensor_model_parallel_size=num_tp_ranks, pipeline_model_parallel_size=NUM_RANKS)
    config = ModelParallelConfig(
        tensor_model_parallel_size=num_tp_ranks,
        pipeline_model_parallel_size=NUM_RANKS,
        pipeline_dtype=torch.float32,
    )
    config.hidden_size = WIDTH
    config.fine_grained_activation_offloading = False  # a transformer's configuration has it, this bare one has not
    config.timers = CountingTimers()
    timers = config.timers
    torch.manual_seed(rank)

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, WIDTH)
            self.config = config
            self.model_type = ModelType.encoder_or_decoder
            self.received: Any = None

        def set_input_tensor(self, tensors: list[Any]) -> None:
            """Set the activations of the previous stage."""
            self.received = tensors[0]

        def forward(self, x: Any) -> Any:
            """Return activations."""
            return self.layer(x if self.received is None else self.received)

    model = Stage()
    handle = attach(
        config,
        job="test",
        num_microbatches=NUM_MICROBATCHES,
        run_key="r",
        gpu_uuid=f"GPU-{rank}",
        socket_path=socket_path or "/none",
    )
    if socket_path is None:
        handle.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward_step(data: Any, stage: Any) -> Any:
        output = stage(next(data))
        return output, lambda out: (out.square().mean(), {"loss": float(out.detach().square().mean()).hex()})

    def run(step: int, *, forward_only: bool = False) -> list[str]:
        generator = torch.Generator().manual_seed(step)
        data = iter([torch.randn(SEQUENCE, 1, WIDTH, generator=generator) for _ in range(NUM_MICROBATCHES)])
        losses = run_step(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        optimizer.step()
        optimizer.zero_grad()
        return [entry["loss"] for entry in losses]

    pace = Pace(handle, rank // num_tp_ranks, socket_path)
    all_losses = []
    for step in range(8):
        is_evaluation = step == 4
        all_losses.append(run(step, forward_only=is_evaluation))
        if step not in {4, 5, 6}:  # the forgotten iteration of the evaluation is never reported
            pace.keep()
    result = all_losses, handle.is_attached, handle.num_errors, timers.calls
    handle.detach()
    pace.finish()
    return *result, config.timers is timers


def test_megatron_reports_1f1b_iterations_and_no_evaluations(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    alone = tmp_path / "alone"
    alone.mkdir()
    plain = run_ranks(NUM_RANKS, alone, train, None)
    with FakeDaemon(tmp_path) as daemon:
        joined = run_ranks(NUM_RANKS, tmp_path, train, daemon.socket_path)
        reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]

    planned = make_schedule("1f1b", NUM_RANKS, NUM_MICROBATCHES)
    assert [result[0] for result in joined] == [result[0] for result in plain]
    assert [result[1:3] for result in joined] == [(True, 0)] * NUM_RANKS
    assert [result[3:] for result in joined] == [(plain[rank][3], True) for rank in range(NUM_RANKS)]
    for rank in range(NUM_RANKS):
        mine = [report for report in reports if daemon.tokens[report["rank_token"]] == rank]
        order = [(str(i.kind), i.microbatch_index, 0) for i in planned.orders[rank]]
        assert all([tuple(row[:3]) for row in report["instructions"]] == order for report in mine)
        assert [report["next_begin_mono_ns"] == 0 for report in mine] == [False, False, False, False, True]


def test_tensor_parallel_ranks_register_as_ranks_of_one_stage(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    with FakeDaemon(tmp_path) as daemon:
        joined = run_ranks(2 * NUM_RANKS, tmp_path, train, daemon.socket_path, 2)
        registrations = [daemon.registrations.get_nowait() for _ in range(daemon.registrations.qsize())]

    assert [result[1:3] for result in joined] == [(True, 0)] * 2 * NUM_RANKS
    names = ("pp_rank", "stage_rank", "num_pp_ranks", "num_stage_ranks", "dp_rank", "gpu_uuid")
    assert sorted(tuple(registration[name] for name in names) for registration in registrations) == [
        (pp, tp, NUM_RANKS, 2, 0, f"GPU-{2 * pp + tp}") for pp in range(NUM_RANKS) for tp in range(2)
    ]
    assert len({registration["run_key"] for registration in registrations}) == 1


def test_tensor_parallel_ranks_follow_one_plan_of_a_real_daemon_with_equal_losses(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    settings = {"policy": "uniform", "max_slowdown_ratio": 0.5, "baseline_iterations": 2}
    daemon = DaemonProcess(tmp_path / "host", 4, settings).start()
    alone = tmp_path / "alone"
    alone.mkdir()
    training = MegatronTraining((daemon.world_path,), tp=2, socket_paths=(str(daemon.socket_path),), num_followed=1)
    try:
        joined = run_ranks(training.num_ranks, tmp_path, training.run_rank)
        wait_until(lambda: daemon.is_as_found() and daemon.job() is None, 60)
    finally:
        daemon.stop()
    num_iterations = len(joined[0][0])
    without = replace(training, socket_paths=(), num_followed=0, iterations=num_iterations)
    plain = run_ranks(training.num_ranks, alone, without.run_rank)
    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
        energies_j = [row.energy_j for row in history.iterations(summary.job_id)]

    assert [losses for losses, _ in joined] == [losses for losses, _ in plain]
    of_stages = [[epochs for _, epochs in joined[2 * pp : 2 * pp + 2]] for pp in range(2)]
    assert all(first == second for first, second in of_stages), "each plan begins at the same iteration on both ranks"
    assert all(any(epochs) for _, epochs in joined)
    assert len(summary.gpu_uuids) == 4
    assert any(energy_j is not None for energy_j in energies_j)


@pytest.mark.parametrize(
    ("sizes", "num_stage_ranks", "num_replicas"),
    [
        ({"tensor_model_parallel_size": 2}, 2, 4),
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, 4, 2),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, 4, 2),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, 4, 2),
    ],
)
def test_places_of_the_real_parallel_state_form_stages(
    sizes: dict[str, int], num_stage_ranks: int, num_replicas: int
) -> None:
    pytest.importorskip("megatron.core")
    import megatron.core.parallel_state as state  # noqa: PLC0415  only where it is installed

    places = []
    for rank in range(16):
        # Groups of processes that do not exist: enough to ask for places.
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16)
        try:
            state.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False, **sizes)
            places.append(megatron_place())
        finally:
            state.destroy_model_parallel()
            torch.distributed.destroy_process_group()

    assert {place.replica for place in places} == set(range(num_replicas))
    for rank, place in enumerate(places):
        assert (place.pipeline.size, place.stage.size) == (2, num_stage_ranks)
        assert place.siblings[place.stage.rank] == rank
        assert all(places[sibling].stages == place.stages for sibling in place.siblings)


def test_an_interleaved_configuration_is_not_attached(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(timers=None, virtual_pipeline_model_parallel_size=2)

    handle = attach(config, job="test", num_microbatches=4, pp_rank=0, num_pp_ranks=2, dp_rank=0)

    assert not handle.is_attached
    assert config.timers is None
    assert "interleaved" in caplog.text


def test_a_step_that_raised_is_discarded_when_the_next_begins() -> None:
    config = SimpleNamespace(timers=None)
    handle = attach(
        config, job="test", num_microbatches=1, pp_rank=0, num_pp_ranks=1, dp_rank=0, gpu_uuid="G", socket_path="/none"
    )

    def run_instructions() -> None:
        for name in ("forward-compute", "backward-compute"):
            config.timers(name, log_level=2).start()
            config.timers(name).stop()

    for does_raise in (False, False, True, False, False):
        config.timers("forward-backward", log_level=1).start(barrier=False)
        run_instructions()
        if not does_raise:
            config.timers("forward-backward").stop()

    assert handle.is_attached
    assert handle.num_errors == 0
    handle.detach()
    assert config.timers is None
