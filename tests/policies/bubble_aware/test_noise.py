"""Jobs that are too noisy to plan for stay at full speed and are profiled again when the noise falls."""

from dataclasses import dataclass

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.outcome import OutcomeKind, find_outcome
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import AccountRules
from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd_policies.bubble_aware.noise import Outlook
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from tests.support.thorough import thorough
from tests.support.virtual_training import A100Work, VirtualTraining, Work

F, B = InstructionKind.F, InstructionKind.B


def training(noise_ratio: float, energy_noise_ratio: float) -> VirtualTraining:
    """Return an unbalanced pipeline of four stages whose instructions and counters scatter."""
    work: dict[tuple[int, InstructionKind], Work] = {}
    for rank, scale in enumerate((1.0, 0.93, 1.0, 1.10)):
        work[rank, F] = A100Work(0.0120 * scale, 0.0382 * scale, 0.25)
        work[rank, B] = A100Work(0.0270 * scale, 0.0660 * scale, 0.27)
    return VirtualTraining(
        one_forward_one_backward(4, 8),
        work,
        BubbleAware(),
        noise_ratio=noise_ratio,
        energy_noise_ratio=energy_noise_ratio,
        seed=3,
        rules=JobRules(account=AccountRules(first_income_s=30.0)),  # the policy is to say that it is too noisy
    )


def tuned_plans(run: VirtualTraining) -> list[str]:
    return [plan.plan_id for plan in run.job.knowledge.plans.kept if plan.purpose is PlanPurpose.TUNED]


def assert_too_noisy(run: VirtualTraining) -> None:
    assert not tuned_plans(run)
    outcome = find_outcome(run.job)
    assert outcome.kind is OutcomeKind.AT_FULL_SPEED
    assert outcome.reason.startswith("too noisy to plan for: under the best plan, ")
    assert run.job.phase is JobPhase.TUNED
    assert not run.has_lease


@pytest.mark.parametrize(("noise_ratio", "energy_noise_ratio"), [(0.05, 0.05), *thorough((0.003, 0.02), (0.02, 0.03))])
def test_usual_noise_is_no_reason_against_a_plan(noise_ratio: float, energy_noise_ratio: float) -> None:
    run = training(noise_ratio, energy_noise_ratio)
    while not tuned_plans(run) and len(run.history) < 60:
        run.run(1)

    assert tuned_plans(run)


@pytest.mark.thorough
def test_a_noisy_job_stays_at_full_speed_and_is_profiled_again_and_planned_once_its_noise_falls() -> None:
    run = training(0.3, 0.3)
    run.run(60)
    assert_too_noisy(run)
    num_plans = len(run.job.knowledge.plans.kept)
    run.run(60)
    assert_too_noisy(run)
    assert len(run.job.knowledge.plans.kept) == num_plans  # not profiled again soon

    run.noise_ratio, run.energy_noise_ratio = 0.003, 0.02
    run.run(560)  # the slowdown budget paces the second profiling

    saving = run.job.knowledge.saving()
    assert tuned_plans(run)
    assert saving is not None
    assert saving.saving_ratio is not None
    assert saving.saving_ratio.low > 0.05


@dataclass(frozen=True)
class Case:
    """Ranges of saving and slowdown, and whether a plan can be trusted that may slow down by 2 %."""

    saving: tuple[float, float]
    slowdown: tuple[float, float]
    is_trusted: bool


@pytest.mark.parametrize(
    "case",
    [
        Case((0.08, 0.16), (-0.01, 0.02), is_trusted=True),
        Case((0.01, 0.3), (-0.01, 0.02), is_trusted=True),
        Case((-0.004, 0.01), (-0.01, 0.02), is_trusted=True),
        Case((-0.05, 0.2), (-0.01, 0.02), is_trusted=False),
        Case((0.08, 0.16), (-0.01, 0.06), is_trusted=False),
        Case((0.08, 0.16), (-0.2, 0.04), is_trusted=True),
    ],
)
def test_a_plan_is_trusted_if_it_saves_for_sure_and_keeps_the_permitted_slowdown(case: Case) -> None:
    assert (Outlook(case.saving, case.slowdown).problem(0.02) is None) == case.is_trusted
