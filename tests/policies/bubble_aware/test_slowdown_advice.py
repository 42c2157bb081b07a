"""Advice to loops whose phases are planned: alone, and as ranks of a data-parallel training."""

import pytest

from gpuenergyd.core.job.messages import TrialPermissionChanged
from gpuenergyd.core.job.outcome import find_outcome, outcome_line
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from tests.policies.test_advice import saving_of
from tests.support.thorough import thorough
from tests.support.virtual_loop import DataParallelLoops, VirtualLoop, loop_schedule


def _loop(seed: int, max_slowdown_ratio: float, num_dp_ranks: int = 1) -> VirtualLoop:
    return VirtualLoop(
        schedule=loop_schedule(2),
        max_slowdown_ratio=max_slowdown_ratio,
        noise_ratio=0.003,
        energy_noise_ratio=0.005,
        num_dp_ranks=num_dp_ranks,
        seed=seed,
    )


@pytest.mark.thorough
def test_a_loop_with_waits_is_advised_by_its_own_phases() -> None:
    advised, permitted = _loop(1, 0.0), _loop(101, 0.02)
    advised.run(70)
    permitted.run(110)

    (advice,) = [own for own in advised.job.advice if own.max_slowdown_ratio == 0.02]
    assert advice.is_measured
    assert not advice.is_range
    assert advice.low_ratio < advice.saving_ratio < advice.high_ratio
    assert abs(advice.saving_ratio - saving_of(permitted)) <= 0.02
    assert "at 2 % slower this job would use " in find_outcome(advised.job).advice
    assert f"; {find_outcome(advised.job).advice}; cost so far: " in outcome_line(advised.job)


@pytest.mark.parametrize(
    ("options", "max_slowdown_ratio", "num_measured"), [({}, 0.0, 1), ({"trials": "false"}, 0.0, 0), ({}, 0.05, 0)]
)
def test_a_loop_with_waits_measures_a_slower_plan_once(
    options: dict[str, str], max_slowdown_ratio: float, num_measured: int
) -> None:
    loop = _loop(1, max_slowdown_ratio)
    loop.policy = BubbleAware(**options)

    loop.run(36)

    kept = loop.job.knowledge.plans.kept
    assert len({plan.plan_id for plan in kept if plan.purpose is PlanPurpose.TRIAL}) == num_measured
    assert loop.job.current_plan.purpose is PlanPurpose.TUNED
    measuring = [o for o in loop.job.observations if o.plan_id is not None and "advice" in o.plan_id]
    assert len(measuring) <= 4


def test_a_loop_that_may_not_be_profiled_keeps_its_plans() -> None:
    loop = _loop(1, 0.02)
    loop.job.handle(TrialPermissionChanged("the job is too short"))

    loop.run(36)

    assert {plan.purpose for plan in loop.job.knowledge.plans.kept} == {PlanPurpose.TUNED}
    assert loop.job.faults.num_fallbacks == 0
    assert loop.job.current_plan.purpose is PlanPurpose.TUNED


@pytest.mark.parametrize("max_slowdown_ratio", thorough(0.0, 0.02))
def test_ranks_of_a_data_parallel_loop_are_advised_each(max_slowdown_ratio: float) -> None:
    ranks = tuple(_loop(seed, max_slowdown_ratio, num_dp_ranks=2) for seed in range(2))
    DataParallelLoops(ranks).run(70)

    for rank in ranks:
        assert [own.max_slowdown_ratio for own in rank.job.advice][-1] == 0.05
        assert "at 5 % slower this job would use " in outcome_line(rank.job)
