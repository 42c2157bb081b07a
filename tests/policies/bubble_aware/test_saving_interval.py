"""Confidence intervals of reported savings contain the true saving as often as stated."""

import pytest

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages

NUM_RUNS = 100
SCHEDULE = one_forward_one_backward(2, 4)


class _OneClock:
    """A policy with one clock, to test the measurement apart from the planning."""

    def next_plan(self, view: JobView) -> ClockPlan:
        if view.issued_plans:
            return view.issued_plans[-1]
        clock = view.gpus[0].supported_sm_clocks_mhz[3]
        ranks = tuple(
            RankClocks(r, (clock,) * len(order), constant_clock_changes(order, clock))
            for r, order in enumerate(view.schedule.orders)
        )
        return ClockPlan("one-clock", PlanPurpose.TUNED, ranks)


def training(seed: int, *, is_noisy: bool) -> VirtualTraining:
    rules = JobRules() if is_noisy else JobRules(proof_iterations=0)
    noise = {"noise_ratio": 0.004, "energy_noise_ratio": 0.02, "counter_period_s": 0.1} if is_noisy else {}
    work = a100_stages((1.0, 1.07))
    return VirtualTraining(SCHEDULE, work, _OneClock(), 0.2, rules=rules, seed=seed, **noise)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_the_measured_interval_of_the_saving_contains_the_true_saving() -> None:
    quiet = training(0, is_noisy=False)
    quiet.run(25)
    true_ratio = 1 - quiet.history[-1][1] / quiet.history[5][1]

    right = 0
    for seed in range(NUM_RUNS):
        run = training(seed, is_noisy=True)
        run.run(90)
        saving = run.job.knowledge.saving()
        assert saving is not None
        assert saving.saving_ratio is not None
        right += saving.saving_ratio.low <= true_ratio <= saving.saving_ratio.high
    assert true_ratio > 0.02
    assert right >= 0.9 * NUM_RUNS
