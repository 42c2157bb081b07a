"""The examples run as they stand, learn, and join; those for a framework are run by that framework's own tests."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.trainers.example_runs import check_example

pytestmark = pytest.mark.torch

NUM_RANKS = 2


@pytest.mark.parametrize(("name", "schedule_name"), [("gpt_pipeline", "1f1b"), ("ddp_images", "loop")])
def test_example_runs_as_it_stands_learns_and_joins(tmp_path: Path, name: str, schedule_name: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    check_example(tmp_path, name, schedule_name=schedule_name, launcher=torchrun, num_ranks=NUM_RANKS)
