"""Megatron-core's 1F1B on two CPU processes with CUDA calls replaced; requires megatron-core."""

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.store import open_history
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_trainers.joining.handle import Handle
from gpuenergyd_trainers.joining.place_sources import megatron_place
from gpuenergyd_trainers.megatron import attach
from gpuenergyd_trainers.megatron_steps import require_step_functions
from tests.client.fake_daemon import FakeDaemon
from tests.support.daemon_process import DaemonProcess
from tests.support.megatron_stages import (
    SEQUENCE,
    WIDTH,
    NoWork,
    bare_config,
    batches,
    forward_step,
    make_stage,
    replace_cuda_calls,
)
from tests.support.megatron_training import MegatronTraining
from tests.support.waiting import LIMIT_S, wait_until
from tests.trainers.pipeline_processes import Pace, run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

NUM_RANKS = 2
NUM_MICROBATCHES = 4


class LinesHandler(logging.Handler):
    """Keeps the messages of log records."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self._lines.append(record.getMessage())


class CountingTimers:
    """Timers that a training script has set before attaching."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        del log_level
        return SimpleNamespace(
            start=lambda barrier=False: self.calls.append(("start", name)),  # noqa: ARG005  Megatron's signature
            stop=lambda barrier=False: self.calls.append(("stop", name)),  # noqa: ARG005  Megatron's signature
        )


