"""Power limits and profiles of plans: set with the iteration before the first, withdrawn for blocks, lost safely."""

from dataclasses import replace

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPrediction, PlanPurpose, RankClocks, full_speed_plan
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.daemon.jobs.plan_settings import PlanSettingSnapshot
from gpuenergyd.gpu.device import GpuDetails
from gpuenergyd.gpu.link.messages import GpuSettingsRead
from gpuenergyd.wire.daemon_codec import decode, encode
from tests.support.job_stage import CLOCKS_MHZ, SCHEDULE, Stage, plan, settle


def _limit_plan(plan_id: str, *limits_w: float | None, purpose: PlanPurpose = PlanPurpose.TUNED) -> ClockPlan:
    ranks = tuple(
        RankClocks(r, (None,) * len(order), power_limit_w=limits_w[r]) for r, order in enumerate(SCHEDULE.orders)
    )
    return ClockPlan(plan_id, purpose, ranks, reason="as scripted")


def _profile_plan(plan_id: str, *profiles: int | None) -> ClockPlan:
    ranks = tuple(
        RankClocks(r, (None,) * len(order), power_profile=profiles[r]) for r, order in enumerate(SCHEDULE.orders)
    )
    return ClockPlan(plan_id, PlanPurpose.TUNED, ranks, reason="as scripted")


def _limited_stage(*answers: ClockPlan) -> Stage:
    stage = Stage(*answers)
    stage.jobs.services = replace(stage.jobs.services, levers=frozenset({Lever.POWER_LIMITS}))
    stage.jobs.clock_requests.services = stage.jobs.services
    return stage


async def test_limits_are_set_when_the_iteration_before_ends() -> None:
    stage = _limited_stage(_limit_plan("limits", 300.0, 250.0))
    runner = await stage.begin(times=3)
    apply_at = runner.job.knowledge.plans.last_apply_at
    assert stage.worker.sets_clocks is False
    assert stage.policy.views[0].can_set_power_limits
    assert not stage.policy.views[0].can_set_clocks
    await stage.iterate(times=apply_at - 1 - stage.next_index)
    assert stage.worker.power_limits == []
    await stage.iterate()
    assert stage.next_index == apply_at
    assert stage.worker.power_limits == [("GPU-0", 300.0), ("GPU-1", 250.0)]
    await stage.iterate(times=3)
    assert len(stage.worker.power_limits) == 2
    assert stage.worker.requested_clocks == []
    assert [event.after for event in stage.events("limit")] == ["300 W", "250 W"]


async def test_limits_are_withdrawn_by_a_plan_without_and_forgotten_by_a_restore() -> None:
    stage = _limited_stage(
        _limit_plan("limits", 300.0, None),
        full_speed_plan("block", SCHEDULE, [CLOCKS_MHZ] * 2, reason="full speed", sets_clocks=False),
    )
    await stage.begin(times=12)
    assert stage.worker.power_limits == [("GPU-0", 300.0), ("GPU-0", None)]
    (runner,) = stage.jobs
    runner.control_lost("the worker died")
    await settle()
    await stage.iterate(times=2)
    assert len(stage.worker.power_limits) == 2


async def test_a_plan_for_a_suspected_straggler_is_prepared_with_the_levers_of_the_job() -> None:
    stage = _limited_stage(_limit_plan("limits", 300.0, 300.0))
    runner = await stage.begin(times=8)
    assert stage.phase == "tuned"
    runner.prepare_for_pace(1.5)
    await settle()
    prepared = stage.policy.views[-1]
    assert prepared.target.is_forced
    assert (prepared.can_set_clocks, prepared.can_set_power_limits) == (False, True)


async def test_a_refused_limit_ends_control() -> None:
    stage = _limited_stage(_limit_plan("limits", 300.0, 300.0))
    stage.worker.limit_refusal = "no permission"
    runner = await stage.begin(times=8)
    assert stage.phase == "fallback"
    assert "the power limit cannot be set: no permission" in runner.job.phase_reason


async def test_a_limit_out_of_range_is_an_invalid_plan() -> None:
    stage = _limited_stage(_limit_plan("limits", 50.0, 300.0))
    runner = await stage.begin(times=4)
    assert "cannot be limited to 50 W; supported: 100 to 400 W" in runner.job.phase_reason


