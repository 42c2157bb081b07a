"""The uniform policy: clocks measured and chosen, and the offline planners of simple policies."""

from dataclasses import replace

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, check_plan
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd.core.policy_api.policy import BaselineView, JobView, OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.testing import job_view
from gpuenergyd.errors import TargetError
from gpuenergyd_other_policies import uniform
from gpuenergyd_other_policies.uniform import Uniform
from gpuenergyd_policies import full_speed
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_policies.setting_search import MAX_PROBES
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.plain_jobs import loop_training, random_gpu_work

F, B = InstructionKind.F, InstructionKind.B
CLOCKS_MHZ = tuple(range(1400, 400, -50))
THROTTLED_ABOVE_MHZ = 1200
SCHEDULE = one_forward_one_backward(2, 4)


def _iteration_time_s(sm_clock_mhz: int) -> float:
    """Constant above the throttling clock; inversely proportional to the clock below it."""
    return max(1.0, THROTTLED_ABOVE_MHZ / sm_clock_mhz)


def _energy_j(sm_clock_mhz: int) -> float:
    return 1000.0 * (0.4 + 0.6 * (sm_clock_mhz / 1400) ** 2)


class _Job:
    """A job whose iterations follow the formulas above."""

    def __init__(
        self, *, max_slowdown_ratio: float = 0.0, measures_energy: bool = True, measures_baseline_energy: bool = True
    ) -> None:
        self._measures_energy = measures_energy
        self._measures_baseline_energy = measures_energy and measures_baseline_energy
        self._target = PerformanceTarget(max_slowdown_ratio=max_slowdown_ratio)
        self.observations: list[IterationObservation] = []
        self.plans: list[ClockPlan] = []

    def view(self) -> JobView:
        return job_view(
            SCHEDULE,
            supported_sm_clocks_mhz=CLOCKS_MHZ,
            max_slowdown_ratio=self._target.max_slowdown_ratio,
            baseline_energy_j=_energy_j(1400) if self._measures_baseline_energy else None,
            observations=self.observations,
            issued_plans=self.plans,
        )

    def run(self, plan: ClockPlan, *, is_regular: bool = True, delay_s: float = 0.0) -> None:
        if not self.plans or self.plans[-1].plan_id != plan.plan_id:
            self.plans.append(plan)
        clock = plan.ranks[0].sm_clocks_mhz[0]
        assert clock is not None
        energy_j = _energy_j(clock) / 2 if self._measures_energy else None
        self.observations.append(
            IterationObservation(
                iteration_index=len(self.observations),
                plan_id=plan.plan_id,
                iteration_time_s=_iteration_time_s(clock) + delay_s,
                instruction_samples=(),
                ranks=tuple(RankEnergy(r, 1.0, energy_j, ()) for r in range(2)),
                is_regular=is_regular,
            )
        )


def _run_until_tuned(job: _Job) -> ClockPlan:
    for _ in range(50):
        plan = Uniform().next_plan(job.view())
        if plan.purpose is not PlanPurpose.TRIAL:
            return plan
        check_plan(plan, SCHEDULE, [CLOCKS_MHZ, CLOCKS_MHZ])
        job.run(plan)
    pytest.fail("still profiling after 50 iterations")


def test_uniform_runs_the_throttling_clock_without_a_slowdown_budget() -> None:
    plan = _run_until_tuned(_Job())

    assert plan.purpose is PlanPurpose.TUNED
    assert {mhz for rank in plan.ranks for mhz in rank.sm_clocks_mhz} == {1200}


def test_uniform_measures_two_undisturbed_iterations_per_clock() -> None:
    job = _Job()
    first = Uniform().next_plan(job.view())
    job.run(first, is_regular=False)
    job.run(first)

    assert Uniform().next_plan(job.view()).plan_id == first.plan_id
    job.run(first)
    assert Uniform().next_plan(job.view()).plan_id != first.plan_id


