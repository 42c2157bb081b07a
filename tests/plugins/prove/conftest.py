"""A daemon with kind simulated GPUs, under which proofs run in real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.daemon_process import DaemonProcess, running_daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with running_daemon(tmp_path / "d", kind=WorldKind.KIND, baseline_iterations=3, database_batch_s=0.5) as process:
        yield process
