"""Validation of plans against pipeline and GPUs, and the iteration times that targets permit."""

import math
from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import (
    ClockChange,
    ClockPlan,
    PlanPurpose,
    RankClocks,
    baseline_plan,
    check_plan,
    constant_clock_changes,
    full_speed_plan,
    instruction_key,
)
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import PlanError, TargetError

SCHEDULE = one_forward_one_backward(2, 2)
CLOCKS = ((900, 1200, 1410), (900, 1200))
FIRST = SCHEDULE.orders[0][0]


def plan(rank: RankClocks, purpose: PlanPurpose = PlanPurpose.TUNED) -> ClockPlan:
    return ClockPlan("p", purpose, (rank,))


GOOD = RankClocks(0, (900, None, 1200, 1410), (ClockChange(FIRST, 0.0, 900),))


def test_a_valid_plan_is_accepted() -> None:
    check_plan(plan(GOOD), SCHEDULE, CLOCKS)
    check_plan(plan(replace(GOOD, changes=(ClockChange(FIRST, 3599.9, 900),))), SCHEDULE, CLOCKS)
    check_plan(baseline_plan(), SCHEDULE, CLOCKS)


@pytest.mark.parametrize(
    ("rank", "line"),
    [
        (replace(GOOD, pp_rank=2), "no rank 2; the pipeline has 2"),
        (replace(GOOD, pp_rank=-1), "no rank -1"),
        (replace(GOOD, sm_clocks_mhz=(900,) * 3), "3 clocks for rank 0, which has 4 instructions"),
        (replace(GOOD, sm_clocks_mhz=(901,) * 4), r"cannot run at \[901\] MHz; supported: 900 to 1410 MHz"),
        (replace(GOOD, changes=(ClockChange(FIRST, 0.0, 1000),)), r"cannot run at \[1000\] MHz"),
        (RankClocks(1, (1410,) * 4), r"rank 1 cannot run at \[1410\] MHz; supported: 900 to 1200"),
        (replace(GOOD, changes=(ClockChange(Instruction(0, InstructionKind.F, 7), 0.0, 900),)), "does not run"),
        (replace(GOOD, changes=(ClockChange(FIRST, -0.1, 900),)), "offset -0.1 s must be in"),
        (replace(GOOD, changes=(ClockChange(FIRST, 3600.0, 900),)), "offset 3600.0 s must be in"),
        (replace(GOOD, changes=(ClockChange(FIRST, 3601.0, 900),)), "offset 3601.0 s must be in"),
        (replace(GOOD, changes=(ClockChange(FIRST, math.nan, 900),)), "offset nan s"),
    ],
)
def test_a_plan_that_does_not_fit_pipeline_and_gpus_is_rejected(rank: RankClocks, line: str) -> None:
    with pytest.raises(PlanError, match=line):
        check_plan(plan(rank), SCHEDULE, CLOCKS)


def test_a_predicted_plan_cannot_be_applied() -> None:
    with pytest.raises(PlanError, match="PREDICTED"):
        check_plan(plan(GOOD, PlanPurpose.PREDICTED), SCHEDULE, CLOCKS)


def test_the_full_speed_plan_locks_each_gpu_at_its_maximum_clock() -> None:
    made = full_speed_plan("top", SCHEDULE, CLOCKS, reason="r")

    assert [rank.sm_clocks_mhz for rank in made.ranks] == [(1410,) * 4, (1200,) * 4]
    assert made.changes_of(0) == (ClockChange(FIRST, 0.0, 1410),)
    assert made.changes_of(1) == constant_clock_changes(SCHEDULE.orders[1], 1200)
    assert made.purpose is PlanPurpose.BASELINE
    check_plan(made, SCHEDULE, CLOCKS)


def test_a_rank_without_clocks_has_no_changes() -> None:
    assert plan(GOOD).changes_of(1) == ()
    assert baseline_plan().changes_of(0) == ()


def test_a_figure_is_found_by_name() -> None:
    made = ClockPlan("p", PlanPurpose.TUNED, figures=(("a", 1.0), ("b", 2.0)))

    assert (made.figure("a"), made.figure("b"), made.figure("c")) == (1.0, 2.0, None)


@pytest.mark.parametrize(
    ("target", "target_s"),
    [
        (PerformanceTarget(), 2.0),
        (PerformanceTarget(0.05), 2.1),
        (PerformanceTarget(0.05, permitted_time_s=3.0), 3.0),
        (PerformanceTarget(0.05, straggler_time_s=1.9), 2.1),
        (PerformanceTarget(0.05, straggler_time_s=2.4), 2.52),
        (PerformanceTarget(straggler_time_s=2.5), 2.5),
        (PerformanceTarget(straggler_time_s=2.5, permitted_time_s=2.2), 2.5),
    ],
)
def test_the_target_time_is_the_permitted_slowdown_beyond_the_slowest_replica(
    target: PerformanceTarget, target_s: float
) -> None:
    assert target.iteration_time_s(2.0) == pytest.approx(target_s)
    assert target.is_forced is (target.straggler_time_s is not None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.01, 0.0])
def test_an_invalid_target_is_rejected(value: float) -> None:
    with pytest.raises(TargetError, match="straggler time"):
        PerformanceTarget(straggler_time_s=value)
    with pytest.raises(TargetError, match="target time"):
        PerformanceTarget(permitted_time_s=value)
    if value:
        with pytest.raises(TargetError, match="slowdown"):
            PerformanceTarget(value)


def test_the_key_of_an_instruction_is_kind_microbatch_and_chunk() -> None:
    F = InstructionKind.F  # noqa: N806  torch's own name

    assert instruction_key(Instruction(0, F, 3, 1)) == instruction_key(Instruction(5, F, 3, 1))
    assert len({instruction_key(i) for order in SCHEDULE.orders[:1] for i in order}) == len(SCHEDULE.orders[0])
