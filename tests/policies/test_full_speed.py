"""Plain loops stay at full speed without being profiled, with a reason."""

from collections.abc import Callable

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.outcome import OutcomeKind, find_outcome, outcome_line
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd_other_policies.envelope import Envelope
from gpuenergyd_other_policies.uniform import Uniform
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import A100Work

F = InstructionKind.F
LOOP = Schedule("loop", 1, ((Instruction(0, F, 0),),))
POLICIES = [BubbleAware, Uniform, Envelope]


def loop(policy: ClockPolicy, **options: object) -> VirtualTraining:
    """Return a loop of one instruction, trained for 80 iterations."""
    run = VirtualTraining(LOOP, {(0, F): A100Work(0.05, 0.2, 0.25)}, policy, noise_ratio=0.002, **options)  # type: ignore[arg-type]
    run.run(80)
    return run


def purposes(run: VirtualTraining) -> set[PlanPurpose]:
    return {plan.purpose for plan in run.job.knowledge.plans.kept}


@pytest.mark.parametrize("num_dp_ranks", [1, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_without_permitted_slowdown_is_not_profiled_and_has_a_reason(
    policy: Callable[..., ClockPolicy], num_dp_ranks: int
) -> None:
    options = {"trials": "false"} if num_dp_ranks == 1 and policy in {BubbleAware, Uniform} else {}
    run = loop(policy(**options), num_dp_ranks=num_dp_ranks)

    assert purposes(run) <= {PlanPurpose.BASELINE}
    assert not run.slices
    outcome = find_outcome(run.job)
    assert (run.job.phase, outcome.kind) == (JobPhase.TUNED, OutcomeKind.NOTHING_TO_SAVE)
    assert outcome.reason.endswith(" at the same speed: no slowdown permitted and one instruction per iteration")
    assert bool(outcome.advice) == (num_dp_ranks == 1)
    assert outcome_line(run.job).startswith(f"{outcome.text}; cost so far: 0.0 s")


@pytest.mark.parametrize("policy", POLICIES)
def test_data_parallel_ranks_of_a_loop_are_not_profiled_each_for_itself(policy: type[ClockPolicy]) -> None:
    run = loop(policy(), num_dp_ranks=4, max_slowdown_ratio=0.1)

    assert not run.slices
    outcome = find_outcome(run.job)
    assert (outcome.kind, outcome.reason) == (
        OutcomeKind.AT_FULL_SPEED,
        "at full speed: 4 data-parallel ranks are not planned together yet",
    )


@pytest.mark.parametrize("policy", [BubbleAware, Uniform])
def test_a_loop_on_one_gpu_saves_within_its_permitted_slowdown(policy: type[ClockPolicy]) -> None:
    run = loop(policy(), max_slowdown_ratio=0.1)
    run.run(20)  # blocks between plans that are learned from do not count

    assert run.job.phase is JobPhase.TUNED
    saving = run.job.knowledge.saving()
    assert saving is not None
    assert saving.saving_ratio is not None
    assert saving.saving_ratio.low > 0.05


def test_a_pipeline_without_permitted_slowdown_is_planned() -> None:
    schedule = one_forward_one_backward(2, 4)
    work = {(rank, kind): A100Work(0.01, 0.04 * (1 + rank), 0.25) for rank in range(2) for kind in InstructionKind}
    run = VirtualTraining(schedule, work, BubbleAware())
    run.run(20)

    assert purposes(run) == {PlanPurpose.TUNED}
