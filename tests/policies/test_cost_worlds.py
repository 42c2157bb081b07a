"""The cost policy on several GPU models: under clocks, power limits or both, with noise, slow counters and drift."""

from dataclasses import replace

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.outcome import OutcomeKind, find_outcome
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd_policies.cost import Cost, Objective, objective_of
from gpuenergyd_policies.setting_search import MAX_PROBES
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.plain_jobs import MEMORY_SHARES, GpuLoopWork, loop_training, random_gpu_work

PERMITTED = 0.2
OVERHEAD_S = 0.005
WORLDS: dict[str, dict[str, object]] = {
    "kind": {},
    "noisy": {"noise_ratio": 0.01, "energy_noise_ratio": 0.03},
    "slow counters": {"counter_period_s": 1.0},
    "drift": {"slowdown_of": lambda _rank, iteration: 1 + 0.0002 * iteration},
}
_POLICIES: list[dict[str, str]] = [{"eta": "0"}, {"eta": "0.5"}, {"eta": "1"}, {"delay_exponent": "1"}]


def _train(work: GpuLoopWork, options: dict[str, str], levers: frozenset[Lever], world: str) -> VirtualTraining:
    run = loop_training(
        Cost(**options),
        work,
        max_slowdown_ratio=PERMITTED,
        seed=1,
        levers=levers,
        power_limit_range_w=(work.gpu.min_power_limit_w, work.gpu.default_power_limit_w),
    )
    for name, value in WORLDS[world].items():
        setattr(run, name, value)
    run.run(100)
    return run


def _at(work: GpuLoopWork, mhz: int, objective: Objective) -> tuple[float, float]:
    """Return slowdown and cost of an iteration at a clock."""
    time_s, top_s = work.time_s(mhz), work.time_s(work.gpu.supported_sm_clocks_mhz[0])
    return (time_s + OVERHEAD_S) / (top_s + OVERHEAD_S) - 1, objective.cost(
        time_s + OVERHEAD_S, time_s * work.power_w(mhz)
    )


def _clock_under(work: GpuLoopWork, plan: ClockPlan) -> int:
    """Return the clock at which a plan runs."""
    clocks_mhz = work.gpu.supported_sm_clocks_mhz
    if not plan.ranks:
        return clocks_mhz[0]
    own = plan.ranks[0]
    wanted = own.sm_clocks_mhz[0] or clocks_mhz[0]
    limit_w = own.power_limit_w
    return next((mhz for mhz in clocks_mhz if mhz <= wanted and (limit_w is None or work.power_w(mhz) <= limit_w)),
                clocks_mhz[-1])  # fmt: skip


_LEVERS = {"clocks": {Lever.CLOCKS}, "limits": {Lever.POWER_LIMITS}, "both": set(Lever)}
_CASES = [
    pytest.param(
        options,
        levers,
        world,
        id=f"{name} {next(iter(options.items()))} {world}",
        marks=[pytest.mark.thorough] if (number + k + own) % 4 else [],
    )
    for number, options in enumerate(_POLICIES)
    for k, world in enumerate(WORLDS)
    for own, (name, levers) in enumerate(_LEVERS.items())
    if (number + k + own) % 2 == 0
]


@pytest.mark.parametrize(("options", "levers", "world"), _CASES)
def test_the_least_cost_is_found_within_the_permitted_slowdown(
    options: dict[str, str], levers: set[Lever], world: str
) -> None:
    number = list(WORLDS).index(world)
    work = random_gpu_work(_POLICIES.index(options) + number, list(MEMORY_SHARES)[number % len(MEMORY_SHARES)])
    run = _train(work, options, frozenset(levers), world)

    objective = replace(objective_of(options), max_power_w=work.gpu.default_power_limit_w)
    plans = run.job.knowledge.plans.kept
    assert len({plan.plan_id for plan in plans if plan.purpose is PlanPurpose.TRIAL}) <= MAX_PROBES
    tuned = [plan for plan in plans if plan.purpose is PlanPurpose.TUNED]
    full = work.gpu.supported_sm_clocks_mhz[0]
    slowdown, cost = _at(work, _clock_under(work, tuned[-1]) if tuned else full, objective)
    assert run.job.phase is JobPhase.TUNED
    assert slowdown <= PERMITTED + 0.01
    lowest_w = work.gpu.min_power_limit_w if levers == {Lever.POWER_LIMITS} else 0.0
    found = [
        _at(work, mhz, objective)
        for mhz in work.gpu.supported_sm_clocks_mhz
        if mhz == full or work.power_w(mhz) >= lowest_w
    ]
    best = min(own for slower, own in found if slower <= PERMITTED)
    assert cost <= 1.03 * best


def test_without_any_lever_nothing_is_set_and_the_outcome_says_so() -> None:
    run = _train(random_gpu_work(0, "mixed"), {"eta": "0.5"}, frozenset(), "kind")

    assert not any(changes for _, _, _, by_rank in run.slices for changes in by_rank)
    assert not any(limits for _, limits in run.power_limits)
    assert find_outcome(run.job).kind is not OutcomeKind.SAVED
