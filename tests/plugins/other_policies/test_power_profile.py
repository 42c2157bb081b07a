"""The power-profile policy: one given profile, kept while it saves within the permitted slowdown, else taken back."""

import pytest

from gpuenergyd.core.job.messages import JobPhase, RestoreGpus
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.errors import UsageError
from gpuenergyd_other_policies.power_profile import WorkloadPowerProfile
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.plain_jobs import loop_training, random_gpu_work
from tests.support.thorough import thorough

ALL = frozenset(Lever)
SAVES, SLOW, COSTS, NOTHING = 1, 2, 3, 4
EFFECTS = {SAVES: (1.02, 0.88), SLOW: (1.08, 0.80), COSTS: (1.01, 1.04), NOTHING: (1.0, 1.0)}
"""By profile, what it multiplies times and powers with."""


def train(
    number: int,
    *,
    num_iterations: int = 120,
    max_slowdown_ratio: float = 0.03,
    levers: frozenset[Lever] = ALL,
    seed: int = 1,
) -> VirtualTraining:
    run = loop_training(
        WorkloadPowerProfile(number=str(number)),
        random_gpu_work(seed, "mixed"),
        max_slowdown_ratio=max_slowdown_ratio,
        seed=seed,
        levers=levers,
        power_profiles=EFFECTS,
    )
    run.run(num_iterations)
    return run


def is_requested(run: VirtualTraining) -> bool:
    return bool(run.job.current_plan.power_profiles)


@pytest.mark.parametrize("levers", [ALL, frozenset({Lever.POWER_PROFILES})])
@pytest.mark.parametrize("seed", [0, *thorough(1, 2, 3, 4)])
def test_a_profile_that_saves_within_the_permitted_slowdown_is_kept(levers: frozenset[Lever], seed: int) -> None:
    run = train(SAVES, levers=levers, seed=seed)

    assert run.job.phase is JobPhase.TUNED
    assert dict(run.job.current_plan.power_profiles) == {0: SAVES}
    assert run.job.current_plan.sets_clocks is (Lever.CLOCKS in levers)
    assert run.job.knowledge.num_iterations_for[PlanPurpose.TRIAL] == 0
    assert "as given: saves " in run.job.phase_reason
    estimate = run.job.estimate()
    assert estimate is not None
    assert estimate.saving is not None
    assert estimate.saving.saving_ratio is not None
    assert estimate.saving.saving_ratio.low > 0.0
    assert estimate.saving.saving_ratio.estimate == pytest.approx(1 - 1.02 * 0.88, abs=0.02)


@pytest.mark.parametrize(
    ("number", "reason"),
    [(SLOW, "slower; 3 % is permitted"), (COSTS, "taken back: saves -"), (NOTHING, "no saving shows")],
)
@pytest.mark.parametrize("seed", [0, *thorough(1, 2, 3, 4)])
def test_a_profile_that_does_not_win_is_taken_back_for_good_with_the_reason(
    number: int, reason: str, seed: int
) -> None:
    run = train(number, seed=seed)

    assert not is_requested(run)
    assert run.job.phase is JobPhase.TUNED
    assert f"workload power profile {number} taken back: " in run.job.phase_reason
    assert reason in run.job.phase_reason
    assert any(isinstance(command, RestoreGpus) for command in run.commands)
    num_tuned = run.job.knowledge.num_iterations_for[PlanPurpose.TUNED]
    run.run(500)  # long enough for its iterations to be dropped
    assert run.job.knowledge.num_iterations_for[PlanPurpose.TUNED] == num_tuned
    assert f"workload power profile {number} taken back: " in run.job.phase_reason


def test_a_profile_is_taken_back_when_another_program_requests_one_and_tried_again_without() -> None:
    run = train(SAVES)
    assert is_requested(run)

    run.foreign_power_profiles = (20,)
    run.report_gpus()
    run.run(8)
    assert not is_requested(run)
    assert "is not tried: another program has requested 20" in run.job.phase_reason

    run.foreign_power_profiles = ()
    run.report_gpus()
    run.run(8)
    assert is_requested(run)


@pytest.mark.parametrize(
    ("number", "levers", "max_slowdown_ratio", "reason"),
    [
        (99, ALL, 0.03, "does not offer workload power profile 99; offered: 1, 2, 3, 4"),
        (SAVES, ALL - {Lever.POWER_PROFILES}, 0.03, "may not be set: that needs mode control, power-profiles among"),
        (SAVES, ALL, 0.0, "nothing to save at the same speed"),
    ],
)
def test_what_cannot_be_tried_stays_at_full_speed_with_the_reason(
    number: int, levers: frozenset[Lever], max_slowdown_ratio: float, reason: str
) -> None:
    run = train(number, levers=levers, max_slowdown_ratio=max_slowdown_ratio)

    assert not is_requested(run)
    assert reason in run.job.phase_reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "number = missing: must be a whole number from 0 to 254"),
        ({"number": "255"}, "number = 255"),
        ({"number": "-1"}, "number = -1"),
        ({"number": "9" * 5000}, "must be a whole number"),
        ({"number": "1", "watts": "1"}, "no option 'watts'; valid is number"),
    ],
)
def test_a_profile_is_given_by_its_number(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WorkloadPowerProfile(**options)
