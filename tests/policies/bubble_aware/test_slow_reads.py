"""Jobs whose energy counters are read by slow calls are planned as well as those with exact counters."""

import pytest

from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_sim.virtual_training.work import A100Work, Work
from tests.support.slow_sampling import SlowlyReadTraining
from tests.support.thorough import thorough


def test_readings_of_a_slow_driver_do_not_hide_every_update_of_a_counter() -> None:
    """Regular pauses after readings of 20 ms led to one reading per 100 ms, always at the counter's update."""
    work: dict[tuple[int, InstructionKind], Work] = {
        (0, InstructionKind.F): A100Work(0.1, 0.3, 0.25),
        (0, InstructionKind.B): A100Work(0.2, 0.5, 0.27),
    }
    training = SlowlyReadTraining(
        one_forward_one_backward(1, 1), work, FullSpeed(), counter_period_s=0.1, read_s=0.005, seed=0
    )
    try:
        training.run(40)
        assert training.num_dated == 1
    finally:
        training.close()

    assert all(observation.energy_j is not None for observation in training.job.observations[-20:])


@pytest.mark.parametrize(
    ("read_ms", "period_ms", "num_dated"), [(5.0, 20.0, 0), *thorough((0.5, 20.0, 2), (5.0, 1.0, 0))]
)
def test_a_job_with_slow_reads_is_planned_and_its_saving_measured(
    read_ms: float, period_ms: float, num_dated: int
) -> None:
    work: dict[tuple[int, InstructionKind], Work] = {
        (rank, kind): A100Work(memory_s * scale, compute_s * scale, 0.26)
        for rank, scale in enumerate((1.0, 0.9))
        for kind, memory_s, compute_s in ((InstructionKind.F, 0.012, 0.038), (InstructionKind.B, 0.027, 0.066))
    }
    training = SlowlyReadTraining(
        one_forward_one_backward(2, 8),
        work,
        BubbleAware(),
        noise_ratio=0.003,
        counter_period_s=period_ms / 1000,
        read_s=read_ms / 1000,
    )
    try:
        training.run(70)  # with the third block, as blocks between unlike plans do not count
        assert training.num_dated == num_dated
    finally:
        training.close()

    tuned = {plan.plan_id for plan in training.job.knowledge.plans.kept if plan.purpose is PlanPurpose.TUNED}
    energies_j = [energy_j for _, energy_j, plan in training.history if plan in tuned][1:]
    true_saving = 1 - sum(energies_j) / len(energies_j) / training.history[2][1]
    saving = training.job.knowledge.saving()
    assert saving is not None
    assert saving.saving_ratio is not None
    assert 0.05 < true_saving < 0.1
    assert saving.saving_ratio.low - 0.001 < true_saving < saving.saving_ratio.high + 0.001