async def test_a_policy_that_cannot_limit_power_predicts_instead() -> None:
    predicted = ClockPlan("predicted", PlanPurpose.PREDICTED, predicted=PlanPrediction(1.0, 90.0, None, 1.0, 100.0))
    stage = _limited_stage(predicted)
    runner = await stage.begin(times=6)
    assert runner.prediction is not None
    assert runner.prediction.plan_id == "predicted"
    assert stage.worker.calls == []
    assert runner.outcome().kind == "observed_only"
    assert runner.outcome_line() == "policy scripted cannot plan with power limits alone: it only predicts"


async def test_the_next_daemon_sets_all_limits_again() -> None:
    stage = _limited_stage(_limit_plan("limits", 300.0, None))
    runner = await stage.begin(times=8)
    limits = runner.power_limits
    assert stage.worker.power_limits == [("GPU-0", 300.0)]
    snapshot = decode(encode(limits.snapshot()), PlanSettingSnapshot, max_bytes=10_000)
    limits.forget()
    limits.restore(snapshot)
    await stage.iterate()
    assert stage.worker.power_limits == [("GPU-0", 300.0), ("GPU-0", 300.0)]
    assert stage.events("limit")[1].before == "unknown"


async def test_the_next_daemon_reads_no_limit_of_a_job_that_never_had_one() -> None:
    stage = Stage(plan("clocks", 1200))
    runner = await stage.begin(times=8)
    limits = runner.power_limits
    snapshot = decode(encode(limits.snapshot()), PlanSettingSnapshot, max_bytes=10_000)
    stage.worker.limit_refusal = "the power of this GPU cannot be read"
    limits.restore(snapshot)
    await stage.iterate(times=2)
    assert stage.phase == "tuned"


async def test_profiles_are_set_withdrawn_and_audited_as_limits_are() -> None:
    stage = Stage(
        _profile_plan("profiles", 1, None),
        full_speed_plan("block", SCHEDULE, [CLOCKS_MHZ] * 2, reason="full speed", sets_clocks=False),
    )
    await stage.begin(times=12)
    assert stage.policy.views[0].can_set_power_profiles
    assert stage.policy.views[0].gpus[0].power_profiles == (0, 1)
    assert stage.worker.power_profiles == [("GPU-0", 1), ("GPU-0", None)]
    assert stage.worker.power_limits == []
    assert [event.after for event in stage.events("profile")] == ["requested: 1", "requested: none"]


async def test_a_refused_profile_ends_control_with_what_is_missing() -> None:
    stage = Stage(_profile_plan("profiles", 1, 1))
    stage.worker.limit_refusal = "no permission; run the GPU worker with CAP_SYS_ADMIN"
    runner = await stage.begin(times=8)
    assert stage.phase == "fallback"
    assert "the workload power profile cannot be set: no permission; run the GPU worker" in runner.job.phase_reason


async def test_a_profile_that_a_gpu_does_not_offer_is_an_invalid_plan() -> None:
    stage = Stage(_profile_plan("profiles", 1, 7))
    runner = await stage.begin(times=4)
    assert "rank 1 has no workload power profile 7; offered: 0, 1" in runner.job.phase_reason


async def test_a_job_learns_of_the_profiles_that_other_programs_request() -> None:
    stage = Stage(_profile_plan("profiles", 1, 1))
    await stage.begin(times=8)
    details = GpuDetails(requested_power_profiles="1")
    stage.jobs.handle_gpu_settings(GpuSettingsRead("GPU-0", details, is_our_power_limit=False, our_power_profile=1))
    await stage.iterate()
    assert not stage.policy.views[-1].gpus[0].foreign_power_profiles
    details = GpuDetails(requested_power_profiles="1,20")
    stage.jobs.handle_gpu_settings(GpuSettingsRead("GPU-0", details, is_our_power_limit=False, our_power_profile=1))
    await stage.iterate()
    assert stage.policy.views[-1].gpus[0].foreign_power_profiles == (20,)


async def test_the_next_daemon_sets_all_profiles_again() -> None:
    stage = Stage(_profile_plan("profiles", 1, None))
    runner = await stage.begin(times=8)
    profiles = runner.power_profiles
    snapshot = decode(encode(profiles.snapshot()), PlanSettingSnapshot, max_bytes=10_000)
    profiles.forget()
    profiles.restore(snapshot)
    await stage.iterate()
    assert stage.worker.power_profiles == [("GPU-0", 1), ("GPU-0", 1)]
    assert stage.events("profile")[1].before == "unknown"
