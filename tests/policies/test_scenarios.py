"""What happens to real jobs, in virtual time: each must end inside the budget and say why."""

from statistics import median

import pytest

from gpuenergyd.core.job import PROOF_PLAN_ID, JobRules
from gpuenergyd.core.messages import JobPhase, RankReported
from gpuenergyd.core.pipeline import InstructionKind, one_forward_one_backward
from gpuenergyd.core.plan import PlanPurpose
from gpuenergyd_policies.bubble_aware import BubbleAware
from tests.support.virtual_training import A100Work, VirtualTraining, Work

F, B = InstructionKind.F, InstructionKind.B


def training(**overrides: object) -> VirtualTraining:
    work: dict[tuple[int, InstructionKind], Work] = {}
    for rank, scale in enumerate((1.0, 0.93, 1.0, 1.10)):
        work[rank, F] = A100Work(0.0120 * scale, 0.0382 * scale, 0.25)
        work[rank, B] = A100Work(0.0270 * scale, 0.0660 * scale, 0.27)
    return VirtualTraining(one_forward_one_backward(4, 8), work, BubbleAware(), **overrides)  # type: ignore[arg-type]


def untuned_time_s(slowdown_of_rank: dict[int, float]) -> float:
    run = training(slowdown_of=lambda rank, _: slowdown_of_rank.get(rank, 1.0), rules=JobRules(max_faults=0))
    run.run(3)
    return run.history[-1][0]


@pytest.mark.fault(46)
def test_a_stage_that_becomes_slower_costs_at_most_five_iterations_and_is_learned_anew() -> None:
    run = training(slowdown_of=lambda rank, iteration: 1.1 if rank == 1 and iteration >= 50 else 1.0)
    run.run(130)

    full_speed_s = untuned_time_s({1: 1.1})
    outside = [k for k, (time_s, _, plan) in enumerate(run.history) if k >= 50 and time_s > 1.01 * full_speed_s]
    not_profiling = [k for k in outside if not (run.history[k][2] or "").startswith("profile")]
    assert len(not_profiling) <= 5
    assert run.job.phase is JobPhase.TUNED
    times = [t for t, _, p in run.history[-20:] if p == run.job.current_plan.plan_id]
    assert median(times) <= 1.003 * full_speed_s


def test_a_job_that_becomes_faster_is_learned_anew() -> None:
    run = training(slowdown_of=lambda _, iteration: 0.7 if iteration >= 50 else 1.0)
    run.run(110)

    full_speed_s = untuned_time_s(dict.fromkeys(range(4), 0.7))
    times = [t for t, _, p in run.history[-20:] if p == run.job.current_plan.plan_id]
    assert run.job.phase is JobPhase.TUNED
    assert median(times) <= 1.003 * full_speed_s
    assert run.job.num_faults == 0


@pytest.mark.fault(46)
def test_evaluation_between_iterations_is_left_alone() -> None:
    run = training()
    usual = run.step_overhead_s
    for _ in range(60):
        run.step_overhead_s = usual + (0.8 if run.iteration_index % 10 == 7 else 0.0)
        run.run(1)

    assert run.job.num_faults == 0
    assert run.job.phase is JobPhase.TUNED
    assert run.job.baseline is not None
    assert run.job.baseline.iteration_time_s == pytest.approx(run.history[0][0], rel=0.01)
    interrupted = [o for o in run.job.observations if o.iteration_index % 10 == 7]
    assert interrupted
    assert not any(o.is_regular for o in interrupted)


@pytest.mark.fault(46)
def test_a_job_that_never_repeats_an_order_is_never_tuned() -> None:
    run = training()
    run.run(0)
    original = run.tell

    def shuffled(event: object) -> None:
        if isinstance(event, RankReported):
            report = event.report
            event = RankReported(
                type(report)(
                    report.pp_rank,
                    report.iteration_index,
                    report.plan_epoch,
                    report.begin_ns,
                    report.end_ns,
                    report.next_begin_ns,
                    report.instructions[: 3 + report.iteration_index % 4],
                )
            )
        original(event)  # type: ignore[arg-type]

    run.tell = shuffled  # type: ignore[method-assign]
    run.run(40)

    assert run.job.phase in {JobPhase.WARMUP, JobPhase.BASELINE}
    assert not run.job.issued_plans


def test_a_short_full_speed_block_proves_the_saving() -> None:
    run = training(noise_ratio=0.003, energy_noise_ratio=0.02, seed=5)
    run.run(80)

    blocks = [plan for _, _, plan in run.history if plan == PROOF_PLAN_ID]
    saving = run.job.saving()
    assert len(blocks) == 4
    assert saving is not None
    assert saving.saving_ratio is not None
    assert 0.10 < saving.saving_ratio.low < saving.saving_ratio.estimate < saving.saving_ratio.high < 0.19
    assert saving.slowdown_ratio.high < 0.01


def test_full_speed_blocks_stay_within_their_budget() -> None:
    run = training(rules=JobRules(proof_budget_ratio=0.02))
    run.run(420)

    blocks = sum(plan == PROOF_PLAN_ID for _, _, plan in run.history)
    assert 4 < blocks <= 0.02 * 420 + 4


def test_full_speed_blocks_can_be_off() -> None:
    run = training(rules=JobRules(proof_iterations=0))
    run.run(60)

    assert PROOF_PLAN_ID not in {plan for _, _, plan in run.history}


def test_late_clocks_cost_energy_and_never_time() -> None:
    run = training(switch_latency_s=0.025)
    run.run(60)
    ideal = training(switch_latency_s=0.0)
    ideal.run(60)

    assert run.job.baseline is not None
    tuned = [(t, e) for t, e, p in run.history if run.job.purpose_of(p) is PlanPurpose.TUNED][1:]
    assert median(t for t, _ in tuned) <= 1.001 * run.job.baseline.iteration_time_s
    kept = (run.job.saving(), ideal.job.saving())
    assert kept[0] is not None
    assert kept[1] is not None
    assert kept[0].saving_ratio is not None
    assert kept[1].saving_ratio is not None
    assert kept[0].saving_ratio.estimate > 0.6 * kept[1].saving_ratio.estimate
