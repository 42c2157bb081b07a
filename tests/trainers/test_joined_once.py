"""Programs that join twice, or cannot be followed: one membership, and one line that says so."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: E402  after the skip

from gpuenergyd_trainers.autostart.joining import join_pipeline_schedules  # noqa: E402
from gpuenergyd_trainers.loop import StepMarks  # noqa: E402
from gpuenergyd_trainers.torch_pipelining import attach  # noqa: E402
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon  # noqa: E402
from tests.trainers.pipeline_processes import LoggedLines, run_ranks  # noqa: E402

pytestmark = pytest.mark.torch
NUM_MICROBATCHES = 4
NUM_STEPS = 6


def one_stage() -> tuple[Any, Any]:
    """Return a schedule with one stage, and a function that runs a step of it."""
    torch.manual_seed(1)
    stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    batch = torch.ones(NUM_MICROBATCHES, 4)

    def step() -> str:
        losses: list[Any] = []
        schedule.step(batch, target=batch, losses=losses)
        return str([float(loss.detach()).hex() for loss in losses])

    return schedule, step


def attach_three_times(_rank: int, socket_path: str) -> Any:
    lines = LoggedLines()
    schedule, step = one_stage()
    handles = [attach(schedule, job="titan", gpu_uuid="GPU-0", socket_path=socket_path) for _ in range(3)]
    for _ in range(NUM_STEPS):
        step()
    is_attached = handles[0].is_attached
    handles[0].detach()
    again = attach(schedule, job="titan", gpu_uuid="GPU-0", socket_path=socket_path)
    result = handles[1] is handles[0] and handles[2] is handles[0], is_attached, again is not handles[0], lines.warnings
    again.detach()
    return result


def test_a_second_attach_to_a_schedule_returns_the_handle_of_the_first_and_says_so_once(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        (result,) = run_ranks(1, tmp_path, attach_three_times, daemon.socket_path)
        reports = [daemon.reports.get(timeout=WAIT_LIMIT_S) for _ in range(daemon.reports.qsize())]

    assert result == (
        True,
        True,
        True,
        [
            (
                "gpuenergyd: job titan: Schedule1F1B is attached already: this attach returns the same handle, and its"
                " arguments are ignored"
            )
        ],
    )
    assert reports
    assert {len(report["instructions"]) for report in reports} == {2 * NUM_MICROBATCHES}


def train_by_schedules_of_epochs(_rank: int, socket_path: str) -> Any:
    lines = LoggedLines()
    stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    batch, handles = torch.ones(8, 4), []
    for num_microbatches in (4, 4, 8):
        schedule = Schedule1F1B(stage, num_microbatches, loss_fn=torch.nn.functional.mse_loss)
        handles.append(attach(schedule, job="titan", gpu_uuid="GPU-0", socket_path=socket_path))
        for _ in range(NUM_STEPS):
            schedule.step(batch, target=batch, losses=[])
    result = len(set(handles)), handles[0].is_attached, handles[0].num_errors, lines.warnings
    handles[0].detach()
    schedule.step(batch, target=batch, losses=[])
    return result


def test_schedules_that_are_made_anew_for_the_same_stages_are_one_rank(tmp_path: Path) -> None:
    """The first step of each is no iteration, and with another number of microbatches the rank registers again."""
    with FakeDaemon(tmp_path) as daemon:
        (result,) = run_ranks(1, tmp_path, train_by_schedules_of_epochs, daemon.socket_path)
        registrations = [daemon.registrations.get() for _ in range(daemon.registrations.qsize())]
        reports = [daemon.reports.get() for _ in range(daemon.reports.qsize())]

    assert result == (1, True, 0, [])
    assert [len(registration["order"]) for registration in registrations] == [8, 16]
    assert [len(report["instructions"]) for report in reports] == 2 * (NUM_STEPS - 1) * [8] + (NUM_STEPS - 1) * [16]


def test_a_schedule_joins_at_its_first_step_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type("Schedule", (), {"step": lambda _self: None, "_has_backward": False, "__module__": "schedules"})
    joined: list[Any] = []
    monkeypatch.setenv("GPUENERGYD_SOCKET", str(tmp_path))
    monkeypatch.setattr("gpuenergyd_trainers.torch_pipelining.attach_at_step", joined.append)
    join_pipeline_schedules(SimpleNamespace(Schedule=kind, __name__="schedules"))  # type: ignore[arg-type]  # a double
    schedules = [kind(), kind()]
    schedules[1]._has_backward = True
    for schedule in 2 * schedules:
        schedule.step()

    assert joined == schedules[1:]


def train_unmanaged(_rank: int, socket_path: str) -> Any:
    lines = LoggedLines()
    schedule, step = one_stage()
    handle = attach(schedule, job="titan", socket_path=socket_path)
    for _ in range(NUM_STEPS):
        step()
    handle.detach()
    return lines.warnings


def test_a_rank_without_a_gpu_says_that_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUENERGYD_GPU_UUID", raising=False)
    with FakeDaemon(tmp_path) as daemon:
        (lines,) = run_ranks(1, tmp_path, train_unmanaged, daemon.socket_path)

    assert lines == [
        (
            "gpuenergyd: job titan, rank 0: no GPU UUID (no gpu_uuid argument, GPUENERGYD_GPU_UUID not set, CUDA not"
            " in use by this process); training continues unmanaged"
        )
    ]


def train_by_means_of_its_own(_rank: int, socket_path: str) -> Any:
    lines = LoggedLines()
    schedule, step = one_stage()
    schedule._step_microbatches = schedule._merge_outputs = lambda *_args, **_kwargs: None
    handle = attach(schedule, job="titan", gpu_uuid="GPU-0", socket_path=socket_path)
    num_lines = []
    for _ in range(NUM_STEPS):
        step()
        num_lines.append(len(lines.warnings))
    handle.detach()
    return num_lines, lines.warnings


def test_a_schedule_whose_instructions_no_hook_sees_is_reported_after_three_steps(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        ((num_lines, lines),) = run_ranks(1, tmp_path, train_by_means_of_its_own, daemon.socket_path)

    assert num_lines == [0, 0, 1, 1, 1, 1]
    assert lines == [
        (
            "gpuenergyd: job titan, rank 0: not followed: none of its instructions was seen in 3 steps: the program"
            " runs them by means of its own; training continues at full speed"
        )
    ]


def test_of_two_callbacks_in_one_program_the_first_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two callbacks of Lightning or Hugging Face, each with marks of its own."""
    with FakeDaemon(tmp_path) as daemon:
        own, other = (
            StepMarks(name, gpu_uuid="GPU-0", socket_path=daemon.socket_path, phases=False) for name in ("bert", "more")
        )
        for _ in range(NUM_STEPS):
            own.begin()
            other.begin()
            own.end()
            other.end()
        own.close()
        other.close()
        registration = daemon.registrations.get(timeout=WAIT_LIMIT_S)
        daemon.releases.get(timeout=WAIT_LIMIT_S)

    assert registration["job_name"] == "bert"
    assert daemon.registrations.empty()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        (
            "gpuenergyd: job more: this process is a rank of job bert on the same GPU already, which goes on; this one"
            " is ignored"
        )
    ]
