"""Predicted savings where clocks may not be set: the range contains the saving of the same job under control."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from gpuenergyd.core.job.messages import StoreCurves
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import (
    SAVING_HIGH,
    SAVING_LOW,
    ClockPlan,
    PlanPrediction,
    PlanPurpose,
    PredictedSaving,
)
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import ClockPolicy, JobView
from gpuenergyd_other_policies.cost import Cost
from gpuenergyd_other_policies.uniform import Uniform
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import A100Work, Work, a100_stages

F, B = InstructionKind.F, InstructionKind.B
MODEL = "NVIDIA A100-SXM4-40GB"
"""With published curves."""


def training(policy: ClockPolicy, **overrides: object) -> VirtualTraining:
    work = a100_stages((1.0, 0.93, 1.0, 1.10))
    return VirtualTraining(one_forward_one_backward(4, 8), work, policy, **overrides)  # type: ignore[arg-type]


def observed_view(**overrides: object) -> JobView:
    """Return the view of a job that has run at full speed only."""
    run = training(FullSpeed(), **overrides)
    run.run(16)
    view = run.job.view()
    assert view is not None
    gpus = tuple(replace(gpu, model_name=MODEL) for gpu in view.gpus)
    return replace(view, gpus=gpus, can_set_clocks=False, issued_plans=())


def predicted_saving_ratio(plan: ClockPlan) -> float:
    assert plan.predicted is not None
    assert plan.predicted.baseline_energy_j is not None
    return 1 - plan.predicted.energy_j / plan.predicted.baseline_energy_j


@pytest.mark.thorough
@pytest.mark.parametrize(("policy", "max_slowdown_ratio"), [(BubbleAware(), 0.0), (Uniform(), 0.1)])
def test_the_predicted_range_contains_the_saving_of_the_same_job_under_control(
    policy: ClockPolicy, max_slowdown_ratio: float
) -> None:
    plan = policy.next_plan(observed_view(max_slowdown_ratio=max_slowdown_ratio))
    controlled = training(type(policy)(), max_slowdown_ratio=max_slowdown_ratio)
    controlled.run(100)

    saving = controlled.job.knowledge.saving()
    assert saving is not None
    assert saving.saving_ratio is not None
    low, high = plan.figure("saving_low_ratio"), plan.figure("saving_high_ratio")
    assert low is not None
    assert high is not None
    assert plan.purpose is PlanPurpose.PREDICTED
    assert low <= predicted_saving_ratio(plan) <= high
    assert low <= saving.saving_ratio.estimate <= high
    assert "assumed" in plan.reason


@pytest.mark.thorough
def test_the_range_is_wider_where_nothing_is_published_and_narrower_with_a_past_job() -> None:
    view = observed_view()
    unknown = replace(view, gpus=tuple(replace(gpu, model_name="B999") for gpu in view.gpus))
    controlled = training(BubbleAware(), model_name="B999")
    controlled.run(60)
    learned = [command.learned for command in controlled.commands if isinstance(command, StoreCurves)]
    gpu_uuids = tuple(gpu.gpu_uuid for gpu in view.gpus)
    past_job = PastJob("before", "gpt", datetime(2026, 11, 1, tzinfo=UTC), learned[-1], gpu_uuids=gpu_uuids)
    known = replace(unknown, past_jobs=(past_job,))

    widths = []
    for own in (unknown, view, known):
        saving = BubbleAware().next_plan(own).predicted_saving
        assert saving is not None
        assert saving.low_ratio is not None
        assert saving.high_ratio is not None
        widths.append(saving.high_ratio - saving.low_ratio)

    assert widths == sorted(widths, reverse=True)


def test_nothing_is_saved_within_the_error_of_the_measured_times() -> None:
    view = observed_view()
    scattered = tuple(
        replace(o, iteration_time_s=o.iteration_time_s * (1.5 if o.iteration_index % 2 else 0.5))
        for o in view.observations
    )

    plan, certain = BubbleAware().next_plan(replace(view, observations=scattered)), BubbleAware().next_plan(view)

    saving = plan.predicted_saving
    assert saving is not None
    assert (saving.ratio, saving.low_ratio) == (0.0, 0.0)
    assert saving.high_ratio is not None
    assert saving.high_ratio > 0.1
    assert (plan.purpose, plan.ranks) == (PlanPurpose.PREDICTED, ())
    assert certain.predicted_saving is not None
    assert certain.predicted_saving.ratio > 0.05
    assert certain.ranks != ()


@pytest.mark.parametrize("policy", [BubbleAware(), Uniform(), Cost()])
@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (Schedule("loop", 1, ((Instruction(0, F, 0),),)), "no slowdown permitted and one instruction per iteration"),
        (Schedule("loop", 1, ((Instruction(0, F, 0), Instruction(0, B, 0)),)), "no slowdown permitted and no phase"),
    ],
)
def test_a_loop_that_computes_all_the_time_has_nothing_to_save_at_the_same_speed(
    policy: ClockPolicy, schedule: Schedule, reason: str
) -> None:
    work: dict[tuple[int, InstructionKind], Work] = {(0, kind): A100Work(0.02, 0.04, 0.25) for kind in (F, B)}
    run = VirtualTraining(schedule, work, FullSpeed(), noise_ratio=0.01)
    run.run(16)
    view = run.job.view()
    assert view is not None

    plan = policy.next_plan(replace(view, can_set_clocks=False, issued_plans=()))

    assert plan.predicted_saving == PredictedSaving(0.0, None, None)
    assert plan.reason.startswith(reason)


@pytest.mark.parametrize(
    ("energy_j", "figures", "expected"),
    [
        (75.0, (), PredictedSaving(0.25, None, None)),
        (103.4, (), PredictedSaving(0.0, None, None)),
        (98.6, ((SAVING_LOW, -0.02), (SAVING_HIGH, 0.03)), PredictedSaving(0.0, 0.0, 0.03)),
        (103.4, ((SAVING_LOW, -0.06), (SAVING_HIGH, -0.01)), PredictedSaving(0.0, 0.0, 0.0)),
        (75.0, ((SAVING_LOW, 0.05), (SAVING_HIGH, 0.3)), PredictedSaving(0.25, 0.05, 0.3)),
    ],
)
def test_no_prediction_is_worse_than_full_speed(
    energy_j: float, figures: tuple[tuple[str, float], ...], expected: PredictedSaving
) -> None:
    predicted = PlanPrediction(1.0, energy_j, baseline_time_s=1.0, baseline_energy_j=100.0)

    assert ClockPlan("p", PlanPurpose.PREDICTED, predicted=predicted, figures=figures).predicted_saving == expected


def test_a_predicted_plan_meets_the_target() -> None:
    view = observed_view()
    plan = BubbleAware().next_plan(view)

    assert plan.predicted is not None
    assert plan.predicted.iteration_time_s <= view.baseline.iteration_time_s * (1 + 1e-6)


def test_no_saving_is_predicted_without_energy_measurements() -> None:
    view = observed_view()
    blind = [replace(o, ranks=tuple(replace(rank, energy_j=None) for rank in o.ranks)) for o in view.observations]

    plan = BubbleAware().next_plan(replace(view, observations=tuple(blind)))

    assert plan.predicted is None
    assert plan.reason == "savings cannot be predicted: no energy was measured at full speed"


@pytest.mark.parametrize("policy", [BubbleAware(), Uniform()])
def test_no_saving_is_predicted_without_instruction_times(policy: ClockPolicy) -> None:
    view = observed_view()
    untimed = tuple(replace(o, instruction_samples=()) for o in view.observations)

    plan = policy.next_plan(replace(view, observations=untimed))

    assert plan.ranks == ()
    assert "savings cannot be predicted: ranks [0, 1, 2, 3] have no timed instructions" in plan.reason


def test_a_gpu_with_a_single_clock_is_not_controlled() -> None:
    view = observed_view()
    fixed = replace(view, gpus=tuple(replace(gpu, supported_sm_clocks_mhz=(1410,)) for gpu in view.gpus))
    running = ClockPlan("running", PlanPurpose.TUNED)

    assert "single clock" in BubbleAware().next_plan(fixed).reason
    assert BubbleAware().next_plan(replace(fixed, issued_plans=(running,))) is running


def test_no_frontier_is_returned_without_profiling_iterations() -> None:
    view = replace(observed_view(), issued_plans=(ClockPlan("tuned", PlanPurpose.TUNED),), observations=())

    assert BubbleAware().frontier(view) == ()