def test_uniform_measures_few_clocks_and_stops_at_the_first_too_slow_one() -> None:
    job = _Job()

    _run_until_tuned(job)

    measured = [plan.ranks[0].sm_clocks_mhz[0] for plan in job.plans]
    assert len(measured) == len({*measured} - {CLOCKS_MHZ[0]}) <= MAX_PROBES
    assert sum(_iteration_time_s(mhz) > 1.0 for mhz in measured if mhz is not None) == 1


@pytest.mark.parametrize("delays_s", [(0.0, 0.0), (3.0, 0.0, 2.0)])
def test_uniform_uses_its_slowdown_budget_whether_iterations_are_disturbed_or_not(delays_s: tuple[float, ...]) -> None:
    job = _Job(max_slowdown_ratio=0.25)
    while (plan := Uniform().next_plan(job.view())).purpose is PlanPurpose.TRIAL:
        for delay_s in delays_s:
            job.run(plan, delay_s=delay_s)

    assert plan.purpose is PlanPurpose.TUNED
    (clock,) = {mhz for rank in plan.ranks for mhz in rank.sm_clocks_mhz}
    assert clock is not None
    assert 1.0 < _iteration_time_s(clock) <= 1.25
    assert clock <= 1050


@pytest.mark.parametrize(("number", "permitted_ratio"), [(5, 0.01), (5103, 0.02)])
def test_uniform_ends_close_to_the_permitted_slowdown(number: int, permitted_ratio: float) -> None:
    work = random_gpu_work(number, "memory-bound")
    (run := loop_training(Uniform(), work, max_slowdown_ratio=permitted_ratio, seed=100 + number)).run(130)

    (clock_mhz,) = {mhz for rank in run.job.current_plan.ranks for mhz in rank.sm_clocks_mhz}
    assert clock_mhz is not None
    slowdown_ratio = work.time_s(clock_mhz) / work.time_s(int(work.gpu.max_sm_clock_mhz)) - 1
    assert 0.8 * permitted_ratio < slowdown_ratio < permitted_ratio + 0.001


def test_uniform_keeps_full_speed_without_energy_measurements() -> None:
    plan = _run_until_tuned(_Job(measures_energy=False))

    assert plan.ranks == ()
    assert "no energy measurement" in plan.reason


def test_uniform_measures_full_speed_where_the_baseline_has_no_energy() -> None:
    job = _Job(max_slowdown_ratio=0.25, measures_baseline_energy=False)

    plan = _run_until_tuned(job)

    measured = {mhz for own in job.plans for rank in own.ranks for mhz in rank.sm_clocks_mhz}
    assert CLOCKS_MHZ[0] in measured
    assert plan.purpose is PlanPurpose.TUNED
    assert plan.ranks == _run_until_tuned(_Job(max_slowdown_ratio=0.25)).ranks


def test_full_speed_never_changes_a_clock() -> None:
    assert FullSpeed().next_plan(_Job(max_slowdown_ratio=0.5).view()).ranks == ()


def _request(target: PerformanceTarget) -> OfflineRequest:
    options = instruction_profile(
        [ClockOption(1400, 1.0, 200.0), ClockOption(1200, 1.0, 150.0), ClockOption(700, 1.5, 120.0)], where="all"
    )
    graph = dependency_graph(SCHEDULE)
    profile = PipelineProfile({InstructionClass(r, k): options for r in range(2) for k in (F, B)}, 50.0)
    return OfflineRequest("test", profile, SCHEDULE, graph, target)


def test_offline_full_speed_is_the_baseline() -> None:
    plan = full_speed.plan_offline(_request(PerformanceTarget()))

    assert set(plan.sm_clocks_mhz.values()) == {1400}
    assert plan.iteration_time_s == plan.baseline_time_s == 10.0
    assert plan.energy_j == plan.baseline_energy_j == 16 * 200.0 + 50.0 * (2 * 10.0 - 16 * 1.0)
    assert plan.lower_bound_j is None