def train(rank: int, socket_path: str | None, num_tp_ranks: int = 1, evaluates_with_gradients: bool = True) -> Any:  # noqa: FBT001, FBT002  passed on by position
    replace_cuda_calls()
    import megatron.core.parallel_state as state  # type: ignore[import-not-found]  # noqa: PLC0415  after the replacing
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving as run_step  # type: ignore[import-not-found]  # noqa: PLC0415

    state.initialize_model_parallel(tensor_model_parallel_size=num_tp_ranks, pipeline_model_parallel_size=NUM_RANKS)
    config = bare_config(
        tensor_model_parallel_size=num_tp_ranks, pipeline_model_parallel_size=NUM_RANKS, pipeline_dtype=torch.float32
    )
    config.timers = CountingTimers()
    timers = config.timers
    model = make_stage(config, state, NoWork(), None)
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

    def run(step: int, *, forward_only: bool = False) -> list[str]:
        data = iter(batches(step, NUM_MICROBATCHES))
        losses = run_step(
            forward_step_func=forward_step, data_iterator=data, model=model, num_microbatches=NUM_MICROBATCHES,
            seq_length=SEQUENCE, micro_batch_size=1, forward_only=forward_only,
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        return [entry["loss"] for entry in losses]

    pace = Pace(handle, rank // num_tp_ranks, socket_path)
    all_losses = []
    for step in range(8):
        is_evaluation = step == 4
        with torch.set_grad_enabled(not is_evaluation or evaluates_with_gradients):
            all_losses.append(run(step, forward_only=is_evaluation))
        if step not in {4, 5, 6}:  # the forgotten iteration of the evaluation is never reported
            pace.keep()
    result = all_losses, handle.is_attached, handle.num_errors, timers.calls
    handle.detach()
    pace.finish()
    return *result, config.timers is timers


@pytest.mark.parametrize("evaluates_with_gradients", [True, False])
def test_megatron_reports_1f1b_iterations_and_no_evaluations(tmp_path: Path, *, evaluates_with_gradients: bool) -> None:
    pytest.importorskip("megatron.core")
    alone = tmp_path / "alone"
    alone.mkdir()
    plain = run_ranks(NUM_RANKS, alone, train, None, 1, evaluates_with_gradients)
    with FakeDaemon(tmp_path) as daemon:
        joined = run_ranks(NUM_RANKS, tmp_path, train, daemon.socket_path, 1, evaluates_with_gradients)
        reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]

    planned = make_schedule("1f1b", NUM_RANKS, NUM_MICROBATCHES)
    assert [result[0] for result in joined] == [result[0] for result in plain]
    assert [result[1:3] for result in joined] == [(True, 0)] * NUM_RANKS
    assert [result[3:] for result in joined] == [(plain[rank][3], True) for rank in range(NUM_RANKS)]
    for rank in range(NUM_RANKS):
        mine = [report for report in reports if daemon.tokens[report["rank_token"]] == rank]
        order = [(str(i.kind), i.microbatch_index, 0) for i in planned.orders[rank]]
        assert all([tuple(row[:3]) for row in report["instructions"]] == order for report in mine)
        # Without gradients, an evaluation is known as one from its begin on: the iteration before it ends in a pause.
        is_before_pause = [False, False, not evaluates_with_gradients, False, True]
        assert [report["next_begin_mono_ns"] == 0 for report in mine] == is_before_pause


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


def wait_for_replies(handle: Handle) -> Callable[[], None]:
    """Return a function that waits before a step for the reply to the report before the last, as plans allow for."""
    client: Any = handle._rank and handle._rank.client
    report, answered = client._reporter._report, [-1]

    def report_and_count(iterations: list[Any]) -> None:
        report(iterations)
        answered.append(iterations[-1][0].iteration_index)

    client._reporter._report = report_and_count
    return lambda: wait_until(lambda: answered[-1] >= client.iteration_index - 1)


def test_tensor_parallel_ranks_follow_one_plan_of_a_real_daemon_with_equal_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.setattr("gpuenergyd.client.reporter.REPORT_LIMIT_S", LIMIT_S)  # a reply that is given up is late
    settings = {"policy": "uniform", "max_slowdown_ratio": 0.5, "baseline_iterations": 2}
    # Exact counters: slow ones would need a longer training until an iteration has an energy.
    daemon = DaemonProcess(tmp_path / "host", 4, settings, kind=WorldKind.KIND).start()
    alone = tmp_path / "alone"
    alone.mkdir()
    training = MegatronTraining(
        (daemon.world_path,),
        tp=2,
        socket_paths=(str(daemon.socket_path),),
        num_followed=1,
        begin_steps=wait_for_replies,
    )
    try:
        joined = run_ranks(training.num_ranks, tmp_path, training.run_rank)
        wait_until(lambda: daemon.is_as_found() and daemon.job() is None)
    finally:
        daemon.stop()
    num_iterations = len(joined[0][0])
    without = replace(training, socket_paths=(), num_followed=0, iterations=num_iterations, begin_steps=None)
    plain = run_ranks(training.num_ranks, alone, without.run_rank)
    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
        energies_j = [row.energy_j for row in history.iterations(summary.job_id)]

    assert [losses for losses, _ in joined] == [losses for losses, _ in plain]
    of_stages = [[epochs for _, epochs in joined[2 * pp : 2 * pp + 2]] for pp in range(2)]
    assert all(first == second for first, second in of_stages), "each plan begins at the same iteration on both ranks"
    assert all(any(epochs) for _, epochs in joined)
    assert len(summary.gpu_uuids) == 4
    assert summary.baseline_energy_j is not None
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


def train_with_failures(_: int, socket_path: str) -> Any:
    """Train without a pipeline; the third step raises, and the last one has one microbatch more."""
    replace_cuda_calls()
    import megatron.core.parallel_state as state  # noqa: PLC0415  after the replacing
    from megatron.core.pipeline_parallel import schedules  # type: ignore[import-not-found]  # noqa: PLC0415

    state.initialize_model_parallel()
    config = bare_config(pipeline_dtype=torch.float32)
    functions = schedules.forward_step, schedules.backward_step
    stage = make_stage(config, state, NoWork(), None)
    messages: list[str] = []
    logging.getLogger("gpuenergyd.trainers").addHandler(LinesHandler(messages))
    handle = attach(config, job="test", num_microbatches=2, run_key="r", gpu_uuid="G", socket_path=socket_path)
    attached = []
    for num_items, num_microbatches in ((2, 2), (2, 2), (1, 2), (2, 2), (2, 2), (3, 3)):
        data = iter([torch.ones(SEQUENCE, 1, WIDTH)] * num_items)
        with contextlib.suppress(StopIteration):
            schedules.get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=data,
                model=stage,
                num_microbatches=num_microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=1,
            )
        attached.append(handle.is_attached)
    handle.detach()
    is_restored = (schedules.forward_step, schedules.backward_step, config.timers) == (*functions, None)
    return attached, handle.num_errors, is_restored, [line for line in messages if "instruction" in line]


