"""Kill matrix: after a kill of any process at any moment, no GPU stays lowered and the history is intact."""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.support.kill_rig import VICTIMS, KillRig


@pytest.mark.fault(1, 4, 6)
@pytest.mark.kill
def test_deaths_at_random_moments_leave_no_gpu_lowered(tmp_path: Path) -> None:
    """15 clients and three of each other victim; `benchmarks/runs/kill_matrix.py` kills a thousand."""
    rig = KillRig(tmp_path, random.Random(682), weights=(5, 1, 1, 1, 1, 1))
    try:
        trials = list(rig.run(30))
    finally:
        rig.close()

    assert [t for t in trials if t.num_left_lowered or t.is_database_damaged] == []
    assert min(Counter(t.victim for t in trials)[victim] for victim in VICTIMS) == 3
    assert sum(t.num_lowered > 0 for t in trials) > 15
