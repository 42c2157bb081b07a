"""Blocks of a proof within a running job, under a real daemon on simulated GPUs."""

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.errors import UsageError
from gpuenergyd_prove.block_options import BlockOptions
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.job_blocks import JobBlocks
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.daemon_process import DaemonProcess, Training, running_daemon, training
from tests.support.waiting import wait_until

TUNED, FULL_SPEED = Arm("tuned", "uniform"), Arm(BASELINE_ARM, "full-speed")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("d")
    with running_daemon(folder, kind=WorldKind.KIND, baseline_iterations=3, database_batch_s=0.5) as process:
        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[DaemonClient]:
    with closing(daemon.client()) as connected:
        yield connected


@pytest.fixture
def job(daemon: DaemonProcess) -> Iterator[Training]:
    with training(daemon, arguments=("--microbatches", "4", "--policy", "uniform")) as process:
        daemon.wait_for_phase("baseline", "trial", "tuned")
        yield process
    wait_until(lambda: daemon.job() is None)


@pytest.fixture
def job_id(daemon: DaemonProcess, job: Training) -> str:  # noqa: ARG001  it must run
    found = daemon.job()
    assert found is not None
    return str(found["job_id"])


def options(daemon: DaemonProcess, client: DaemonClient) -> BlockOptions:
    # Without a permitted slowdown one busy moment of this machine decides whether any clock is slow enough to save.
    return BlockOptions(client, str(daemon.socket_path), max_slowdown_ratio=0.5, block_limit_s=300.0)


def test_a_running_job_follows_the_arms_in_turn_and_is_released(
    daemon: DaemonProcess, client: DaemonClient, job_id: str
) -> None:
    with JobBlocks(options(daemon, client), job_id) as blocks:
        found = [blocks.run_block(arm, num_iterations=4) for arm in (TUNED, FULL_SPEED, TUNED)]

    (after,) = client.get_status()["jobs"]
    assert all(value is None for value in after["orders"].values())
    assert after["job_id"] == job_id, "the job runs on"
    assert [len(block.iterations) for block in found] == [4, 4, 4]
    for block in found:
        first, last = block.iterations[0], block.iterations[-1]
        assert block.begun_at_s <= first.begun_at_s < last.begun_at_s + last.time_s <= block.ended_at_s
    for before, block in pairwise(found):
        assert before.ended_at_s <= block.begun_at_s
        assert before.iterations[-1].index < block.iterations[0].index


def test_a_job_that_ends_ends_the_proof(
    daemon: DaemonProcess, client: DaemonClient, job: Training, job_id: str
) -> None:
    with JobBlocks(options(daemon, client), job_id) as blocks:
        job.kill()
        with pytest.raises(ProofError, match="has ended; a proof needs it until the last block"):
            blocks.run_block(FULL_SPEED, num_iterations=100_000)


def test_a_job_that_ends_just_before_an_order_ends_the_proof_in_the_same_way(
    daemon: DaemonProcess, client: DaemonClient, job: Training, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = client.patch

    def patch_too_late(path: str, body: dict[str, Any]) -> dict[str, Any]:
        job.kill()
        while any(running["job_id"] == job_id for running in client.get_status()["jobs"]):
            pass
        return patch(path, body)

    with JobBlocks(options(daemon, client), job_id) as blocks:
        monkeypatch.setattr(client, "patch", patch_too_late)
        with pytest.raises(ProofError, match="has ended; a proof needs it until the last block"):
            blocks.run_block(FULL_SPEED, num_iterations=100_000)
        monkeypatch.undo()


def test_a_job_under_orders_is_refused(daemon: DaemonProcess, client: DaemonClient, job_id: str) -> None:
    client.patch(f"/v1/jobs/{job_id}", {"is_paused": True})

    with pytest.raises(UsageError, match=rf"orders of an operator \(is_paused\).*job release {job_id}"):
        JobBlocks(options(daemon, client), job_id)


def test_an_unknown_job_is_refused_with_those_that_run_and_nothing_is_written(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "proof"

    assert run(["prove", "--job", "nope", "--socket", str(daemon.socket_path), "--out", str(out)]) == 2

    assert capsys.readouterr().err == "gpuenergyd: no job 'nope' runs here; running: none\n"
    assert not out.exists()