def test_a_step_that_raised_is_discarded_and_another_order_ends_the_plans(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    with FakeDaemon(tmp_path) as daemon:
        ((attached, num_errors, is_restored, messages),) = run_ranks(
            1, tmp_path, train_with_failures, daemon.socket_path
        )

    assert attached == [True, True, True, True, True, False]
    assert num_errors == 0
    assert is_restored
    (message,) = messages
    assert "instruction 4 of the iteration is ('F', 2, 0), but none in the registered order" in message
    assert "training continues at full speed" in message


def train_with_ramp_up(rank: int, socket_path: str) -> Any:
    """Train on two ranks; Megatron's calculator ramps the batch up from two to six microbatches."""
    replace_cuda_calls()
    import megatron.core.parallel_state as state  # noqa: PLC0415  after the replacing
    from megatron.core import num_microbatches_calculator as calculator  # noqa: PLC0415
    from megatron.core.pipeline_parallel import schedules  # noqa: PLC0415

    state.initialize_model_parallel(pipeline_model_parallel_size=NUM_RANKS)
    calculator.init_num_microbatches_calculator(rank, [2, 2, 12], 6, 1, 1)
    config = bare_config(pipeline_model_parallel_size=NUM_RANKS, pipeline_dtype=torch.float32)
    stage = make_stage(config, state, NoWork(), None)
    messages: list[str] = []
    logging.getLogger("gpuenergyd.trainers").addHandler(LinesHandler(messages))
    names: dict[str, Any] = {"run_key": "r", "gpu_uuid": f"GPU-{rank}", "socket_path": socket_path}
    handle = attach(config, job="test", num_microbatches=calculator.get_num_microbatches(), **names)
    pace = Pace(handle, rank, socket_path)
    numbers: list[int] = []
    for step in range(12):
        calculator.update_num_microbatches(sum(numbers), consistency_check=False)
        number = calculator.get_num_microbatches()
        schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches(step, number)),
            model=stage,
            num_microbatches=number,
            seq_length=SEQUENCE,
            micro_batch_size=1,
        )
        if numbers and numbers[-1] == number:  # the first step with a number is a start, and not reported
            pace.keep()
        numbers.append(number)
    result = numbers, handle.is_attached, handle.num_errors, messages
    handle.detach()
    pace.finish()
    return result


def test_a_ramp_up_by_megatrons_calculator_registers_the_order_of_each_number_of_microbatches(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    with FakeDaemon(tmp_path) as daemon:
        results = run_ranks(NUM_RANKS, tmp_path, train_with_ramp_up, daemon.socket_path)
        registrations = [daemon.registrations.get_nowait() for _ in range(daemon.registrations.qsize())]
        reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]

    for numbers, *rest in results:
        assert rest == [True, 0, []]
        assert sorted(set(numbers)) == [2, 4, 6]
    for rank in range(NUM_RANKS):
        mine = [one for one in registrations if one["pp_rank"] == rank]
        assert [one["num_microbatches"] for one in mine] == [2, 4, 6]
        orders = [
            [(str(i.kind), i.microbatch_index, 0) for i in make_schedule("1f1b", NUM_RANKS, number).orders[rank]]
            for number in (2, 4, 6)
        ]
        assert [[tuple(row) for row in one["order"]] for one in mine] == orders
        own = [one for one in reports if daemon.tokens[one["rank_token"]] == rank]
        ran = [[tuple(row[:3]) for row in one["instructions"]] for one in own]
        assert sorted(set(map(len, ran))) == [4, 8, 12]
        assert all(one in orders for one in ran)


def test_step_functions_with_a_telemetry_decorator_are_read_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")

    def traced(step: Any) -> Any:
        """Decorate a function as Megatron's main branch does with its spans of microbatches."""

        @functools.wraps(step)
        def step_in_span(*args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

        return step_in_span

    for name in ("forward_step", "backward_step"):
        monkeypatch.setattr(schedules, name, traced(getattr(schedules, name)))

    require_step_functions(is_interleaved=True, is_combined=False)


def refusal_of(caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    """Attach a configuration that is refused; return the one line about it."""
    config = SimpleNamespace(timers=None, **settings)

    handle = attach(config, job="test", num_microbatches=4, pp_rank=0, num_pp_ranks=2, dp_rank=0, gpu_uuid="G")

    assert not handle.is_attached
    assert config.timers is None
    (record,) = caplog.records
    return record.getMessage()


def test_sizes_that_megatron_does_not_run_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    line = refusal_of(caplog, virtual_pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=5)

    assert "microbatch_group_size_per_vp_stage 5: must be in [2 pipeline ranks, 4 microbatches]" in line
    assert "training continues at full speed" in line


@pytest.mark.parametrize(
    ("settings", "module", "name", "arguments"),
    [
        ({}, "schedules", "forward_step", "current_microbatch"),
        ({}, "schedules", "backward_step", "output_tensor"),
        ({"virtual_pipeline_model_parallel_size": 2}, "schedules", "forward_step", "current_microbatch, vp_stage"),
        (
            {"overlap_moe_expert_parallel_comm": True},
            "combined_1f1b",
            "combined_forward_backward_step",
            "current_microbatch, f_model, b_model, b_output_tensor",
        ),
    ],
)
def test_a_version_without_the_functions_or_arguments_that_are_marked_is_refused(
    settings: dict[str, Any],
    module: str,
    name: str,
    arguments: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("megatron.core")
    owner = importlib.import_module(f"megatron.core.pipeline_parallel.{module}")
    monkeypatch.setattr(owner, name, lambda config: config)
    line = refusal_of(caplog, **settings)
    assert f"{owner.__name__}.{name} has no argument {arguments} in this version of Megatron-core" in line

    caplog.clear()
    monkeypatch.delattr(owner, name)
    assert f"{owner.__name__}.{name} is missing in this version of Megatron-core" in refusal_of(caplog, **settings)
