"""A ramp-up of the batch size in virtual time: planned again for each number of microbatches."""

from statistics import fmean

import pytest

from gpuenergyd.core.job.issued_plans import PROOF_PLAN_ID
from gpuenergyd.core.job.messages import JobPhase, RankChangedMicrobatches
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.errors import JobError
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.remembered_plans import RememberedBubbleAware
from tests.support.thorough import thorough

WEIGHTS = (1.0, 0.85, 0.9, 1.2)
NUM_ITERATIONS = 56


def _training(num_microbatches: int, **options: object) -> VirtualTraining:
    schedule = one_forward_one_backward(len(WEIGHTS), num_microbatches)
    return VirtualTraining(schedule, a100_stages(WEIGHTS), RememberedBubbleAware(), **options)  # type: ignore[arg-type]


def _mean_tuned_j(training: VirtualTraining, *, last: int) -> float:
    return fmean(energy_j for _, energy_j, plan_id in training.history[-last:] if plan_id != PROOF_PLAN_ID)


@pytest.fixture(scope="module")
def of_eight() -> VirtualTraining:
    """Return a training with eight microbatches from the start."""
    training = _training(8)
    training.run(NUM_ITERATIONS)
    return training


@pytest.mark.thorough
@pytest.mark.parametrize(("noise_ratio", "steps"), [(0.0, (8,)), *thorough((0.0, (6, 8)), (0.004, (6, 8)))])
def test_a_tuned_job_is_planned_again_for_each_number_of_microbatches(
    of_eight: VirtualTraining, noise_ratio: float, steps: tuple[int, ...]
) -> None:
    training = _training(4, noise_ratio=noise_ratio, seed=3)
    training.run(NUM_ITERATIONS)
    slowest = 0.0
    for num_microbatches in steps:
        assert training.job.phase is JobPhase.TUNED
        training.change_schedule(one_forward_one_backward(len(WEIGHTS), num_microbatches))
        assert (training.job.phase, training.job.current_plan.ranks) == (JobPhase.BASELINE, ())
        assert training.job.description.num_microbatches == num_microbatches
        training.run(NUM_ITERATIONS)
        assert training.job.baseline is not None
        times_s = [time_s for time_s, *_ in training.history[-NUM_ITERATIONS:]]
        slowest = max(slowest, sum(times_s) / len(times_s) / training.job.baseline.iteration_time_s - 1)

    assert training.job.phase is JobPhase.TUNED
    assert training.job.current_plan.purpose is PlanPurpose.TUNED
    assert slowest < 0.01
    if noise_ratio == 0.0:
        assert _mean_tuned_j(training, last=10) == pytest.approx(_mean_tuned_j(of_eight, last=10), rel=0.004)
    estimate = training.job.estimate()
    assert estimate is not None
    assert estimate.saving is not None


def test_the_job_is_at_full_speed_until_all_ranks_have_changed() -> None:
    training = _training(4)
    training.run(NUM_ITERATIONS)
    before = training.job.ranks.schedule
    orders = one_forward_one_backward(len(WEIGHTS), 8).orders

    for r in (2, 0, 1):
        training.feed(RankChangedMicrobatches(r, orders[r], 8))
    training.run(12)

    assert training.job.phase is JobPhase.BASELINE
    assert training.job.current_plan.ranks == ()
    assert training.job.ranks.schedule is before
    training.feed(RankChangedMicrobatches(3, orders[3], 8))
    assert training.job.ranks.schedule is not None
    assert training.job.ranks.schedule.orders == orders


def test_a_state_between_the_changes_of_two_ranks_survives_a_restart() -> None:
    training = _training(4)
    training.run(12)
    orders = one_forward_one_backward(len(WEIGHTS), 8).orders
    for r in range(3):
        training.feed(RankChangedMicrobatches(r, orders[r], 8))

    training.job.restore(training.job.snapshot())
    training.feed(RankChangedMicrobatches(3, orders[3], 8))

    assert training.job.description.num_microbatches == 8


def test_a_rank_that_has_not_joined_or_orders_that_deadlock_are_refused() -> None:
    training = _training(4)
    schedule = one_forward_one_backward(len(WEIGHTS), 8)

    with pytest.raises(JobError, match="rank 9 of job 'virtual' is not registered"):
        training.feed(RankChangedMicrobatches(9, schedule.orders[0], 8))
    for r in range(3):
        training.feed(RankChangedMicrobatches(r, schedule.orders[r], 8))
    with pytest.raises(JobError, match="do not fit together"):
        training.feed(RankChangedMicrobatches(3, tuple(reversed(schedule.orders[3])), 8))
    assert training.job.description.num_microbatches == 4


def test_energy_and_power_per_gpu_are_those_of_the_newest_observed_iteration() -> None:
    training = _training(4)
    assert training.job.figures_per_gpu() == (None, None)

    training.run(6)

    newest = training.job.observations[-1]
    assert newest.energy_j is not None
    energy_j, power_w = training.job.figures_per_gpu()
    assert energy_j == pytest.approx(newest.energy_j / len(WEIGHTS))
    assert power_w == pytest.approx(newest.energy_j / len(WEIGHTS) / newest.iteration_time_s)
