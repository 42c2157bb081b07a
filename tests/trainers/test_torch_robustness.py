"""Events in a training run: recomputation, gradient accumulation, evaluation, failure, detaching."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402  after the skip

from gpuenergyd_sim.training.gpt_pipeline import GptRank  # noqa: E402
from gpuenergyd_trainers.joining.handle import Handle  # noqa: E402
from gpuenergyd_trainers.torch_pipelining import attach  # noqa: E402
from tests.client.fake_daemon import FakeDaemon  # noqa: E402
from tests.support.thorough import thorough  # noqa: E402
from tests.trainers.executed import TracedStage, share_trace  # noqa: E402
from tests.trainers.pipeline_processes import Pace, run_ranks  # noqa: E402

pytestmark = pytest.mark.torch

NUM_RANKS = 2
NUM_MICROBATCHES = 4
STEP, ACCUMULATE, EVALUATE, FAIL = "step", "accumulate", "evaluate", "fail"
LIFE = (STEP, STEP, STEP, STEP, ACCUMULATE, STEP, EVALUATE, STEP, STEP, FAIL, STEP, STEP, STEP)
# The first of a row is no iteration: torch infers shapes in it. The one that fails begins, and is never reported.
REPORTED = {"1f1b": [0, 1, 2, 3, 4, 5, 7, 8], "interleaved": [1, 2, 3, 4, 5, 7, 8]}
AFTER_FAILURE = LIFE.index(FAIL) + 2
"""The first iteration after the failed one; no report is sent at its begin."""


def recompute_in_backward(stage: Any) -> None:
    compute = stage.submod.forward
    stage.submod.forward = lambda x: checkpoint(compute, x, use_reentrant=False)


def fail_once(training: GptRank) -> None:
    """Raise on every rank, within the step and before anything is sent."""

    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("the model's own failure")

    training.schedule._step_microbatches = fail
    try:
        with pytest.raises(ArithmeticError):
            training.step(0)
    finally:
        del training.schedule._step_microbatches


def live(rank: int, schedule_name: str, socket_path: str | None) -> Any:
    training = GptRank(schedule_name, rank, NUM_RANKS, NUM_MICROBATCHES, seed=6, stage_class=TracedStage)
    trace = share_trace(training.stages)
    for stage in training.stages:
        recompute_in_backward(stage)
    objects = (training.schedule, *training.stages)
    before = [dict(vars(each)) for each in objects]
    handle = Handle()
    if socket_path is not None:
        handle = attach(
            training.schedule, job="test", run_key="r", gpu_uuid=f"GPU-{rank}", socket_path=socket_path, dp_rank=0
        )
    pace = Pace(handle, rank, socket_path, first_iteration=REPORTED[schedule_name][0])
    losses, orders = [], []
    for index, what in enumerate(LIFE):
        trace.clear()
        if what == FAIL:
            fail_once(training)
        else:
            run = {STEP: training.step, ACCUMULATE: training.add_gradients, EVALUATE: training.evaluate}[what]
            losses.append([float(loss.detach()).hex() for loss in run(index)])
        if what in {STEP, ACCUMULATE}:
            orders.append(tuple(trace))
        if socket_path is not None and index != AFTER_FAILURE:
            pace.keep()
    result = handle.order, handle.num_errors, handle.is_attached
    handle.detach()
    if socket_path is not None:
        pace.finish()
    added = [sorted(vars(each).keys() - old.keys()) for each, old in zip(objects, before, strict=True)]
    wrapped = {"step", "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"}
    return losses, orders, result, [name for names in added for name in names if name in wrapped]


@pytest.mark.parametrize("schedule_name", ["interleaved", *thorough("1f1b")])
def test_only_complete_training_steps_are_reported_and_losses_are_unchanged(
    tmp_path: Path, daemon: FakeDaemon, schedule_name: str
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    plain = run_ranks(NUM_RANKS, alone, live, schedule_name, None)
    joined = run_ranks(NUM_RANKS, tmp_path, live, schedule_name, daemon.socket_path)

    reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]
    assert [losses for losses, *_ in joined] == [losses for losses, *_ in plain]
    assert any(losses[0] for losses, *_ in joined)
    for rank, (_, orders, (order, num_errors, is_attached), left_behind) in enumerate(joined):
        mine = [report for report in reports if daemon.tokens[report["rank_token"]] == rank]
        assert is_attached
        assert num_errors == 0
        assert left_behind == []
        assert set(orders) == {order}
        assert [report["iteration_index"] for report in mine] == REPORTED[schedule_name]
        assert {tuple(tuple(row[:3]) for row in report["instructions"]) for report in mine} == {order}
