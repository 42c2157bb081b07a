"""Stages of several ranks: the same plan quality as with one rank, because a stage is one GPU of more power."""

import pytest

from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.policies.bubble_aware.test_scenarios import short_training


def saving_and_energy_j(run: VirtualTraining) -> tuple[float, float]:
    """Return the saving of the plan in force and the energy of an iteration at full speed, all GPUs together."""
    baseline = run.job.baseline
    assert baseline is not None
    assert baseline.energy_j is not None
    energy_j = run.job.knowledge.measured_under(run.job.current_plan.plan_id).energy_j
    assert energy_j is not None
    return 1 - energy_j / baseline.energy_j, baseline.energy_j


@pytest.mark.thorough
def test_equal_ranks_of_a_stage_save_as_much_as_one() -> None:
    runs = [short_training(4, 8, num_stage_ranks=number) for number in (1, 4)]
    for run in runs:
        run.run(48)

    (saving, energy_j), (saving_of_four, energy_of_four_j) = (saving_and_energy_j(run) for run in runs)
    assert energy_of_four_j == pytest.approx(4 * energy_j)
    assert saving_of_four == pytest.approx(saving, abs=0.005)
    assert saving_of_four > 0.05
    assert runs[1].job.faults.num_faults == 0
