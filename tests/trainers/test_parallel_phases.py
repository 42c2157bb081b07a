"""Phases of DDP and FSDP2 in real processes."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.trainers.parallel_phases import check_phases

pytestmark = pytest.mark.torch


@pytest.mark.thorough
@pytest.mark.parametrize("framework", ["ddp", "fsdp2"])
def test_ranks_of_a_parallel_loop_register_their_phases(framework: str, tmp_path: Path) -> None:
    check_phases(framework, tmp_path)
