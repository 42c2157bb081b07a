"""Kill matrix: after a kill of any process at any moment, no GPU stays lowered and the history is intact."""

import random
from collections import Counter
from pathlib import Path

import pytest

from gpuenergyd.core.policy_api.policy import Lever
from tests.support.kill_rig import UNDER_A_BUDGET, VICTIMS, KillRig, Trial, Victim, without_effect
from tests.support.thorough import thorough


@pytest.mark.fault(1, 4, 6)
@pytest.mark.kill
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "weights", "num_of_each", "least_lowered"),
    [(41, (1,) * 6, 1, 2), (682, (5, 1, 1, 1, 1, 1), 3, 16)],
    ids=["each victim once", "15 clients and three of each other victim"],
)
def test_deaths_at_random_moments_leave_no_gpu_lowered(
    tmp_path: Path, seed: int, weights: tuple[int, ...], num_of_each: int, least_lowered: int
) -> None:
    """`benchmarks/runs/kill_matrix.py` kills a thousand."""
    trials = _run_trials(KillRig(tmp_path, random.Random(seed), weights=weights), num_of_each * sum(weights))

    assert min(Counter(t.victim for t in trials)[victim] for victim in VICTIMS) == num_of_each
    assert sum(t.num_lowered > 0 for t in trials) >= least_lowered


@pytest.mark.fault(1, 4, 6)
@pytest.mark.kill
@pytest.mark.parametrize(("policy", "num_trials", "least_lowered"), thorough(("uniform", 12, 7), ("cost", 12, 7)))
def test_deaths_under_power_limits_alone_leave_no_limit_behind(
    tmp_path: Path, policy: str, num_trials: int, least_lowered: int
) -> None:
    """Clocks may not be set, so what is lowered is power."""
    rig = KillRig(tmp_path, random.Random(64), weights=(2, 1, 1, 1, 1, 1), policy=policy, levers=(Lever.POWER_LIMITS,))
    locked: list[int] = []
    rig.on_trial = lambda: locked.extend(mhz for gpu in rig.gpus if (mhz := rig.host.locked_sm_clock_mhz(gpu)))

    trials = _run_trials(rig, num_trials)

    assert sum(t.num_lowered > 0 for t in trials) >= least_lowered
    assert locked == []


@pytest.mark.fault(1, 4, 6)
@pytest.mark.kill
@pytest.mark.thorough
def test_deaths_under_workload_power_profiles_leave_none_requested(tmp_path: Path) -> None:
    """Nothing else may be set, so what is lowered is a GPU with our profile."""
    rig = KillRig(
        tmp_path,
        random.Random(119),
        weights=(2, 1, 1, 1, 1, 1),
        policy="power-profile:number=1",
        levers=(Lever.POWER_PROFILES,),
        model="b200",
    )

    trials = _run_trials(rig, 7)

    assert sum(t.num_lowered > 0 for t in trials) >= 3


@pytest.mark.fault(1, 4, 6)
@pytest.mark.kill
@pytest.mark.parametrize(("seed", "num_trials", "least_lowered"), thorough((79, 12, 3)))
def test_deaths_under_a_power_budget_leave_no_clock_and_no_limit_behind(
    tmp_path: Path, seed: int, num_trials: int, least_lowered: int
) -> None:
    """The budget is below what idle GPUs and jobs draw together, so that ceilings are in force at any moment."""
    rig = KillRig(tmp_path, random.Random(seed), weights=UNDER_A_BUDGET, power_budget_w=450.0)

    trials = _run_trials(rig, num_trials)

    assert sum(t.num_lowered > 1 for t in trials) >= least_lowered


@pytest.mark.fault(1, 4, 6)
@pytest.mark.kill
@pytest.mark.thorough
def test_deaths_while_an_administrators_programs_change_gpus_leave_none_lowered(tmp_path: Path) -> None:
    """Programs are killed half way with the rest; `benchmarks/runs/kill_matrix.py --commands` kills a thousand."""
    rig = KillRig(tmp_path, random.Random(7), weights=(2, 1, 2, 2, 1, 1), uses_commands=True)

    trials = _run_trials(rig, 10)

    assert sum(t.num_lowered > 0 for t in trials) >= 5


@pytest.mark.parametrize(
    ("kills", "expected"),
    [
        ({"client": (9, 10), "worker": (5, 5)}, ()),
        ({"client": (0, 4)}, ("all victims: 0 of 4 kills hit a lowered GPU",)),
        ({"client": (20, 20), "worker": (0, 5)}, ("worker: 0 of 5 kills hit a lowered GPU",)),
        ({"client": (20, 20), "worker": (1, 6)}, ("worker: 1 of 6 kills hit a lowered GPU",)),
        ({"client": (20, 20), "worker": (0, 4)}, ()),
    ],
)
def test_kills_that_hit_no_lowered_gpu_are_no_evidence(
    kills: dict[Victim, tuple[int, int]], expected: tuple[str, ...]
) -> None:
    trials = [
        Trial(victim, int(k < num_hits), 0.1, 0, is_database_damaged=False)
        for victim, (num_hits, num_kills) in kills.items()
        for k in range(num_kills)
    ]

    assert without_effect(trials) == expected


def _run_trials(rig: KillRig, num_trials: int) -> list[Trial]:
    try:
        trials = list(rig.run(num_trials))
    finally:
        rig.close()
    assert [t for t in trials if t.num_left_lowered or t.is_database_damaged] == []
    assert without_effect(trials) == ()
    return trials
