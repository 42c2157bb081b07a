"""Job name, policy and permitted slowdown: an argument of the program, else the environment, in every adapter alike."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gpuenergyd
from gpuenergyd_trainers import deepspeed, megatron, torch_pipelining
from gpuenergyd_trainers.joining.membership import JoinOptions, PipelineRank, join
from gpuenergyd_trainers.loop import StepMarks, iterations
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon
from tests.trainers.parallel_layouts import SimpleTopology

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

ENVIRONMENT = {
    "GPUENERGYD_JOB": "named-outside",
    "GPUENERGYD_JOB_POLICY": "uniform",
    "GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO": "0.05",
    "GPUENERGYD_GPU_UUID": "GPU-1",
}
FROM_ENVIRONMENT = ("named-outside", "uniform", 0.05, ["policy", "max_slowdown_ratio"])
OWN = {"job": "own", "policy": "envelope", "max_slowdown_ratio": 0.0}
FROM_ARGUMENTS: tuple[Any, ...] = ("own", "envelope", 0.0, [])


class ScheduleGPipe:
    """A schedule as `attach` reads it: one stage, one microbatch."""

    def __init__(self) -> None:
        self._n_microbatches = 1
        self._stages = [
            SimpleNamespace(
                group_size=1, group_rank=0, stage_index=0, device=torch.device("cpu"), is_last=True,
                has_backward=True, forward_one_chunk=print, backward_one_chunk=print, backward_weight_one_chunk=print,
            )
        ]  # fmt: skip

    def step(self) -> None:
        """Do nothing."""


class TrainSchedule:
    """DeepSpeed's schedule for training."""


class Engine:
    """A pipeline engine as `attach` reads it."""

    _INSTRUCTION_MAP: dict[type, Any] = {}  # noqa: RUF012  as DeepSpeed has it
    micro_batches, device = 1, torch.device("cpu")
    grid = SimpleNamespace(global_rank=0, topology=lambda: SimpleTopology({"pipe": 1, "data": 1}))

    def _train_schedule(self) -> TrainSchedule:
        return TrainSchedule()

    def train_batch(self) -> None:
        """Do nothing."""

    def eval_batch(self) -> None:
        """Do nothing."""


def one_iteration(**options: Any) -> Callable[[], None]:
    joined = gpuenergyd.job(options.pop("job", None), **options)
    with joined.iteration():
        pass
    return lambda: joined.__exit__(None, None, None)


def one_batch(**options: Any) -> Callable[[], None]:
    assert list(iterations([1], **options)) == [1]
    return lambda: None


def one_step(**options: Any) -> Callable[[], None]:
    """Mark one step as the callbacks of Lightning and Hugging Face do."""
    marks = StepMarks(options.pop("job", None), **options)
    marks.begin()
    marks.end()
    return marks.close


MEGATRON_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


@pytest.fixture(autouse=True)
def megatron_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Megatron's step functions importable, as `attach` reads them."""

    def forward_step(config: Any, current_microbatch: int) -> None:
        del config, current_microbatch

    def backward_step(config: Any, output_tensor: Any) -> None:
        del config, output_tensor

    module = ModuleType(MEGATRON_SCHEDULES)
    vars(module).update(forward_step=forward_step, backward_step=backward_step)
    for name in ("megatron", "megatron.core", "megatron.core.pipeline_parallel"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MEGATRON_SCHEDULES, module)


ADAPTERS: dict[str, Callable[..., Callable[[], None]]] = {
    "gpuenergyd.job": one_iteration,
    "loop.iterations": one_batch,
    "callbacks": one_step,
    "torch_pipelining.attach": lambda **options: (
        torch_pipelining.attach(ScheduleGPipe(), dp_rank=0, across_hosts=False, **options).detach
    ),
    "deepspeed.attach": lambda **options: deepspeed.attach(Engine(), **options).detach,
    "megatron.attach": lambda **options: (
        megatron.attach(
            SimpleNamespace(timers=None), num_microbatches=1, pp_rank=0, num_pp_ranks=1, dp_rank=0, **options
        ).detach
    ),
}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as fake:
        monkeypatch.setenv("GPUENERGYD_SOCKET", fake.socket_path)
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        yield fake


