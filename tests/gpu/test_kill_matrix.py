"""Whatever dies, and whenever: no GPU is left lowered, and the history stays whole."""

import random
from pathlib import Path

import pytest

from tests.support.kill_rig import VICTIMS, KillRig


@pytest.mark.fault(1, 4, 6)
@pytest.mark.kill
def test_two_hundred_deaths_at_random_moments_leave_no_gpu_lowered(tmp_path: Path) -> None:
    rig = KillRig(tmp_path, random.Random(20), weights=(80, 4, 4, 4, 4, 4))
    try:
        trials = list(rig.run(200))
    finally:
        rig.close()

    assert [t for t in trials if t.num_left_lowered or t.is_database_damaged] == []
    assert {t.victim for t in trials} == set(VICTIMS)
    assert sum(t.num_lowered > 0 for t in trials) > 100
