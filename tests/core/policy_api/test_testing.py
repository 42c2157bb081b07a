"""The simulated job for unit tests of policies agrees with the model of time and energy, and with real policies."""

from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.graph import InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, baseline_plan, full_speed_plan
from gpuenergyd.core.pipeline.schedules import interleaved
from gpuenergyd.core.pipeline.timeline import iteration_energy_j, timeline
from gpuenergyd.core.policy_api.testing import A100_SM_CLOCKS_MHZ, SimulatedJob, job_view, pipeline_profile
from gpuenergyd.errors import PlanError
from gpuenergyd_policies.bubble_aware import decisions
from gpuenergyd_policies.bubble_aware.outcome import PlanOutcome
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.full_speed import FullSpeed

SCHEDULE = one_forward_one_backward(4, 8)


def constant(clock_mhz: int | None, plan_id: str = "p") -> ClockPlan:
    ranks = tuple(RankClocks(r, (clock_mhz,) * len(order)) for r, order in enumerate(SCHEDULE.orders))
    return ClockPlan(plan_id, PlanPurpose.TUNED, ranks)


@pytest.mark.parametrize("clock_mhz", [1410, 900])
def test_time_and_energy_of_an_iteration_follow_the_profile(clock_mhz: int) -> None:
    job, graph = SimulatedJob(SCHEDULE), dependency_graph(SCHEDULE)
    job.run(constant(clock_mhz))

    options = [job.profile[i.instruction_class].at_clock(clock_mhz) for i in graph.instructions]
    durations_s = [option.time_s for option in options]
    time_s = timeline(graph, durations_s).iteration_time_s
    last = job.observations[-1]
    assert last.iteration_time_s == pytest.approx(time_s)
    assert last.energy_j == pytest.approx(
        iteration_energy_j(
            energies_j=[option.energy_j for option in options],
            durations_s=durations_s,
            iteration_time_s=time_s,
            num_ranks=4,
            blocking_power_w=80.0,
        )
    )
    assert sum(sample.count for sample in last.instruction_samples) == len(graph.instructions)
    for rank in last.ranks:
        assert sum(share.time_s for share in rank.time_at) == pytest.approx(rank.window_s)


def test_the_baseline_is_ten_iterations_at_full_speed() -> None:
    job = SimulatedJob(SCHEDULE)
    view = job.view()

    assert [o.plan_id for o in view.observations] == ["baseline"] * 10
    assert view.issued_plans == (baseline_plan(),)
    job.run(full_speed_plan("again", SCHEDULE, [A100_SM_CLOCKS_MHZ] * 4, reason=""))
    assert view.baseline.iteration_time_s == job.observations[-1].iteration_time_s
    assert view.baseline.energy_j == job.observations[-1].energy_j


@pytest.mark.thorough
def test_bubble_aware_learns_from_plans_and_saves_energy_on_it() -> None:
    job = SimulatedJob(SCHEDULE)

    plan = job.run_policy(BubbleAware(), 60)

    last = job.observations[-1]
    assert plan.purpose is PlanPurpose.TUNED
    assert last.iteration_time_s <= job.baseline.iteration_time_s * 1.001
    assert last.energy_j is not None
    assert job.baseline.energy_j is not None
    assert last.energy_j < 0.97 * job.baseline.energy_j


def test_a_looser_plan_that_saves_hardly_more_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    job, policy = SimulatedJob(one_forward_one_backward(2, 4), max_slowdown_ratio=0.9), BubbleAware()
    computed: list[object] = []
    plan = job.run_policy(policy, 40)
    adjust = decisions._with_adjusted_caution

    def counted(outcome: PlanOutcome) -> ClockPlan:
        computed.append(outcome)
        return adjust(outcome)

    decisions._not_worth_loosening.clear()
    monkeypatch.setattr(decisions, "_with_adjusted_caution", counted)

    assert job.run_policy(policy, 6).plan_id == plan.plan_id
    assert len(computed) == 1


def test_an_instruction_without_a_clock_keeps_the_one_before() -> None:
    job = SimulatedJob(SCHEDULE)
    plan = constant(None)
    first = tuple(replace(rank, sm_clocks_mhz=(900, *rank.sm_clocks_mhz[1:])) for rank in plan.ranks)
    job.run(replace(plan, ranks=first))
    job.run(constant(900, "q"))

    assert job.observations[-1].iteration_time_s == job.observations[-2].iteration_time_s
    job.run(constant(None, "r"))
    assert job.observations[-1].iteration_time_s == job.baseline.iteration_time_s


def test_a_plan_that_the_daemon_would_refuse_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot run at"):
        SimulatedJob(SCHEDULE).run(constant(1000))


def test_delays_disturbances_and_missing_energy_can_be_simulated() -> None:
    job = SimulatedJob(SCHEDULE, max_slowdown_ratio=0.05, measures_energy=False)
    job.run(constant(1410), 2, delay_ratio=0.1, is_regular=False)

    assert job.baseline.energy_j is job.observations[-1].energy_j is None
    assert job.observations[-1].iteration_time_s == pytest.approx(1.1 * job.baseline.iteration_time_s)
    assert not job.observations[-1].is_regular
    assert job.view().target.max_slowdown_ratio == 0.05
    assert len(job.plans) == 2


def test_other_schedules_and_clocks_are_supported() -> None:
    schedule = interleaved(2, 4, 2)
    profile = pipeline_profile(schedule, scales=(1.0, 2.0), sm_clocks_mhz=(1980, 1500))

    job = SimulatedJob(schedule, profile)

    assert job.view().gpus[0].supported_sm_clocks_mhz == (1980, 1500)
    times_s = {
        key.pp_rank: profile[key].at_max_clock.time_s for key in profile.classes if key.kind is InstructionKind.F
    }
    assert times_s[1] == 2 * times_s[0]


def test_a_view_has_sensible_defaults_and_takes_what_matters() -> None:
    view = job_view(SCHEDULE, supported_sm_clocks_mhz=(1410, 1395), max_slowdown_ratio=0.1, baseline_energy_j=None)

    assert [gpu.supported_sm_clocks_mhz for gpu in view.gpus] == [(1410, 1395)] * 4
    assert view.target.iteration_time_s(view.baseline.iteration_time_s) == pytest.approx(1.1)
    assert view.baseline.energy_j is None
    assert FullSpeed().next_plan(job_view()).purpose is PlanPurpose.BASELINE
