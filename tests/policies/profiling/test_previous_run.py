"""A second run of a known job plans at once from the first run's profile, as long as that still holds."""

from dataclasses import replace
from statistics import fmean, median

import pytest

from gpuenergyd.core.job.messages import JobPhase, PreviousRunFound, StoreRun
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.reorder import split_in_place
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from gpuenergyd_policies.bubble_aware.model import fit_model
from gpuenergyd_policies.profiling.previous_run import with_previous_run
from tests.support.remembered_plans import RememberedBubbleAware
from tests.support.thorough import thorough
from tests.support.virtual_training import A100Work, VirtualTraining, Work

F, B = InstructionKind.F, InstructionKind.B
NOISE = {"noise_ratio": 0.004, "energy_noise_ratio": 0.02}


def training(**overrides: object) -> VirtualTraining:
    work: dict[tuple[int, InstructionKind], Work] = {}
    for rank, scale in enumerate((1.0, 0.93, 1.0, 1.10)):
        work[rank, F] = A100Work(0.0120 * scale, 0.0382 * scale, 0.25)
        work[rank, B] = A100Work(0.0270 * scale, 0.0660 * scale, 0.27)
    return VirtualTraining(one_forward_one_backward(4, 8), work, RememberedBubbleAware(), **overrides)  # type: ignore[arg-type]


def kept(run: VirtualTraining) -> list[PreviousRun | None]:
    return [command.run for command in run.commands if isinstance(command, StoreRun)]


def second_run(model: PreviousRun, **overrides: object) -> VirtualTraining:
    run = training(**overrides)
    run.feed(PreviousRunFound(model))
    return run


def profiled(run: VirtualTraining) -> list[str]:
    return [plan.plan_id for plan in run.job.knowledge.plans.kept if plan.purpose is PlanPurpose.PROFILE]


def saving_and_slowdown(run: VirtualTraining) -> tuple[float, float]:
    assert run.job.baseline is not None
    assert run.job.baseline.energy_j is not None
    rows = [(t, e) for t, e, plan in run.history if plan == run.job.current_plan.plan_id][1:]
    saving = 1 - median(e for _, e in rows) / run.job.baseline.energy_j
    return saving, median(t for t, _ in rows) / run.job.baseline.iteration_time_s - 1


@pytest.fixture(scope="module")
def first() -> VirtualTraining:
    run = training(seed=3, **NOISE)
    run.run(60)
    return run


@pytest.fixture(scope="module")
def model(first: VirtualTraining) -> PreviousRun:
    models = kept(first)
    assert models
    assert models[-1] is not None
    return models[-1]


@pytest.mark.thorough
def test_a_run_keeps_the_iterations_that_its_plan_was_made_from(first: VirtualTraining, model: PreviousRun) -> None:
    assert len(model.profile) >= 6
    assert len(model.full_speed) >= first.job.rules.baseline_iterations
    assert model.job_id == first.job.description.job_id
    assert model.figures == first.job.current_plan.figures


@pytest.mark.thorough
def test_a_second_run_of_a_known_job_reaches_its_plan_within_six_iterations(
    first: VirtualTraining, model: PreviousRun
) -> None:
    run = second_run(model, seed=8, **NOISE)
    run.run(60)

    warm = run.job.rules.warmup_iterations + run.job.rules.baseline_iterations
    first_tuned = next(k for k, (_, _, plan) in enumerate(run.history) if (plan or "").startswith("tuned"))
    assert first_tuned - warm <= 6
    assert profiled(run) == []
    assert run.job.phase is JobPhase.TUNED
    assert run.job.faults.num_faults == 0
    saving, slowdown = saving_and_slowdown(run)
    assert slowdown < 0.005
    assert saving > saving_and_slowdown(first)[0] - 0.01
    assert model.job_id in run.job.knowledge.plans.kept[0].reason


def test_a_second_run_keeps_the_previous_profile_with_the_latest_caution(model: PreviousRun) -> None:
    run = second_run(model, seed=9, **NOISE)
    run.run(50)

    again = kept(run)[-1]
    assert again is not None
    assert again.profile == model.profile
    assert again.figures == run.job.current_plan.figures


def test_the_trial_of_an_order_leaves_the_previous_profile_in_use(model: PreviousRun) -> None:
    run = second_run(model, seed=9, **NOISE)
    run.run(20)
    view = run.job.view()
    assert view is not None
    trial = ClockPlan("split-trial-1", PlanPurpose.PROFILE, orders=split_in_place(view.schedule).orders)
    view = replace(view, issued_plans=(*view.issued_plans, trial))

    assert fit_model(with_previous_run(view)).baseline_energy_j > 0


@pytest.mark.parametrize("of_rank", [1.08, *thorough(0.92)])
def test_a_job_with_other_instruction_times_is_profiled_again(model: PreviousRun, of_rank: float) -> None:
    run = second_run(model, slowdown_of=lambda rank, _: of_rank if rank == 1 else 1.0)
    run.run(45)

    assert len(profiled(run)) >= 6
    assert run.job.phase is JobPhase.TUNED


@pytest.mark.thorough
def test_a_job_with_another_power_draw_is_profiled_again(model: PreviousRun) -> None:
    run = training()
    run.work = {key: A100Work(w.memory_time_s, w.compute_time_s, 0.20) for key, w in run.work.items()}  # type: ignore[attr-defined]
    run.feed(PreviousRunFound(model))
    run.run(40)

    assert len(profiled(run)) >= 6


@pytest.mark.thorough
def test_a_previous_run_whose_plans_are_slow_is_discarded_and_the_job_profiled_within_budget(
    model: PreviousRun,
) -> None:
    """Times at full speed are unchanged, times below it a quarter longer."""
    run = second_run(model, slow_factor_when_tuned=1.25, rules=JobRules(relearn_after_slow_plans=1))
    run.run(110)

    assert None in kept(run)
    assert run.job.knowledge.previous_run is None
    assert len(profiled(run)) >= 1
    times_s = [time_s for time_s, _, _ in run.history]
    after_plans = 1 + max(k for k, (_, _, plan) in enumerate(run.history) if (plan or "").startswith("tuned"))
    assert fmean(times_s[after_plans:]) <= 1.01 * times_s[0]


@pytest.mark.thorough
def test_a_previous_run_found_after_profiling_has_begun_is_not_used(model: PreviousRun) -> None:
    run = training()
    run.run(20)
    assert profiled(run)
    run.feed(PreviousRunFound(model))
    run.run(25)

    assert run.job.knowledge.previous_run is None
    assert run.job.phase is JobPhase.TUNED