def registered(daemon: FakeDaemon) -> tuple[Any, ...]:
    found = daemon.registrations.get(timeout=WAIT_LIMIT_S)
    return tuple(found[name] for name in ("job_name", "policy", "max_slowdown_ratio", "from_environment"))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_without_arguments_the_environment_of_gpuenergyd_run_counts(adapter: str, daemon: FakeDaemon) -> None:
    leave = ADAPTERS[adapter]()

    assert registered(daemon) == FROM_ENVIRONMENT
    leave()
    daemon.releases.get(timeout=WAIT_LIMIT_S)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_argument_of_the_program_overrides_the_environment(adapter: str, daemon: FakeDaemon) -> None:
    leave = ADAPTERS[adapter](**OWN)

    assert registered(daemon) == FROM_ARGUMENTS
    leave()
    daemon.releases.get(timeout=WAIT_LIMIT_S)


def tokens_of(handle: Any) -> int | None:
    """Return the tokens per iteration that an attached rank reports."""
    found: int | None = handle._rank.client.num_tokens
    handle.detach()
    return found


def test_tokens_of_a_pipeline_come_from_the_call_or_from_megatron_s_training_loop(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def megatron_tokens(**options: Any) -> int | None:
        place: dict[str, Any] = {"pp_rank": 0, "num_pp_ranks": 1, "dp_rank": 0}
        return tokens_of(
            megatron.attach(SimpleNamespace(timers=None), num_microbatches=4, gpu_uuid="GPU-1", **place, **options)
        )

    del daemon
    unknown = megatron_tokens()
    loop = ModuleType("megatron.training.global_vars")
    vars(loop)["_GLOBAL_ARGS"] = SimpleNamespace(micro_batch_size=2, seq_length=1024)
    monkeypatch.setitem(sys.modules, loop.__name__, loop)

    assert unknown is None
    assert megatron_tokens() == 4 * 2 * 1024
    assert megatron_tokens(tokens_per_iteration=1000) == 1000


@pytest.mark.parametrize("value", ["much", "-0.1", "nan"])
def test_an_invalid_slowdown_in_the_environment_is_ignored_with_a_warning(
    value: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO", value)

    one_iteration()()

    assert registered(daemon) == ("named-outside", "uniform", None, ["policy"])
    assert any(f"GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO='{value}' is ignored" in r.getMessage() for r in caplog.records)


def test_a_rank_that_cannot_join_is_named_by_the_environment_too(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    def describe() -> PipelineRank:
        raise ValueError("no stage")

    join(JoinOptions(), describe, lambda _rank: pytest.fail("joined"), target=object(), target_name="this schedule")

    assert "job named-outside: this schedule cannot be joined" in caplog.text
    assert daemon.registrations.empty()


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        ("torch_pipelining.attach", "only that of Schedule1F1B"),
        ("deepspeed.attach", "DeepSpeed's instruction lists have whole backwards only"),
        ("megatron.attach", "delay_wgrad_compute is for combined 1F1B alone"),
    ],
)
def test_a_program_that_allows_orders_where_none_can_run_gets_the_reason(
    adapter: str, why: str, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    leave = ADAPTERS[adapter](allow_reorder=True)

    assert why in daemon.registrations.get(timeout=WAIT_LIMIT_S)["reorder_refusal"]
    (line,) = [r.getMessage() for r in caplog.records if "the order of instructions stays as it is" in r.getMessage()]
    assert why in line
    leave()
    daemon.releases.get(timeout=WAIT_LIMIT_S)
    caplog.clear()
    leave = ADAPTERS[adapter]()
    daemon.registrations.get(timeout=WAIT_LIMIT_S)
    assert "stays as it is" not in caplog.text
    leave()