@pytest.mark.parametrize(("max_slowdown_ratio", "sm_clock_mhz"), [(0.0, 1200), (0.49, 1200), (0.5, 700)])
def test_offline_uniform_chooses_the_clock_of_least_energy_that_meets_the_target(
    max_slowdown_ratio: float, sm_clock_mhz: int
) -> None:
    plan = uniform.plan_offline(_request(PerformanceTarget(max_slowdown_ratio)))

    assert set(plan.sm_clocks_mhz.values()) == {sm_clock_mhz}
    assert plan.iteration_time_s <= plan.baseline_time_s * (1 + max_slowdown_ratio)


def test_a_target_below_the_fastest_time_is_refused_with_that_time() -> None:
    request = _request(PerformanceTarget(permitted_time_s=9.0))

    with pytest.raises(TargetError, match="needs at least 10 s"):
        uniform.plan_offline(request)
    with pytest.raises(TargetError, match="takes 10 s"):
        full_speed.plan_offline(request)


def test_uniform_goes_down_to_the_lowest_useful_clock_with_a_large_budget() -> None:
    plan = _run_until_tuned(job := _Job(max_slowdown_ratio=9.0))

    measured = [issued.ranks[0].sm_clocks_mhz[0] for issued in job.plans]
    assert len(measured) <= 5
    lowest_mhz = min(mhz for mhz in CLOCKS_MHZ if mhz >= 0.4 * CLOCKS_MHZ[0])
    assert plan.ranks[0].sm_clocks_mhz[0] == min(mhz for mhz in measured if mhz is not None) == lowest_mhz


def test_uniform_sets_no_clock_that_needs_more_energy_than_the_baseline() -> None:
    job = _Job()
    _run_until_tuned(job)

    plan = Uniform().next_plan(replace(job.view(), baseline=BaselineView(1.0, 1.0, 10)))

    assert plan.ranks == ()
    assert "no uniform clock meets the target of 1 s" in plan.reason


def test_uniform_runs_a_fast_clock_although_the_first_one_measured_slow() -> None:
    job = _Job()
    _run_until_tuned(job)
    highest = job.plans[0].plan_id
    seen = [replace(o, iteration_time_s=1.5) if o.plan_id == highest else o for o in job.observations]
    job.observations = [o for o in seen if o.plan_id == highest or o.iteration_time_s <= 1.0]

    plan = _run_until_tuned(job)

    assert plan.purpose is PlanPurpose.TUNED
    assert {mhz for rank in plan.ranks for mhz in rank.sm_clocks_mhz} == {1200}


def test_uniform_keeps_full_speed_without_a_common_clock() -> None:
    view = _Job().view()
    other = replace(view.gpus[1], supported_sm_clocks_mhz=(1395, 1345))

    plan = Uniform().next_plan(replace(view, gpus=(view.gpus[0], other)))

    assert plan.ranks == ()
    assert "no clock in common" in plan.reason


def test_a_batch_that_grows_while_clocks_are_measured_makes_no_plan_too_slow() -> None:
    """A clock measured with four microbatches takes less time than full speed with sixteen, which says nothing."""
    run = VirtualTraining(
        one_forward_one_backward(4, 4), a100_stages((1.0, 0.85, 0.9, 1.2)), Uniform(), max_slowdown_ratio=0.02, seed=1
    )
    run.run(20)
    assert run.job.phase is JobPhase.TRIAL
    run.change_schedule(one_forward_one_backward(4, 16))

    run.run(60)

    baseline, plan = run.job.baseline, run.job.current_plan
    assert baseline is not None
    times_s = [seen.iteration_time_s for seen in run.job.knowledge.iterations.kept if seen.plan_id == plan.plan_id]
    assert (run.job.phase, plan.purpose) == (JobPhase.TUNED, PlanPurpose.TUNED)
    assert max(times_s) <= 1.02 * baseline.iteration_time_s
