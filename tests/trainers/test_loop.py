"""A plain loop attached with one line."""

from pathlib import Path

import pytest

from gpuenergyd_trainers.loop import iterations
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon


def test_each_batch_is_one_iteration(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        batches, reports = [], []
        for batch in iterations(range(5), job="resnet", gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False):
            batches.append(batch)
            if batch > 0:
                reports.append(daemon.reports.get(timeout=WAIT_LIMIT_S))
        reports.append(daemon.reports.get(timeout=WAIT_LIMIT_S))
        registration = daemon.registrations.get(timeout=WAIT_LIMIT_S)

    assert batches == [0, 1, 2, 3, 4]
    assert registration["job_name"] == "resnet"
    assert [report["iteration_index"] for report in reports] == [0, 1, 2, 3, 4]
    assert [report["next_begin_mono_ns"] == 0 for report in reports] == [False, False, False, False, True]


def test_leaving_the_loop_early_leaves_the_job(tmp_path: Path) -> None:
    with FakeDaemon(tmp_path) as daemon:
        for batch in iterations(range(5), job="resnet", gpu_uuid="GPU-1", socket_path=daemon.socket_path, phases=False):
            daemon.registrations.get(timeout=WAIT_LIMIT_S)
            if batch == 0:
                break

        assert daemon.releases.get(timeout=WAIT_LIMIT_S)["rank_token"]


def test_an_exception_in_the_loop_body_passes_through(tmp_path: Path) -> None:
    def train() -> None:
        for _ in iterations(range(5), job="resnet", gpu_uuid="GPU-1", socket_path=str(tmp_path / "nobody")):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train()
