"""Jobs whose GPUs run at their power limits: full speed is the clock that they sustain, and plans begin below it.

Simulated as an H200: iterations scatter by 1.2 %, clocks at the limit are read with a scatter of 5 %.
"""

from dataclasses import replace

import pytest

from gpuenergyd.core.job.issued_plans import PROOF_PLAN_ID
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.outcome import OutcomeKind, find_outcome
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import ClockPolicy, Lever
from gpuenergyd_other_policies.cost import Cost
from gpuenergyd_other_policies.uniform import Uniform
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.plain_jobs import AT_LIMIT, GpuLoopWork, loop_training, random_gpu_work, random_loop_work

WITHIN_RATIO = 0.02
SCATTER_RATIO = 0.012
TRAINED = 100
SEEDS = [100, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(101, 108))]
POLICIES = [BubbleAware, pytest.param(Uniform, marks=pytest.mark.thorough)]
LIMIT_RANGE_W = (100.0, 400.0)


def limited_loop(seed: int) -> GpuLoopWork:
    return random_gpu_work(seed, AT_LIMIT, gpu_model="h200")


def trained(policy: ClockPolicy, work: GpuLoopWork, *, max_slowdown_ratio: float, seed: int) -> VirtualTraining:
    run = loop_training(policy, work, max_slowdown_ratio=max_slowdown_ratio, seed=seed, scatter_ratio=SCATTER_RATIO)
    run.run(TRAINED)
    return run


def top_mhz(work: GpuLoopWork) -> int:
    return int(work.gpu.max_sm_clock_mhz)


def saving_ratio(work: GpuLoopWork, sm_clock_mhz: int) -> float:
    """Return the true saving of a locked clock."""
    at_lock_j, full_j = (work.power_w(mhz) * work.time_s(mhz) for mhz in (sm_clock_mhz, top_mhz(work)))
    return 1 - at_lock_j / full_j


def best_saving_ratio(work: GpuLoopWork, max_slowdown_ratio: float) -> float:
    """Return the largest true saving within a slowdown."""
    longest_s = (1 + max_slowdown_ratio + 1e-9) * work.time_s(top_mhz(work))
    return max(saving_ratio(work, mhz) for mhz in work.gpu.supported_sm_clocks_mhz if work.time_s(mhz) <= longest_s)


def predicted_ratio(plan: ClockPlan) -> float:
    """Return the saving that a plan is made for, whether it is certain or not."""
    assert plan.predicted is not None
    assert plan.predicted.baseline_energy_j is not None
    return 1 - plan.predicted.energy_j / plan.predicted.baseline_energy_j


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("max_slowdown_ratio", [0.0, 0.02])
def test_the_predicted_saving_is_within_two_points_of_the_truth(seed: int, max_slowdown_ratio: float) -> None:
    work = limited_loop(seed)
    run = loop_training(
        FullSpeed(), work, max_slowdown_ratio=max_slowdown_ratio, seed=seed, scatter_ratio=SCATTER_RATIO
    )
    run.run(20)
    view = run.job.view()
    assert view is not None

    plan = BubbleAware().next_plan(replace(view, can_set_clocks=False, issued_plans=()))

    assert abs(predicted_ratio(plan) - best_saving_ratio(work, max_slowdown_ratio)) < WITHIN_RATIO
    assert "at its power limit" in find_outcome(run.job).reason
    assert max_slowdown_ratio == 0.0 or "; sustains 1," in plan.reason


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_for_a_permitted_slowdown_lowers_the_sustained_clock(seed: int, policy: type[ClockPolicy]) -> None:
    work = limited_loop(seed)
    sustained_mhz = work.actual_clock_mhz(top_mhz(work))

    run = trained(policy(), work, max_slowdown_ratio=0.02, seed=seed)

    used_mhz = {change.sm_clock_mhz for _, _, _, by_rank in run.slices for own in by_rank for change in own}
    (clock_mhz,) = {mhz for rank in run.job.current_plan.ranks for mhz in rank.sm_clocks_mhz}
    assert clock_mhz is not None
    assert not any(1.02 * sustained_mhz < mhz < top_mhz(work) for mhz in used_mhz)
    assert clock_mhz < sustained_mhz or clock_mhz == top_mhz(work)
    if policy is BubbleAware:
        assert abs(predicted_ratio(run.job.current_plan) - saving_ratio(work, clock_mhz)) < WITHIN_RATIO


@pytest.mark.parametrize("seed", SEEDS)
def test_advice_at_full_speed_is_what_a_permitted_slowdown_saves(seed: int) -> None:
    work = limited_loop(seed)

    run = trained(Uniform(), work, max_slowdown_ratio=0.0, seed=seed)

    (advice,) = [own for own in run.job.advice if own.max_slowdown_ratio == 0.02]
    assert advice.is_range or abs(advice.saving_ratio - best_saving_ratio(work, 0.02)) < WITHIN_RATIO


@pytest.mark.parametrize("levers", [tuple(Lever), (Lever.POWER_LIMITS,)])
@pytest.mark.parametrize("policy", [Cost(eta="1"), Uniform()])
def test_a_loop_saves_within_its_permitted_slowdown(policy: ClockPolicy, levers: tuple[Lever, ...]) -> None:
    run = loop_training(
        policy,
        random_loop_work(3),
        max_slowdown_ratio=0.1,
        seed=1,
        levers=frozenset(levers),
        power_limit_range_w=LIMIT_RANGE_W,
    )

    run.run(110)

    assert run.job.phase is JobPhase.TUNED
    assert find_outcome(run.job).kind is OutcomeKind.SAVED
    estimate = run.job.estimate()
    assert estimate is not None
    assert estimate.saving is not None
    assert estimate.saving.saving_ratio is not None
    assert estimate.saving.saving_ratio.estimate > 0.03
    assert estimate.saving.slowdown_ratio.estimate < 0.105
    assert any(plan_id == PROOF_PLAN_ID for _, _, plan_id in run.history)
    if levers == (Lever.POWER_LIMITS,):
        assert not any(changes for _, _, _, by_rank in run.slices for changes in by_rank)
        assert run.job.current_plan.power_limits_w


def test_settling_iterations_do_not_count() -> None:
    run = loop_training(
        Cost(),
        random_loop_work(3),
        max_slowdown_ratio=0.1,
        seed=1,
        levers=frozenset({Lever.POWER_LIMITS}),
        power_limit_range_w=LIMIT_RANGE_W,
    )

    run.run(60)

    changed_at = [at for (at, limits), (_, before) in zip(run.power_limits[1:], run.power_limits, strict=False)
                  if limits != before]  # fmt: skip
    regular = {o.iteration_index for o in run.job.observations if o.is_regular}
    assert changed_at
    assert not regular & {at + k for at in changed_at for k in (0, 1)}
