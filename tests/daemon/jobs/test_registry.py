"""Jobs and their processes against fakes: leases, plans, clock requests, restores and records, in order."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpuenergyd.core.clock_request import ClockRequest, TimedClock
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.daemon.jobs.clock_requests import Admission
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.daemon.runtime.user_rates import UserRates
from gpuenergyd.errors import JobError, ProtocolError
from gpuenergyd.gpu.link.messages import ClockChangeReport, GpuHealth, GpuHealthChange, GpuSample
from gpuenergyd.store.records import IterationRecord, JobEndRecord, JobRecord, PlanRecord
from gpuenergyd.wire.clock_request import RankClockRequest
from gpuenergyd.wire.messages import RankRelease
from tests.support.job_stage import ME, Stage, plan, registration, report, settle


async def test_gpus_are_leased_before_a_plan_is_sent_and_clock_requests_follow() -> None:
    stage = Stage(plan("tuned-1", 1200))
    await stage.begin(times=2)
    assert stage.worker.calls == [("lease", ("GPU-0", "GPU-1"))]
    (first,), (second,) = await stage.iterate()
    assert stage.send(plan_epoch=1) is Admission.FORWARDED
    await stage.jobs.close("test over")

    assert (first.plan_id, first.plan_epoch, first.changes) == ("tuned-1", 1, (("F", 0, 0, 0, 1200),))
    assert second.apply_at_iteration == first.apply_at_iteration > 2
    assert stage.worker.requested_clocks == [("GPU-0", 1200, 0)]
    assert stage.worker.owner is not None
    assert stage.worker.owner.pid == ME.pid


async def test_a_plan_is_sent_again_while_a_rank_runs_its_iterations_under_an_older_one() -> None:
    stage = Stage(plan("tuned-1", 1200))
    await stage.begin(times=2)
    (lost,), (kept,) = await stage.iterate()
    before = await stage.iterate(times=lost.apply_at_iteration - stage.next_index)
    at = stage.jobs.handle_report(report(stage.tokens[0], 0, stage.next_index, 0), ME)
    still = stage.jobs.handle_report(report(stage.tokens[0], 0, stage.next_index + 1, 0), ME)
    other = stage.jobs.handle_report(report(stage.tokens[1], 1, stage.next_index, kept.plan_epoch), ME)
    taken = stage.jobs.handle_report(report(stage.tokens[0], 0, stage.next_index + 2, lost.plan_epoch), ME)
    await stage.jobs.close("test over")

    assert before == [(), ()]
    assert [reply.plans for reply in (at, still, other, taken) if reply] == [(lost,), (lost,), (), ()]


async def test_the_gpus_of_an_ended_job_are_restored_before_another_may_claim_them() -> None:
    stage = Stage(plan("tuned-1", 1200))
    job_id = stage.join()
    await stage.iterate(times=3)
    assert stage.jobs.release(RankRelease(stage.tokens[0]), ME)
    claim_while_restoring = stage.gpus["GPU-0"].claim
    await settle()

    assert claim_while_restoring is not None
    assert stage.worker.calls[-1] == ("restore", ("GPU-0", "GPU-1"))
    assert [gpu.claim for gpu in stage.gpus] == [None] * 3
    assert stage.policy.forgotten == [job_id]
    assert list(stage.jobs) == []
    (ended,) = [r for r in stage.history.records if isinstance(r, JobEndRecord)]
    assert ended.end_reason == "rank 0 was released"


async def test_other_ranks_of_an_ended_job_return_to_full_speed_and_their_requests_are_stale() -> None:
    stage = Stage(plan("tuned-1", 1200))
    await stage.begin(times=3)
    stage.jobs.release(RankRelease(stage.tokens[0]), ME)
    await settle()
    reply = stage.jobs.handle_report(report(stage.tokens[1], 1, 9, 1), ME)
    outcome = stage.send(pp_rank=1, plan_epoch=1)

    assert reply is not None
    assert [(p.changes, p.apply_at_iteration) for p in reply.plans] == [((), 0)]
    assert outcome is Admission.STALE
    assert stage.worker.requested_clocks == []


async def test_after_a_policy_failure_the_job_runs_at_full_speed_and_old_requests_are_stale() -> None:
    stage = Stage(plan("tuned-1", 1200), PolicyFailure("RuntimeError: no idea"))
    await stage.begin(times=2)
    await stage.iterate()
    given = await stage.iterate(plan_epoch=1, times=2)
    outcome = stage.send(plan_epoch=1)

    assert stage.phase == "fallback"
    assert stage.worker.calls == [("lease", ("GPU-0", "GPU-1")), ("restore", ("GPU-0", "GPU-1"))]
    assert [p.changes for p in given[0]] == [()]
    assert outcome is Admission.STALE


async def test_a_refused_lease_leads_to_full_speed_with_its_reason() -> None:
    stage = Stage(plan("tuned-1", 1200))
    stage.worker.refusal = "GPU-0 is leased to somebody"
    await stage.begin(times=2)
    outcome = stage.send(plan_epoch=0)

    assert stage.phase == "fallback"
    assert outcome is Admission.STALE
    assert [e.reason for e in stage.events("lease")] == ["GPU-0 is leased to somebody"]


@pytest.mark.fault(8)
@pytest.mark.parametrize("health", [GpuHealth.LOST, GpuHealth.WEDGED, GpuHealth.OBSERVE_ONLY])
async def test_a_gpu_that_cannot_be_controlled_takes_its_whole_job_to_full_speed(health: GpuHealth) -> None:
    stage = Stage(plan("tuned-1", 1200))
    stage.join()
    await stage.iterate(times=3)
    stage.jobs.handle_gpu_health(GpuHealthChange("GPU-1", health, "it says so"))
    await settle()

    assert stage.phase == "fallback"
    assert stage.worker.calls[-1] == ("restore", ("GPU-0", "GPU-1"))
    assert stage.gpus["GPU-1"].health is health
    await stage.jobs.close("test over")


async def test_a_lost_worker_or_a_failed_change_leads_only_tuned_jobs_to_full_speed() -> None:
    ways: list[Callable[[Jobs], None]] = [
        lambda jobs: jobs.handle_worker_lost("the GPU worker went away"),
        lambda jobs: jobs.handle_clock_change(failed_set("GPU-0")),
    ]
    for lose in ways:
        stage = Stage(plan("t", 1200))
        await stage.begin()
        lose(stage.jobs)
        untouched = stage.phase
        await stage.iterate(times=2)
        tuned = stage.phase
        lose(stage.jobs)
        await settle()

        assert (untouched, tuned, stage.phase) == ("baseline", "tuned", "fallback")
        await stage.jobs.close("test over")


def failed_set(gpu_uuid: str) -> ClockChangeReport:
    return ClockChangeReport(
        gpu_uuid, 1200, 1, 0, 0, None, None, "the journal has no entry for this GPU: it has been restored"
    )


async def test_an_idle_job_is_restored_and_leases_again_at_its_next_clock_request() -> None:
    stage = Stage(plan("tuned-1", 1200))
    runner = await stage.begin(times=3)
    assert runner.job.baseline is not None
    runner.last_report_mono_ns = time.monotonic_ns() - 10_000_000_000
    stage.jobs.check_time_limits()
    await settle()
    has_announced_it = any(stage.jobs.is_in_long_pause(gpu) for gpu in stage.gpus)
    silent = stage.send(plan_epoch=1)
    await settle()
    speaking = stage.send(plan_epoch=1)
    await stage.iterate(plan_epoch=1)

    assert not has_announced_it
    assert [call for call, _ in stage.worker.calls] == ["lease", "restore", "lease"]
    assert (silent, speaking) == (Admission.STALE, Admission.FORWARDED)
    assert stage.phase == "tuned"


def predicted_plan() -> ClockPlan:
    """What a policy answers that is told that nobody may set clocks."""
    return replace(
        plan("would-be", 1200, PlanPurpose.PREDICTED),
        predicted=PlanPrediction(1.0, 90.0, None, 1.0, 100.0),
        reason="assumed curves",
        figures=(("saving_low_ratio", 0.05), ("saving_high_ratio", 0.2)),
    )


async def test_an_observing_daemon_records_a_prediction_and_never_leases() -> None:
    stage = Stage(predicted_plan(), is_observing=True)
    stage.join()
    given = await stage.iterate(times=8)

    (view,) = stage.policy.views
    (runner,) = stage.jobs
    (recorded,) = [r for r in stage.history.records if isinstance(r, PlanRecord)]
    assert not view.can_set_clocks
    assert given == [(), ()]
    assert runner.prediction == predicted_plan() == recorded.plan
    assert not runner.job.knowledge.plans.kept
    assert stage.worker.calls == []
    assert sum(isinstance(r, IterationRecord) for r in stage.history.records) == 8


@pytest.mark.parametrize("is_observing", [True, False])
async def test_a_program_that_joins_an_observing_daemon_is_notified(*, is_observing: bool) -> None:
    stage = Stage(is_observing=is_observing)
    registered = stage.jobs.register(registration(0), ME, os.pidfd_open(ME.pid))
    assert ("the daemon only observes (mode observe)" in registered.message) is is_observing


async def test_a_policy_that_needs_profiling_gives_a_reason_in_place_of_a_prediction() -> None:
    stage = Stage(plan("profile-1", 1200, PlanPurpose.TRIAL), is_observing=True)
    await stage.begin(times=8)

    (runner,) = stage.jobs
    assert runner.prediction is not None
    assert runner.prediction.predicted is None
    assert "cannot predict without trying clocks" in runner.prediction.reason
    assert not [r for r in stage.history.records if isinstance(r, PlanRecord)]


async def test_a_job_with_an_observe_only_gpu_leases_once_it_can_be_controlled() -> None:
    stage = Stage(predicted_plan(), plan("tuned-1", 1200))
    stage.jobs.handle_gpu_health(GpuHealthChange("GPU-1", GpuHealth.OBSERVE_ONLY, "MIG is enabled"))
    await stage.begin(times=8)
    assert stage.worker.calls == []
    assert [view.can_set_clocks for view in stage.policy.views] == [False]

    stage.jobs.handle_gpu_health(GpuHealthChange("GPU-1", GpuHealth.OK, "MIG is off"))
    await stage.iterate(times=50)
    assert stage.policy.views[1].can_set_clocks
    assert any(call[0] == "lease" for call in stage.worker.calls)


async def test_each_change_is_recorded_with_actor_and_reason() -> None:
    stage = Stage(plan("tuned-1", 1200))
    await stage.begin(times=3)
    await stage.jobs.close("the daemon was stopped")

    (job,) = [r for r in stage.history.records if isinstance(r, JobRecord)]
    (planned,) = [r for r in stage.history.records if isinstance(r, PlanRecord)]
    assert (job.job_name, job.uid, job.is_simulated) == ("job", os.geteuid(), True)
    assert planned.plan.plan_id == "tuned-1"
    assert [e.actor for e in stage.events("lease")] == [f"uid {ME.uid} pid {ME.pid}"] * 2
    assert [(e.actor, e.reason, e.after) for e in stage.events("plan")] == [
        ("policy scripted", "as scripted", "epoch 1: tuned-1")
    ]
    restores = stage.events("restore")
    assert {e.gpu_uuid for e in restores} == {"GPU-0", "GPU-1"}
    assert all("the daemon was stopped" in e.reason and "restored" in e.after for e in restores)


async def test_an_iteration_without_energy_readings_is_observed_after_the_time_limit() -> None:
    stage = Stage()
    await stage.begin(times=3)

    iterations = [r for r in stage.history.records if isinstance(r, IterationRecord)]
    assert [r.energy_j for r in iterations] == [None] * 3


@pytest.mark.fault(17)
async def test_energy_comes_from_the_counters_of_all_gpus_of_the_job() -> None:
    stage = Stage()
    now_ns = time.monotonic_ns()
    stage.join()
    for r in range(2):
        for at_ns, energy_j in ((now_ns - 10**9, 1000.0), (now_ns + 10**9, 1000.0 + 200.0 * (r + 1))):
            stage.jobs.handle_samples([GpuSample(f"GPU-{r}", at_ns, 100.0, energy_j, at_ns, 1410, 40.0, False)])
    await stage.iterate()
    (iteration,) = [r for r in stage.history.records if isinstance(r, IterationRecord)]

    assert iteration.energy_j == pytest.approx((100.0 + 200.0) * iteration.iteration_time_s, rel=0.3)
    await stage.jobs.close("test over")


async def test_a_request_for_an_unsupported_clock_or_an_unknown_plan_is_hostile() -> None:
    stage = Stage(plan("tuned-1", 1200))
    await stage.begin(times=3)
    outcomes = [
        stage.send(clock_mhz=1201, plan_epoch=1),
        stage.send(clock_mhz=0, plan_epoch=1),
        stage.send(plan_epoch=2),
    ]

    assert outcomes == [Admission.HOSTILE] * 3
    assert stage.jobs.clock_requests.num_hostile == 3
    assert stage.worker.requested_clocks == []


@pytest.mark.fault(60)
async def test_a_user_starts_a_limited_number_of_jobs_per_hour_and_others_are_not_affected() -> None:
    stage = Stage()
    now = [0.0]
    stage.jobs.max_jobs_per_user_per_h = 2
    stage.jobs.rates = UserRates(2 / 3600, capacity=2, monotonic_s=lambda: now[0])

    def start(run_key: str, peer: PeerCredentials = ME) -> str:
        pidfd = os.pidfd_open(ME.pid)
        try:
            return stage.jobs.register(replace(registration(0), run_key=run_key), peer, pidfd).rank_token
        except JobError as error:
            os.close(pidfd)
            return str(error)

    for run_key in ("1", "2"):
        stage.jobs.release(RankRelease(start(run_key)), ME)
        await settle()
    now[0] = 100.0
    refused = start("3")
    stranger = PeerCredentials(ME.pid, ME.uid + 1, ME.gid)
    stage.jobs.release(RankRelease(start("3", stranger)), stranger)
    await settle()
    now[0] = 1801.0
    start("4")
    jobs = [r.run_key for r in stage.history.records if isinstance(r, JobRecord)]
    await stage.jobs.close("test over")

    assert refused == (
        f"uid {ME.uid} has started or changed 2 jobs within an hour, which is the limit (max_jobs_per_user_per_h);"
        " the next is possible in 1700 s"
    )
    assert jobs == ["1", "2", "3", "4"]


async def test_a_registration_that_is_refused_does_not_count_as_a_job() -> None:
    stage = Stage()
    stage.jobs.rates = UserRates(1 / 3600, capacity=2)
    stage.jobs.register(registration(0), ME, os.pidfd_open(ME.pid))
    for _ in range(3):
        pidfd = os.pidfd_open(ME.pid)
        with pytest.raises(JobError, match="GPU GPU-0 has been in use"):
            stage.jobs.register(replace(registration(0), run_key="2"), ME, pidfd)
        os.close(pidfd)
    wait_s = stage.jobs.rates.wait_s(ME.uid)
    await stage.jobs.close("test over")

    assert wait_s == 0.0


async def test_the_number_of_ranks_per_user_is_limited() -> None:
    stage = Stage()
    stage.jobs.max_ranks_per_user = 1
    pidfd = os.pidfd_open(ME.pid)
    stage.jobs.register(registration(0), ME, os.pidfd_open(ME.pid))
    with pytest.raises(Exception, match="1 rank registered, which is the limit"):
        stage.jobs.register(registration(1), ME, pidfd)
    os.close(pidfd)

    assert stage.gpus["GPU-1"].claim is None


async def test_the_measured_latency_of_clock_changes_reaches_the_policy() -> None:
    stage = Stage()
    stage.join()
    for k in range(40):
        asked_ns = 10**12 + k * 10**9
        change = ClockChangeReport(
            *("GPU-0", 1200, asked_ns, asked_ns, asked_ns + 3_500_000, asked_ns + 4_500_000, 1200, None),
            previous_sm_clock_mhz=900,
        )
        stage.jobs.handle_clock_change(change)
    await stage.iterate(times=2)
    (view, *_) = stage.policy.views

    assert view.gpus[0].switch_latency_s == pytest.approx(0.004)
    assert view.gpus[1].switch_latency_s == pytest.approx(0.004)  # of the same model
    (calibrated,) = stage.events("switch_latency")
    assert calibrated.gpu_uuid == "GPU-0"
    assert (calibrated.before, calibrated.after) == (
        "raise 30 ms, lower 30 ms, assumed",
        "raise 4 ms, lower 4 ms, measured",
    )


async def test_policies_know_how_many_gpus_of_the_host_all_jobs_use() -> None:
    stage = Stage()

    def shares(job_id: str) -> list[int]:
        runner = stage.jobs.runner(job_id)
        assert runner is not None
        return [gpu.num_host_gpus for gpu in runner.job.ranks.own_gpus.values()]

    first = stage.join()
    assert max(shares(first)) == 2
    (order,) = one_forward_one_backward(1, 2).orders
    rows = tuple((str(i.kind), i.microbatch_index, i.chunk_index) for i in order)
    single = replace(registration(0), run_key="2", num_pp_ranks=1, order=rows, gpu_uuid="GPU-2")
    registered = stage.jobs.register(single, ME, os.pidfd_open(ME.pid))
    assert shares(first) == [3, 3]
    assert shares(registered.job_id) == [3]
    stage.jobs.release(RankRelease(registered.rank_token), ME)
    await settle()
    assert shares(first) == [2, 2]


async def test_several_reports_of_a_rank_are_handled_in_order_and_get_one_reply() -> None:
    stage = Stage(plan("tuned-1", 1200))
    await stage.begin(times=2)
    (lost,), _ = await stage.iterate()
    first = lost.apply_at_iteration
    await stage.iterate(times=first - stage.next_index)
    sent = [report(stage.tokens[0], 0, stage.next_index + k, 0) for k in range(3)]
    reply = await stage.jobs.handle_reports(sent, ME)

    assert reply is not None
    assert reply.plans == (lost, lost, lost)
    assert next(iter(stage.jobs)).job.reports.last_index == sent[-1].iteration_index
    assert await stage.jobs.handle_reports([replace(sent[0], rank_token="00" * 16)], ME) is None
    with pytest.raises(ProtocolError, match="must all be of one rank"):
        await stage.jobs.handle_reports([sent[0], report(stage.tokens[1], 1, 9, 0)], ME)
    for several, what in (([], "0 reports"), (sent[:1] * 65, "65 reports")):
        with pytest.raises(ProtocolError, match=f"{what} in a message; 1 to 64 are accepted"):
            await stage.jobs.handle_reports(several, ME)


async def test_other_requests_are_handled_between_several_reports() -> None:
    stage = Stage(plan("tuned-1", 1200))
    turns: list[int] = []
    stage.join()
    sent = [report(stage.tokens[0], 0, k, 0) for k in range(20)]
    handling = asyncio.create_task(stage.jobs.handle_reports(sent, ME))
    while not handling.done():
        turns.append(next(iter(stage.jobs)).job.reports.last_index)
        await asyncio.sleep(0)
    await stage.jobs.close("test over")

    assert len(set(turns)) >= 19


async def test_times_of_instructions_are_dispensable_once_planned_unless_waits_for_others_show_in_them() -> None:
    stage = Stage()
    alone = replace(registration(0), num_pp_ranks=1, num_microbatches=1, order=(("F", 0, 0), ("B", 0, 0)))

    def takes_untimed(token: str, index: int) -> bool:
        reply = stage.jobs.handle_report(report(token, 0, index, 0), ME)
        assert reply is not None
        assert reply.takes_several
        return reply.takes_untimed

    first = stage.jobs.register(alone, ME, os.pidfd_open(ME.pid)).rank_token
    assert not takes_untimed(first, 0)
    (job,) = (runner.job for runner in stage.jobs)
    job.phase = JobPhase.TUNED
    assert takes_untimed(first, 1)
    replica = stage.jobs.register(replace(alone, dp_rank=1, gpu_uuid="GPU-1"), ME, os.pidfd_open(ME.pid))
    assert not takes_untimed(first, 2)
    assert not takes_untimed(replica.rank_token, 0)


@pytest.mark.parametrize("is_observing", [True, False])
async def test_only_jobs_that_are_observed_report_iterations_together_and_each_of_these_counts(
    *, is_observing: bool
) -> None:
    stage = Stage(is_observing=is_observing)
    alone = replace(registration(0), num_pp_ranks=1, num_microbatches=1, order=(("F", 0, 0), ("B", 0, 0)))
    token = stage.jobs.register(alone, ME, os.pidfd_open(ME.pid)).rank_token
    stage.jobs.handle_report(report(token, 0, 0, 0), ME)
    (job,) = (runner.job for runner in stage.jobs)
    job.phase = JobPhase.TUNED
    several = replace(report(token, 0, 4, 0), instructions=(), is_in_order=True, num_together=4)
    reply = stage.jobs.handle_report(several, ME)

    assert reply is not None
    assert reply.takes_together is is_observing
    assert reply.takes_spans
    assert job.num_iterations == 5


async def test_a_member_of_a_pipeline_across_hosts_times_all_instructions() -> None:
    stage = Stage()
    member = replace(registration(0), num_pp_ranks=1, is_pipeline_member=True)
    token = stage.jobs.register(member, ME, os.pidfd_open(ME.pid)).rank_token
    reply = stage.jobs.handle_report(report(token, 0, 0, 0), ME)
    assert reply is not None
    assert not reply.takes_untimed

    stage.jobs.pipelines = None
    with pytest.raises(
        JobError, match="the pipeline spans hosts, but the daemon lacks the plugin gpuenergyd_across_hosts"
    ):
        stage.jobs.register(member, ME, -1)


async def test_a_peer_cannot_use_the_token_of_another_uid() -> None:
    stage = Stage(plan("tuned-1", 1200))
    stranger = PeerCredentials(ME.pid, ME.uid + 1, ME.gid)
    stage.join()
    reported = stage.jobs.handle_report(report(stage.tokens[0], 0, 0, 0), stranger)
    released = stage.jobs.release(RankRelease(stage.tokens[0]), stranger)
    record = RankClockRequest(bytes.fromhex(stage.tokens[0]), 1, ClockRequest(1200, time.monotonic_ns()))
    admitted = stage.jobs.clock_requests.admit(record, stranger)

    assert (reported, released, admitted) == (None, None, Admission.HOSTILE)


@pytest.mark.fault(29)
async def test_a_job_of_which_a_part_runs_on_another_host_is_never_tuned_on_either() -> None:
    for pp_rank in range(2):  # one daemon per host, and each sees one rank of two
        stage = Stage(plan("tuned-1", 1200))
        registered = stage.jobs.register(registration(pp_rank), ME, os.pidfd_open(ME.pid))
        for index in range(20):
            assert stage.jobs.handle_report(report(registered.rank_token, pp_rank, index, 0), ME) is not None
            await settle()
        record = RankClockRequest(bytes.fromhex(registered.rank_token), 1, ClockRequest(1200, time.monotonic_ns()))
        outcome = stage.jobs.clock_requests.admit(record, ME)

        assert outcome is Admission.STALE
        assert (stage.worker.calls, stage.worker.requested_clocks, stage.policy.views) == ([], [], [])
        await stage.jobs.close("test over")


@pytest.mark.fault(29)
async def test_an_iteration_whose_ranks_followed_different_plans_says_nothing_of_either() -> None:
    stage = Stage(plan("tuned-1", 1200))
    stage.join()
    await stage.iterate(times=3)
    for r, token in enumerate(stage.tokens):
        stage.jobs.handle_report(report(token, r, stage.next_index, r), ME)
    stage.next_index += 1
    await settle()
    stage.jobs.handle_samples(())
    await stage.iterate(times=2)
    mixed = [r for r in stage.history.records if isinstance(r, IterationRecord) and r.iteration_index == 3]
    await stage.jobs.close("test over")

    assert [(record.plan_id, record.is_regular) for record in mixed] == [(None, False)]


async def test_only_supported_clocks_within_an_hour_are_admitted_in_a_timetable() -> None:
    stage = Stage(plan("tuned-1", 1200))
    await stage.begin(times=3)
    token, now_ns = bytes.fromhex(stage.tokens[0]), time.monotonic_ns()

    def admitted(sequence: int, *later: TimedClock) -> Admission:
        request = ClockRequest(1200, time.monotonic_ns(), later)
        return stage.jobs.clock_requests.admit(RankClockRequest(token, 1000 + sequence, request), ME)

    assert admitted(1, TimedClock(900, now_ns), TimedClock(1410, now_ns + 10**9)) is not Admission.HOSTILE
    assert admitted(2, TimedClock(900, now_ns), TimedClock(1411, now_ns + 10**9)) is Admission.HOSTILE
    assert admitted(3, TimedClock(900, now_ns), TimedClock(0, now_ns + 10**9)) is Admission.HOSTILE
    assert admitted(4, TimedClock(900, now_ns + 3601 * 10**9)) is Admission.HOSTILE
