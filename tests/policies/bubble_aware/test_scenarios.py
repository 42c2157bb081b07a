"""Full-speed blocks and late clock changes in virtual time: savings are measured, and late clocks cost no time."""

from statistics import median

import pytest

from gpuenergyd.core.job.issued_plans import PROOF_PLAN_ID
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import A100Work, Work, a100_stages
from tests.support.remembered_plans import RememberedBubbleAware
from tests.support.thorough import thorough

F, B = InstructionKind.F, InstructionKind.B


def training(**overrides: object) -> VirtualTraining:
    work = a100_stages((1.0, 0.93, 1.0, 1.10))
    return VirtualTraining(one_forward_one_backward(4, 8), work, RememberedBubbleAware(), **overrides)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_short_full_speed_blocks_prove_the_saving() -> None:
    run = training(noise_ratio=0.003, energy_noise_ratio=0.02, seed=5)
    run.run(80)

    blocks = [plan for _, _, plan in run.history if plan == PROOF_PLAN_ID]
    saving = run.job.knowledge.saving()
    assert len(blocks) == 3 * JobRules().proof_iterations
    assert saving is not None
    assert saving.saving_ratio is not None
    assert 0.10 < saving.saving_ratio.low < saving.saving_ratio.estimate < saving.saving_ratio.high < 0.19
    assert saving.slowdown_ratio.high < 0.01


SHORT_INSTRUCTIONS_S = {F: (0.032, 0.24, 0.25), B: (0.072, 0.29, 0.27)}
"""Time at the maximum clock, memory-bound share of it, watts per MHz."""


def short_training(num_ranks: int, num_microbatches: int, **overrides: object) -> VirtualTraining:
    """A pipeline of instructions of 32 to 79 ms."""
    work: dict[tuple[int, InstructionKind], Work] = {
        (rank, kind): A100Work(time_s * scale * memory, time_s * scale * (1 - memory), w_per_mhz)
        for rank, scale in enumerate([1.0, 1.03, 1.0, 1.1][:num_ranks] * (num_ranks // 4))
        for kind, (time_s, memory, w_per_mhz) in SHORT_INSTRUCTIONS_S.items()
    }
    schedule = one_forward_one_backward(num_ranks, num_microbatches)
    return VirtualTraining(schedule, work, RememberedBubbleAware(), **overrides)  # type: ignore[arg-type]


def saving_and_slowdown(run: VirtualTraining) -> tuple[float, float]:
    """Return measured saving and slowdown of the plan in force against the baseline."""
    assert run.job.baseline is not None
    assert run.job.baseline.energy_j is not None
    rows = [(t, e) for t, e, plan in run.history if plan == run.job.current_plan.plan_id][1:]
    saving = 1 - median(e for _, e in rows) / run.job.baseline.energy_j
    return saving, median(t for t, _ in rows) / run.job.baseline.iteration_time_s - 1


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), thorough((4, 8), (8, 16)))
def test_clocks_25_ms_late_cost_no_time_and_at_most_a_quarter_of_the_saving(
    num_ranks: int, num_microbatches: int
) -> None:
    late = short_training(num_ranks, num_microbatches, switch_latency_s=0.025, assumed_latency_s=0.05)
    late.run(100)
    ideal = short_training(num_ranks, num_microbatches, switch_latency_s=0.0)
    ideal.run(100)

    saving, slowdown = saving_and_slowdown(late)
    ideal_saving, _ = saving_and_slowdown(ideal)
    assert slowdown < 0.0005
    assert saving >= 0.75 * ideal_saving > 0.05
    learned = late.calibrations[0].latency
    assert learned.raise_s == pytest.approx(0.025, abs=0.001)
    assert late.job.faults.num_faults == 0


@pytest.mark.thorough
def test_uneven_late_clocks_under_noise_cost_no_significant_time() -> None:
    run = short_training(
        4, 8, switch_latency_s=0.025, assumed_latency_s=0.01, latency_spread_ratio=0.3, noise_ratio=0.003, seed=2
    )
    run.run(90)

    saving = run.job.knowledge.saving()
    assert saving is not None
    assert saving.saving_ratio is not None
    assert saving.slowdown_ratio.low < 0.001
    assert saving.slowdown_ratio.high < 0.005
    assert saving.saving_ratio.low > 0.05


@pytest.mark.thorough
def test_fast_clock_reductions_preserve_savings_despite_slow_raises() -> None:
    slow = short_training(4, 8, switch_latency_s=0.025, assumed_latency_s=0.025)
    slow.run(100)
    quick = short_training(4, 8, switch_latency_s=0.025, lower_latency_s=0.004, assumed_latency_s=0.025)
    quick.run(100)

    learned = quick.calibrations[0].latency
    assert learned.lower_s == pytest.approx(0.004, abs=0.001)
    assert learned.raise_s == pytest.approx(0.025, abs=0.001)
    assert saving_and_slowdown(quick)[0] > 1.05 * saving_and_slowdown(slow)[0]
    assert saving_and_slowdown(quick)[1] < 0.0005


@pytest.mark.thorough
@pytest.mark.parametrize("late_s", [0.02, 0.03])
def test_slower_clock_changes_lead_to_a_plan_with_more_lead_time(late_s: float) -> None:
    run = short_training(4, 8, switch_latency_s=0.006, assumed_latency_s=0.006)
    run.run(90)
    run.switch_latency_s = late_s
    run.run(80)

    assert any("switch latency" in plan.reason for plan in run.job.knowledge.plans.kept)
    assert run.calibrations[0].latency.raise_s == pytest.approx(late_s, abs=0.001)
    assert run.job.phase is JobPhase.TUNED
    saving, slowdown = saving_and_slowdown(run)
    assert slowdown < 0.003
    assert saving > 0.05
