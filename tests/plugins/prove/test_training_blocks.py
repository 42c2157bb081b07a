"""Blocks of a proof under a real daemon on simulated GPUs, with a training in processes of its own."""

import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.errors import DaemonNotRunningError
from gpuenergyd.store import IterationRow
from gpuenergyd_prove import block_options
from gpuenergyd_prove.block_options import BlockOptions, check_is_tuned, has_energies
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm
from gpuenergyd_prove.training_blocks import TrainingBlocks
from tests.support.daemon_process import DaemonProcess


class SlowDaemon(DaemonClient):
    """Answers, and later not in time."""

    def __init__(self, *replies: dict[str, object] | None) -> None:
        super().__init__("unused")
        self.replies = list(replies)

    def get_status(self) -> dict[str, object]:
        reply = self.replies.pop(0)
        if reply is None:
            raise DaemonNotRunningError("timed out")
        return reply


def test_a_daemon_that_has_answered_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_options, "POLL_S", 0.0)
    options = BlockOptions(SlowDaemon({"n": 1}, None, None, {"n": 2}), "unused")

    assert [options.status(), options.status()] == [{"n": 1}, {"n": 2}]


def test_a_daemon_that_never_answered_or_is_gone_for_long_ends_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DaemonNotRunningError):
        BlockOptions(SlowDaemon(None, {"n": 1}), "unused").status()

    monkeypatch.setattr(block_options, "_SILENCE_LIMIT_S", -1.0)
    options = BlockOptions(SlowDaemon({"n": 1}, None, {"n": 2}), "unused")
    options.status()
    with pytest.raises(DaemonNotRunningError):
        options.status()


def row(index: int, energy_j: float | None) -> IterationRow:
    return IterationRow(
        iteration_index=index, started_at=datetime(2026, 11, 24, tzinfo=UTC), iteration_time_s=1.0, energy_j=energy_j,
        plan_id="tuned-1", plan_purpose=PlanPurpose.TUNED, is_regular=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("energies_j", "is_enough"),
    [
        ((), True),  # nothing is stored yet
        ((1.0, 1.0, 1.0, 1.0), True),
        ((1.0, 1.0, 1.0, None), True),
        ((1.0, None, None, 1.0), False),
        ((None, None, None, 1.0, 1.0, 1.0, 1.0), True),
        ((1.0, 1.0, 1.0, 1.0, None, None, None), False),
    ],
)
def test_block_is_long_enough_once_most_of_its_last_iterations_have_an_energy(
    energies_j: tuple[float | None, ...],
    is_enough: bool,  # noqa: FBT001
) -> None:
    rows = [row(index, energy_j) for index, energy_j in enumerate(energies_j)]

    assert has_energies(rows, 4) is is_enough


def test_program_that_ends_too_early_fails_the_block_with_its_last_words(daemon: DaemonProcess, tmp_path: Path) -> None:
    with closing(daemon.client()) as client:
        program = (sys.executable, "-c", "print('no data'); raise SystemExit(3)")
        blocks = TrainingBlocks(BlockOptions(client, str(daemon.socket_path)), program, tmp_path)

        with pytest.raises(ProofError, match="ended too early: no data"):
            blocks.run_block(Arm(BASELINE_ARM, "full-speed"), num_iterations=3)


def test_losses_are_read_as_decimal_or_exact_numbers(tmp_path: Path) -> None:
    path = tmp_path / "losses"
    path.write_text("5.0\n0x1.2p+2\n4.25\n")
    blocks = TrainingBlocks(BlockOptions(DaemonClient("unused"), "unused"), (), tmp_path, losses_path=path)

    assert blocks._losses() == (5.0, 4.5, 4.25)

    path.write_text("five\n")
    with pytest.raises(ProofError, match="cannot be read"):
        blocks._losses()


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({}, False),
        ({"is_given_up": True}, True),
        ({"plan_purpose": "baseline", "num_iterations_of_plan": 30}, True),
        ({"plan_purpose": "predicted", "num_iterations_of_plan": 30}, True),
        ({"plan_purpose": "baseline", "num_iterations_of_plan": 29}, False),
        ({"plan_purpose": "baseline", "num_iterations_of_plan": 99, "phase": "fallback"}, False),
        ({"plan_purpose": "baseline", "num_iterations_of_plan": 99, "plan_id": "proof"}, False),
    ],
)
def test_a_job_that_its_policy_keeps_at_full_speed_ends_the_block(changes: dict[str, object], stays: bool) -> None:  # noqa: FBT001
    job = {
        "is_given_up": False,
        "phase": "tuned",
        "phase_reason": "the time account pays no plan",
        "plan_id": "tuned-1",
        "plan_purpose": "tuned",
        "num_iterations_of_plan": 100,
    }

    if stays:
        with pytest.raises(ProofError, match="arm 'tuned': the job stays at full speed: the time account pays no plan"):
            check_is_tuned(job | changes, Arm("tuned", "uniform"), 5)
    else:
        check_is_tuned(job | changes, Arm("tuned", "uniform"), 5)
