"""The cost policy: settings chosen by Zeus's cost and by energy-delay products, under clocks, power limits or both."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.outcome import OutcomeKind, find_outcome
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, check_plan
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd.core.policy_api.testing import job_view
from gpuenergyd.daemon.processes.plugins import load_policy, policy_options
from gpuenergyd.errors import UnknownPolicyError, UsageError
from gpuenergyd_other_policies.cost import Cost, Objective, objective_of
from gpuenergyd_other_policies.uniform import Uniform
from gpuenergyd_policies.advice import ADVISED_EVERY_AT_FIRST
from gpuenergyd_policies.setting_curves import (
    FloatArray,
    LoopAtFullSpeed,
    MeasuredPoint,
    StandardErrors,
    possible_curves,
)
from gpuenergyd_policies.setting_measurements import ITERATIONS_PER_SETTING
from gpuenergyd_policies.setting_search import MAX_PROBES, MOST_LOST_ITERATIONS, SettingSearch, most_telling_setting
from gpuenergyd_policies.uniform_settings import Setting, common_power_limits_w, setting_of
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.examples import examples
from tests.support.plain_jobs import MEMORY_SHARES, GpuLoopWork, loop_training, random_gpu_work

LOOP = Schedule("loop", 1, ((Instruction(0, InstructionKind.F, 0),),))
CLOCKS_MHZ = tuple(range(1410, 195, -15))
LIMITS_W = (100.0, 400.0)
TOP_POWER_W, STATIC_W = 390.0, 60.0
CLOCKS = tuple(Setting(Lever.CLOCKS, mhz) for mhz in range(1400, 700, -25))
CURVES = possible_curves(CLOCKS, LoopAtFullSpeed(300.0, 400.0, 1.0, 1.0))
PERMITTED = 0.2
OVERHEAD_S = 0.005
WORLDS: dict[str, dict[str, object]] = {
    "kind": {},
    "noisy": {"noise_ratio": 0.01, "energy_noise_ratio": 0.03},
    "slow counters": {"counter_period_s": 1.0},
    "drift": {"slowdown_of": lambda _rank, iteration: 1 + 0.0002 * iteration},
}
_POLICIES: list[dict[str, str]] = [{"eta": "0"}, {"eta": "0.5"}, {"eta": "1"}, {"delay_exponent": "1"}]


def _at_clock(mhz: float, memory_ratio: float = 0.2) -> tuple[float, float]:
    """Return time and energy of an iteration at a clock: power grows with the cube above static power."""
    time_s = memory_ratio + (1 - memory_ratio) * 1410 / mhz
    return time_s, time_s * (STATIC_W + (TOP_POWER_W - STATIC_W) * (mhz / 1410) ** 3)


def _at_limit(watts: float) -> tuple[float, float]:
    """Return time and energy at the highest clock that fits a limit."""
    ratio = max(0.01, (min(watts, TOP_POWER_W) - STATIC_W) / (TOP_POWER_W - STATIC_W)) ** (1 / 3)
    return _at_clock(1410 * ratio)


class _Loop:
    """A plain loop under the formulas above."""

    def __init__(self, max_slowdown_ratio: float, levers: tuple[Lever, ...]) -> None:
        self.max_slowdown_ratio, self.levers = max_slowdown_ratio, levers
        self.plans: list[ClockPlan] = []
        self.observations: list[IterationObservation] = []

    def view(self) -> JobView:
        time_s, energy_j = _at_clock(1410)
        view = job_view(
            LOOP,
            supported_sm_clocks_mhz=CLOCKS_MHZ,
            max_slowdown_ratio=self.max_slowdown_ratio,
            baseline_time_s=time_s,
            baseline_energy_j=energy_j,
            observations=self.observations,
            issued_plans=self.plans,
        )
        return replace(
            view,
            gpus=(replace(view.gpus[0], power_limit_range_w=LIMITS_W),),
            can_set_clocks=Lever.CLOCKS in self.levers,
            can_set_power_limits=Lever.POWER_LIMITS in self.levers,
        )

    def run(self, policy: Cost | Uniform) -> ClockPlan:
        """Run until a plan is chosen."""
        for _ in range(60):
            plan = policy.next_plan(self.view())
            check_plan(plan, LOOP, [CLOCKS_MHZ], [LIMITS_W])
            if plan.purpose is not PlanPurpose.TRIAL:
                return plan
            if not self.plans or self.plans[-1].plan_id != plan.plan_id:
                self.plans.append(plan)
            self._observe(plan)
        pytest.fail("still profiling after 60 iterations")

    def _observe(self, plan: ClockPlan) -> None:
        limit_w = dict(plan.power_limits_w).get(0)
        clock = plan.ranks[0].sm_clocks_mhz[0]
        by_limit = _at_limit(limit_w or LIMITS_W[1])
        time_s, energy_j = max(by_limit, _at_clock(clock or 1410))
        self.observations.append(
            IterationObservation(
                len(self.observations), plan.plan_id, time_s, (), (RankEnergy(0, time_s, energy_j, ()),)
            )
        )


def _least_cost(objective: Objective, longest_s: float) -> float:
    found = [_at_clock(mhz) for mhz in CLOCKS_MHZ if mhz >= 560]
    return min(objective.cost(*one) for one in found if one[0] <= longest_s)


BOTH, CLOCKS_ONLY, LIMITS_ONLY = tuple(Lever), (Lever.CLOCKS,), (Lever.POWER_LIMITS,)


@pytest.mark.parametrize("levers", [BOTH, CLOCKS_ONLY, LIMITS_ONLY])
@pytest.mark.parametrize("options", [{}, {"eta": "0.25"}, {"eta": "1"}, {"delay_exponent": "1"}])
@pytest.mark.parametrize("max_slowdown_ratio", [0.05, 1.0])
def test_cost_finds_nearly_the_least_cost_with_few_probes(
    levers: tuple[Lever, ...], options: dict[str, str], max_slowdown_ratio: float
) -> None:
    loop = _Loop(max_slowdown_ratio, levers)

    plan = loop.run(Cost(**options))

    objective = replace(objective_of(options), max_power_w=LIMITS_W[1])
    loop._observe(plan) if plan.ranks else None
    chosen = loop.observations[-1]
    time_s, energy_j = (chosen.iteration_time_s, chosen.energy_j) if plan.ranks else _at_clock(1410)
    assert energy_j is not None
    assert objective.cost(time_s, energy_j) <= 1.025 * _least_cost(objective, 1 + max_slowdown_ratio)
    assert time_s <= (1 + max_slowdown_ratio) * 1.002
    assert len(loop.plans) <= MAX_PROBES


def test_cost_keeps_its_choice_once_it_is_tuned() -> None:
    loop = _Loop(1.0, BOTH)
    plan = loop.run(Cost())
    loop.plans.append(plan)

    assert Cost().next_plan(loop.view()).plan_id == plan.plan_id
    assert "least cost" in plan.reason
    assert "0.5 * energy + 0.5 * 400 W * time" in plan.reason


def test_cost_leaves_a_setting_that_turns_out_too_slow() -> None:
    loop = _Loop(0.05, CLOCKS_ONLY)
    plan = loop.run(Cost(eta="1"))
    loop.plans.append(plan)

    while len(loop.observations) <= 10 * ADVISED_EVERY_AT_FIRST:
        time_s = 1.1 * _at_clock(1410)[0]
        energy = RankEnergy(0, time_s, 0.9 * time_s * TOP_POWER_W, ())
        loop.observations.append(IterationObservation(len(loop.observations), plan.plan_id, time_s, (), (energy,)))

    then = loop.run(Cost(eta="1"))
    assert setting_of(then) != setting_of(plan)


def test_nothing_slower_than_permitted_is_run_without_a_permitted_slowdown() -> None:
    for policy in (Cost(), Uniform(trials="false")):
        loop = _Loop(0.0, BOTH)
        assert loop.run(policy).ranks == ()
        assert loop.plans == []


def test_uniform_meets_the_target_with_power_limits_alone() -> None:
    loop = _Loop(0.1, LIMITS_ONLY)

    plan = loop.run(Uniform())

    assert plan.purpose is PlanPurpose.TUNED
    assert not plan.sets_clocks
    limit_w = dict(plan.power_limits_w).get(0)
    assert limit_w is not None
    assert 1.05 < _at_limit(limit_w)[0] <= 1.1
    assert "a limit of" in plan.reason


def test_both_levers_plans_do_not_leave_a_lock_behind() -> None:
    loop = _Loop(1.0, BOTH)
    loop.run(Cost())

    limited = [plan for plan in loop.plans if plan.power_limits_w]
    assert limited
    assert all(rank.sm_clocks_mhz == (1410,) and rank.changes for plan in limited for rank in plan.ranks)


def test_limits_begin_near_the_power_at_full_speed() -> None:
    view = _Loop(0.1, LIMITS_ONLY).view()
    baseline = replace(view.baseline, energy_j=200.0 * view.baseline.iteration_time_s)

    limits_w = common_power_limits_w(replace(view, baseline=baseline))

    assert limits_w[:2] == [400, 220]
    assert limits_w[-1] == 100


@given(
    exponent=st.floats(1.5, 3.5),
    memory_ratio=st.floats(0.0, 0.7),
    static_ratio=st.floats(0.05, 0.5),
    eta=st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]),
)
@settings(max_examples=examples(25), deadline=None)
def test_search_is_nearly_exact_on_smooth_curves(
    exponent: float, memory_ratio: float, static_ratio: float, eta: float
) -> None:
    def at(mhz: int) -> tuple[float, float]:
        time_s = memory_ratio + (1 - memory_ratio) * 1410 / mhz
        return time_s, time_s * 400 * (static_ratio + (1 - static_ratio) * (mhz / 1410) ** exponent)

    levels = [mhz for mhz in CLOCKS_MHZ if mhz >= 560]
    objective = Objective(eta, max_power_w=400.0)
    search, probes = _searched(objective, levels, at)

    best = search.best()
    cost = objective.cost(*at(best.value if best else 1410))
    least = min(objective.cost(*at(mhz)) for mhz in levels)
    assert len(probes) <= MAX_PROBES
    assert cost <= least * 1.01


def _clocks(probes: Iterable[int]) -> tuple[Setting, ...]:
    return tuple(Setting(Lever.CLOCKS, mhz) for mhz in probes)


def _search(
    objective: Objective,
    levels: Iterable[int],
    full_speed: tuple[float, float],
    probes: Mapping[int, tuple[float, float]],
    *,
    longest_ratio: float = math.inf,
    errors: tuple[float, float] = (0.003, 0.01),
) -> SettingSearch:
    """Return the search after clocks were measured, by their times and energies."""
    time_s, energy_j = full_speed
    points = {
        Setting(Lever.CLOCKS, mhz): MeasuredPoint(own_s / time_s, own_j / energy_j, StandardErrors(*errors))
        for mhz, (own_s, own_j) in probes.items()
    }
    curves = possible_curves(_clocks(levels), LoopAtFullSpeed(energy_j / time_s, None, 1.0, 1.0))

    def cost(times: FloatArray, energies: FloatArray) -> FloatArray:
        return objective.costs(times * time_s, energies * energy_j)

    permitted = [setting for setting, own in points.items() if own.time_ratio <= longest_ratio]
    return SettingSearch(curves.given(points, full_speed=StandardErrors(*errors)), cost, permitted, longest_ratio)


def _searched(
    objective: Objective,
    levels: list[int],
    at: Callable[[int], tuple[float, float]],
    *,
    longest_ratio: float = math.inf,
) -> tuple[SettingSearch, dict[int, tuple[float, float]]]:
    """Return the search when measuring is complete, and the time and energy of each clock that it measured."""
    probes: dict[int, tuple[float, float]] = {}
    while True:
        search = _search(objective, levels, at(levels[0]), probes, longest_ratio=longest_ratio)
        setting = search.next_setting(_clocks(probes))
        if setting is None:
            return search, probes
        probes[setting.value] = at(setting.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"eta": "2"}, "eta = 2"),
        ({"eta": "x"}, "eta = x"),
        ({"other": "1"}, "'other'"),
        ({"delay_exponent": "-1"}, "-1"),
    ],
)
def test_a_wrong_option_is_named_with_the_valid_ones(options: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        objective_of(options)
    with pytest.raises(UsageError, match="not both"):
        objective_of({"eta": "1", "delay_exponent": "1"})


def test_options_follow_the_name_of_a_policy() -> None:
    assert policy_options("cost:eta=0.7") == ("cost", {"eta": "0.7"})
    assert policy_options("cost") == ("cost", {})
    with pytest.raises(UnknownPolicyError, match="must be NAME=VALUE"):
        policy_options("cost:eta")
    with pytest.raises(UsageError, match="policy uniform has no option 'eta'; valid is trials"):
        load_policy("uniform:eta=1")
    with pytest.raises(UnknownPolicyError, match="does not take these options: eta"):
        load_policy("full-speed:eta=1")
    assert isinstance(load_policy("cost:delay_exponent=2"), Cost)


def test_the_cost_of_zeus() -> None:
    objective = Objective(0.25, max_power_w=300.0)

    assert objective.cost(2.0, 100.0) == 0.25 * 100 + 0.75 * 300 * 2
    assert Objective(delay_exponent=2.0).cost(2.0, 100.0) == 400.0


def test_a_plan_in_force_is_kept_for_small_differences_of_cost() -> None:
    near, nearer = _clocks([1200, 1185])

    def best(energy_j: float, current: Setting) -> Setting | None:
        probes = {1200: (1.1, 80.02), 1185: (1.11, energy_j)}
        search = _search(Objective(1.0), [1410, 1200, 1185], (1.0, 100.0), probes, errors=(0.00001, 0.0001))
        return search.best(current=current)

    assert best(80.0, near) == near
    assert best(80.0, nearer) == nearer
    assert best(76.0, near) == nearer


@given(st.floats(0.0, 0.6), st.floats(0.02, 0.3))
@settings(max_examples=examples(40), deadline=None)
def test_no_setting_is_measured_that_must_be_far_too_slow(memory_ratio: float, permitted: float) -> None:
    levels = [mhz for mhz in CLOCKS_MHZ if mhz >= 570]

    _, probes = _searched(Objective(1.0), levels, lambda mhz: _at_clock(mhz, memory_ratio), longest_ratio=1 + permitted)

    slowest = max(time_s for time_s, _ in probes.values()) / _at_clock(1410, memory_ratio)[0]
    assert slowest <= 1 + 4 * permitted


def _small_gain(times: FloatArray, energies: FloatArray) -> FloatArray:
    """Return a cost of which no setting is expected to save a thousandth."""
    return np.asarray(1 + 0.001 * energies + 0.001 * times)


def test_assumed_curves_alone_do_not_complete_measuring() -> None:
    search = SettingSearch(CURVES, _small_gain, longest_ratio=1.05)

    first = search.next_setting(())

    assert first is not None
    assert search.next_setting({first}) is None


def test_nothing_is_measured_that_cannot_cost_less() -> None:
    assert SettingSearch(CURVES, lambda times, _: times).next_setting(()) is None


def test_a_setting_is_measured_for_advice_if_it_loses_little_of_the_time_that_is_left() -> None:
    view = job_view(LOOP, supported_sm_clocks_mhz=[own.value for own in CLOCKS])

    setting = most_telling_setting(view, CURVES, ())

    assert setting is not None
    expected_slowdown = CURVES.times[:, CLOCKS.index(setting)].mean() - 1
    assert 0 < 2 * ITERATIONS_PER_SETTING * expected_slowdown <= MOST_LOST_ITERATIONS / 2
    assert most_telling_setting(view, CURVES, CLOCKS[:MAX_PROBES]) is None


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
