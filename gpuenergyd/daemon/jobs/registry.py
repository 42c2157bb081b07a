"""Registry of jobs: registration and reports of ranks, events of the GPU worker, and the end of jobs.

Longer than 400 lines, since each of these changes the same tables of runners and sessions, which nothing else may.
"""

import asyncio
import logging
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.measurements.savings import SavingEstimate
from gpuenergyd.core.job.messages import (
    JobPhase,
    OperatorOrdered,
    OrdersRefused,
    RankChangedMicrobatches,
    RankJoined,
    RankLost,
    RankReleased,
    RankReported,
)
from gpuenergyd.core.job.outcome import Outcome
from gpuenergyd.core.job.replica_name import replica_name
from gpuenergyd.core.job.rules import JobRules, member_rules
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.gpus.inventory import Gpu, GpuClaim, utc_at
from gpuenergyd.daemon.jobs.audit_log import record_knob, record_latency
from gpuenergyd.daemon.jobs.clock_requests import ClockRequests
from gpuenergyd.daemon.jobs.replicas import Replicas, TimeAccounts
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.jobs.sessions import RankSession, RankSessions
from gpuenergyd.daemon.ports import IterationWatcher, JobServices, PipelinesPort, RunningJob
from gpuenergyd.daemon.processes.plugins import PolicyNames, with_default_options
from gpuenergyd.daemon.registration import (
    MAX_VALUE_CHARS,
    check_texts,
    checked_clocks,
    checked_iteration,
    checked_length,
    checked_order,
    checked_tags,
    job_description,
    job_record,
    joining_message,
    reorder_offer,
    require_agreement,
    single_iterations,
)
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.daemon.runtime.process_end import ProcessEnd
from gpuenergyd.daemon.runtime.user_rates import UserRates
from gpuenergyd.errors import GpuEnergyError, JobError, ProtocolError
from gpuenergyd.gpu.link.messages import (
    ClockChangeReport,
    GpuHealth,
    GpuHealthChange,
    GpuSample,
    GpuSettingsRead,
    LeaseOwner,
)
from gpuenergyd.store.records import RankRecord
from gpuenergyd.wire import MAX_REPORTS, PROTOCOL_VERSION
from gpuenergyd.wire.clock_request import TOKEN_BYTES
from gpuenergyd.wire.messages import (
    IterationReply,
    IterationReport,
    PaceReply,
    PaceReport,
    RankRegistered,
    RankRegistration,
    RankRelease,
    ReleaseReply,
    TrueClockRow,
)

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000
_S_PER_H = 3600
LAST_COMMANDS_LIMIT_S = 5.0
"""Time limit for the last commands of jobs."""
OUTCOME_LIMIT_S = 0.5
"""Time limit for the final outcome of a job whose rank waits for it at its end."""
_UNCONTROLLABLE = frozenset({GpuHealth.LOST, GpuHealth.WEDGED, GpuHealth.OBSERVE_ONLY, GpuHealth.RELEASED})

JobKey = tuple[int, str, str, int]
"""uid, job name, run key, data-parallel rank."""
_ENDED_KEPT = 8


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended recently; `line` is its outcome with the savings."""

    job_id: str
    job_name: str
    replica_name: str
    ended_mono_ns: int
    outcome: Outcome
    line: str
    estimate: SavingEstimate | None


@dataclass(slots=True)
class Jobs:
    """The jobs and ranks of this daemon, owned by the event loop."""

    services: JobServices
    rules: JobRules
    default_policy: str
    default_max_slowdown_ratio: float
    policies: PolicyNames
    clock_socket_path: str
    max_ranks_per_user: int
    max_jobs_per_user_per_h: int
    silence_limit_s: float
    policy_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Options of policies from the settings, by the name of the policy."""
    sessions: RankSessions = field(init=False)
    rates: UserRates = field(init=False)
    """Limits how often each user may start or change a job, since the history stores both."""
    clock_requests: ClockRequests = field(init=False)
    _runners: dict[str, JobRunner] = field(default_factory=dict)
    _open: dict[JobKey, JobRunner] = field(default_factory=dict)
    _registrations: dict[str, RankRegistration] = field(default_factory=dict)
    _tasks: set[asyncio.Task[object]] = field(default_factory=set)
    _is_observing_soon: bool = False
    replicas: Replicas = field(default_factory=Replicas)
    accounts: TimeAccounts = field(default_factory=TimeAccounts)
    ended: deque[EndedJob] = field(default_factory=lambda: deque(maxlen=_ENDED_KEPT))
    on_end: list[Callable[[JobRunner], None]] = field(default_factory=list)
    """Called when a job has ended."""
    stored_orders: Callable[[JobRunner], OperatorOrdered | None] = lambda _: None
    """Returns the orders that an earlier daemon stored for a job."""
    pipelines: PipelinesPort | None = None
    """The service of pipelines across hosts; None without one."""

    def __post_init__(self) -> None:
        self.sessions = RankSessions(self._process_ended, self._is_late)
        self.clock_requests = ClockRequests(self.services, self.sessions, lambda runner: self.spawn(runner.resume()))
        self.rates = UserRates(self.max_jobs_per_user_per_h / _S_PER_H, capacity=self.max_jobs_per_user_per_h)

    def __iter__(self) -> Iterator[JobRunner]:
        return iter(list(self._runners.values()))

    def watch(self, watcher: IterationWatcher, carbon_zone: str) -> None:
        """Have a service decide the targets of all jobs, before the first job begins.

        Raises:
            GpuEnergyError: another service decides them.
        """
        if self.services.watcher is not None:
            raise GpuEnergyError(f"{type(watcher).__name__}: another service decides the targets of jobs already")
        self.services = replace(self.services, watcher=watcher, carbon_zone=carbon_zone)

    def runner(self, job_id: str) -> JobRunner | None:
        return self._runners.get(job_id)

    def leader(self, job_id: str) -> RunningJob | None:
        """Return the pipeline across hosts that a job leads; None for any other job."""
        return None if self.pipelines is None else self.pipelines.leader(job_id)

    def with_targets(self) -> Iterator[RunningJob]:
        """Yield the jobs whose targets this host decides; a pipeline across hosts is one job, its leader."""
        for runner in self:
            if (leader := self.leader(runner.job_id)) is not None:
                yield leader
            elif not runner.is_member:
                yield runner

    def is_in_long_pause(self, gpu: Gpu) -> bool:
        """Return whether the job of a GPU has announced a pause that is so long that its GPUs were restored."""
        runner = self._runners.get(gpu.claim.job_id) if gpu.claim is not None and gpu.claim.is_paused else None
        return runner is not None and runner.leases.is_suspended

    def require_rate(self, uid: int) -> None:
        """Check that a user may start or change one more job now, without counting it.

        Raises:
            JobError: the user has reached the limit per hour.
        """
        if (wait_s := self.rates.wait_s(uid)) > 0:
            raise JobError(
                f"uid {uid} has started or changed {count_text(self.max_jobs_per_user_per_h, 'job')} within an hour,"
                f" which is the limit (max_jobs_per_user_per_h); the next is possible in {math.ceil(wait_s)} s"
            )

    # --- joining ---

    def register(self, registration: RankRegistration, peer: PeerCredentials, pidfd: int) -> RankRegistered:
        """Add a training process to its job; on success the session owns the pidfd.

        Raises:
            ProtocolError, ScheduleError, TargetError, UnknownPolicyError: the registration is invalid.
            GpuNotFoundError: there is no such GPU.
            JobError: the registration contradicts its job, the GPU is in use by another one, or a limit is reached.
        """
        check_texts(registration)
        order = checked_order(registration)
        checked_length(registration)
        checked_tags(registration.tags)
        if registration.is_pipeline_member and self.pipelines is None:
            raise JobError("the pipeline spans hosts, but the daemon lacks the plugin gpuenergyd_across_hosts")
        gpu = self.services.gpus[registration.gpu_uuid]
        key = (peer.uid, registration.job_name, registration.run_key, registration.dp_rank)
        runner = self._open.get(key)
        if runner is not None and (known := self._same_process(runner, registration, peer)) is not None:
            self._reorder(runner, registration, order, peer.uid)
            os.close(pidfd)
            return self._registered(known)
        if self.sessions.num_of_user(peer.uid) >= self.max_ranks_per_user:
            raise JobError(
                f"uid {peer.uid} has {count_text(self.max_ranks_per_user, 'rank')} registered, which is the limit"
            )
        is_new = runner is None
        if runner is None:
            self.require_rate(peer.uid)
            runner = self._runner_for(registration, peer)
        else:
            require_agreement(registration, self._registrations[runner.job_id])
        job_id = runner.job_id
        self.services.gpus.claim(
            registration.gpu_uuid, GpuClaim(job_id, registration.job_name, peer.uid, time.monotonic_ns())
        )
        try:
            gpu_view, offer = self.services.gpus.view(gpu), reorder_offer(registration)
            runner.handle(RankJoined(registration.pp_rank, order, gpu_view, registration.stage_rank, offer))
        except JobError:
            gpu.claim = None
            raise
        if is_new:
            self.rates.count(peer.uid)
            self.add(runner, registration, peer.uid)
            started_at = utc_at(runner.created_mono_ns)
            record = job_record(runner.job.description, registration, peer.uid, started_at, gpu.identity)
            self.services.history.write(record)
            runner.start()
            if not runner.is_member and (ordered := self.stored_orders(runner)) is not None:
                runner.handle(ordered)
        session = RankSession(
            token=secrets.token_bytes(TOKEN_BYTES),
            runner=runner,
            pp_rank=registration.pp_rank,
            gpu_uuid=registration.gpu_uuid,
            peer=peer,
            pidfd=pidfd,
            supported_sm_clocks_mhz=frozenset(gpu.identity.supported_sm_clocks_mhz),
            stage_rank=registration.stage_rank,
        )
        self.sessions.add(session)
        self.accounts.claim(runner)
        self.services.history.write(
            RankRecord(
                job_id,
                registration.pp_rank,
                registration.gpu_uuid,
                gpu.identity.model_name,
                peer.pid,
                peer.uid,
                utc_at(time.monotonic_ns()),
                registration.stage_rank,
            )
        )
        self._num_gpus_changed(runner)
        log.info("job %s: %s joined (%s, %s)", job_id, session.rank_name, registration.gpu_uuid, peer)
        return self._registered(session)

    def add(self, runner: JobRunner, first: RankRegistration, uid: int) -> None:
        """Add a job, and load its policy; `first` is the registration of its first rank."""
        job_id = runner.job_id
        self._open[uid, first.job_name, first.run_key, first.dp_rank] = self._runners[job_id] = runner
        self._registrations[job_id] = first
        self.accounts.join((uid, first.job_name, first.run_key), runner)
        if not runner.is_member:  # a pipeline across hosts is a replica only as a whole
            self.replicas.join((uid, first.job_name, first.run_key), runner, dp_rank=first.dp_rank)
        self.spawn(self.services.policy.preload(runner.job.description.policy))

    def rules_for(self, registration: RankRegistration) -> JobRules:
        return member_rules(self.rules) if registration.is_pipeline_member else self.rules

    def key_of(self, runner: JobRunner) -> JobKey:
        """Return the key by which a job is recognized when its program registers again."""
        first = self._registrations[runner.job_id]
        return runner.owner.uid, first.job_name, first.run_key, first.dp_rank

    def registration(self, job_id: str) -> RankRegistration:
        """Return the registration of a job's first rank."""
        return self._registrations[job_id]

    def replica_name(self, runner: JobRunner) -> str:
        """Return a job's readable name, with its data-parallel rank if the training has several jobs."""
        first, description = self._registrations[runner.job_id], runner.job.description
        return replica_name(first.job_name, num_ranks=description.num_ranks, dp_rank=first.dp_rank, tags=first.tags)

    # --- messages of ranks ---

    async def handle_reports(self, reports: Sequence[IterationReport], peer: PeerCredentials) -> IterationReply | None:
        """Handle a rank's reports, oldest first, with other requests in between; return one reply for all.

        Raises:
            ProtocolError: a report is invalid, their number is out of range, or they are of several ranks.
        """
        if not 0 < len(reports) <= MAX_REPORTS:
            raise ProtocolError(f"{count_text(len(reports), 'report')} in a message; 1 to {MAX_REPORTS} are accepted")
        if len({report.rank_token for report in reports}) > 1:
            raise ProtocolError("the reports of a message must all be of one rank")
        reply: IterationReply | None = None
        for report in reports:
            before = reply or IterationReply()
            reply = self.handle_report(report, peer)
            if reply is None:
                return None
            reply = replace(reply, plans=(*before.plans, *reply.plans), figures=reply.figures or before.figures)
            await asyncio.sleep(0)
        return reply

    def handle_report(self, report: IterationReport, peer: PeerCredentials) -> IterationReply | None:
        """Handle a rank's report; return the plans that the rank has yet to receive, None for an unknown token.

        Raises:
            ProtocolError: instants or instructions are out of range.
        """
        session = self.sessions.of_hex_token(report.rank_token, peer)
        if session is None:
            return None
        runner = session.runner
        iterations = single_iterations(checked_iteration(report, session.pp_rank, session.stage_rank), report)
        iteration = iterations[-1]
        clocks = checked_clocks(report)
        session.captured = report.captured
        session.gaps.reported(iteration.begin_ns, iteration.next_begin_ns)
        self.services.gpus.record_pause(session.gpu_uuid, is_paused=not iteration.next_begin_ns)
        runner.last_report_mono_ns = time.monotonic_ns()
        if not runner.job.is_ended:
            for single in iterations:
                runner.handle(RankReported(single))
                for setting in runner.settings:
                    setting.report(single)
            if runner.leases.is_suspended:
                self.spawn(runner.resume())
        if clocks:
            self._record_true_clocks(session.gpu_uuid, clocks)
        energy_j, power_w = runner.job.figures_per_gpu()
        return IterationReply(
            runner.delivery.reply_to(iteration),
            energy_per_gpu_j=energy_j,
            power_per_gpu_w=power_w,
            takes_several=True,
            takes_untimed=(takes_untimed := self._takes_untimed(runner)),
            takes_together=(is_one_rank := takes_untimed and runner.job.description.num_ranks == 1)
            and runner.is_observing,
            takes_spans=is_one_rank,
            figures=session.new_figures(runner.last_report_mono_ns),
        )

    def _takes_untimed(self, runner: JobRunner) -> bool:
        """Return whether most of a job's instructions need not be timed.

        The first plan and the profile need instruction times, and only they show waits for other replicas or hosts.
        """
        is_alone = not (runner.is_member or self.replicas.has_replicas(runner.job_id))
        return is_alone and runner.job.phase is JobPhase.TUNED

    def handle_pace(self, report: PaceReport, peer: PeerCredentials) -> PaceReply | None:
        """Handle the pace of replicas on other hosts; return the pace of this one, None for an unknown token.

        Raises:
            ProtocolError: a time is out of range.
        """
        session = self.sessions.of_hex_token(report.rank_token, peer)
        return None if session is None else self.replicas.handle_report(session.runner, report)

    def release(self, message: RankRelease, peer: PeerCredentials) -> ReleaseReply | None:
        """Release a rank, which ends its job; return the job's outcome, None for an unknown token."""
        session = self.sessions.of_hex_token(message.rank_token, peer)
        if session is None:
            return None
        self.sessions.remove(session)
        if message.reorder_refusal:
            session.runner.handle(OrdersRefused(message.reorder_refusal[:MAX_VALUE_CHARS]))
        session.runner.handle(RankReleased(session.pp_rank, session.stage_rank))
        return ReleaseReply(session.runner.outcome_line())

    async def release_finally(self, message: RankRelease, peer: PeerCredentials) -> ReleaseReply | None:
        """Release a rank and return the final outcome, or a preliminary one if the job's last commands take long."""
        session = self.sessions.of_hex_token(message.rank_token, peer)
        if session is None or self.release(message, peer) is None:
            return None
        return ReleaseReply(await session.runner.final_outcome_line(OUTCOME_LIMIT_S))

    # --- messages of the GPU worker ---

    def handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Record readings, and observe the iterations whose energy is thereby known."""
        for sample in samples:
            gpu = self.services.gpus.get(sample.gpu_uuid)
            if gpu is not None:
                for record in gpu.record_sample(sample):
                    self.services.history.write(record)
        self._observe_soon()

    def handle_clock_change(self, change: ClockChangeReport) -> None:
        """Record a clock change; if it failed, let the job fall back to full speed."""
        gpu = self.services.gpus.get(change.gpu_uuid)
        if gpu is None:
            return
        runner = self._runners.get(gpu.claim.job_id) if gpu.claim is not None else None
        if change.error is None:
            before = gpu.switching.reported
            if gpu.record_clock_change(change):
                record_latency(self.services.history, gpu, before)
                self._latency_changed(gpu)
        elif runner is not None:
            runner.control_lost(f"GPU {change.gpu_uuid}: {change.error}")

    def _record_true_clocks(self, gpu_uuid: str, clocks: Sequence[TrueClockRow]) -> None:
        gpu = self.services.gpus.get(gpu_uuid)
        before = None if gpu is None else gpu.switching.reported
        if gpu is not None and before is not None and gpu.record_true_clocks(clocks):
            record_latency(self.services.history, gpu, before)
            self._latency_changed(gpu)

    def _latency_changed(self, changed: Gpu) -> None:
        for gpu in self.services.gpus.of_same_model(changed):
            runner = self._runners.get(gpu.claim.job_id) if gpu.claim is not None else None
            if runner is not None:
                runner.gpu_changed(gpu)

    def _num_gpus_changed(self, by: JobRunner) -> None:
        """Update the other jobs' views of the number of GPUs that share the driver."""
        for gpu in self.services.gpus:
            runner = self._runners.get(gpu.claim.job_id) if gpu.claim is not None else None
            if runner is not None and runner is not by:
                runner.gpu_changed(gpu)

    def handle_gpu_health(self, change: GpuHealthChange) -> None:
        """Record the health of a GPU; a job with a GPU that cannot be controlled falls back to full speed."""
        gpu = self.services.gpus.get(change.gpu_uuid)
        if gpu is None:
            return
        gpu.health, gpu.detail = change.health, change.detail
        if change.health in _UNCONTROLLABLE and gpu.claim is not None:
            runner = self._runners.get(gpu.claim.job_id)
            if runner is not None:
                runner.control_lost(f"GPU {change.gpu_uuid} is {change.health}: {change.detail}")

    def handle_gpu_settings(self, read: GpuSettingsRead) -> None:
        """Record each setting of a GPU that has changed, and who changed it."""
        gpu = self.services.gpus.get(read.gpu_uuid)
        if gpu is None:
            return
        before_mhz, before_profiles = gpu.full_speed_clock_mhz, gpu.knobs.foreign_power_profiles
        for change in gpu.knobs.update(read):
            record_knob(self.services.history, gpu, change)
        runner = self._runners.get(gpu.claim.job_id) if gpu.claim is not None else None
        if runner is not None and gpu.knobs.foreign_power_profiles != before_profiles:
            runner.gpu_changed(gpu)
        if gpu.requested_sm_clock_mhz is None and gpu.full_speed_clock_mhz != before_mhz:
            gpu.record_restored(time.monotonic_ns())

    def handle_worker_lost(self, reason: str) -> None:
        """Let every job fall back to full speed, since no clock can be set now."""
        now_ns = time.monotonic_ns()
        for gpu in self.services.gpus:
            if gpu.requested_sm_clock_mhz is not None:
                gpu.record_restored(now_ns)
        for runner in self:
            runner.control_lost(reason)

    # --- time ---

    def host_slept(self, slept_s: float) -> None:
        """Let every job fall back after the host slept: clock locks may be lost and energy readings have a gap."""
        for gpu in self.services.gpus:
            gpu.counter.interrupt()
        for runner in self:
            runner.observer.drop_pending()
            runner.control_lost(f"the host slept for {slept_s:.0f} s")

    def check_time_limits(self) -> None:
        """Observe late iterations, withdraw the pace of silent replicas and suspend idle jobs; called every second."""
        now_ns = time.monotonic_ns()
        self._observe_soon()
        self.replicas.check_time_limits()
        for runner in self:
            last_ns = max(runner.last_report_mono_ns or runner.created_mono_ns, runner.resumed_mono_ns)
            baseline = runner.job.baseline
            typical_s = baseline.iteration_time_s if baseline is not None else 0.0
            silent_s = (now_ns - last_ns) / _NS_PER_S
            if runner.leases.are_held and silent_s > max(self.silence_limit_s, 3 * typical_s):
                self.spawn(runner.suspend(f"no report for {silent_s:.0f} s"))

    async def close(self, reason: str) -> None:
        """End every job; the caller restores the GPUs."""
        for session in self.sessions:
            self.sessions.remove(session)
        runners = list(self)
        for runner in runners:
            runner.handle(RankLost(0, reason))
        await asyncio.gather(*(runner.finish(LAST_COMMANDS_LIMIT_S) for runner in runners))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- inside ---

    def _observe_soon(self) -> None:
        """Observe iterations with known energy, one per event loop turn, so that requests are handled in between."""
        if not self._is_observing_soon:
            self._is_observing_soon = True
            asyncio.get_running_loop().call_soon(self._observe_one)

    def _observe_one(self) -> None:
        self._is_observing_soon = False
        if any(runner.observer.observe_one_if_covered() for runner in self):
            self._observe_soon()

    def _same_process(
        self, runner: JobRunner, registration: RankRegistration, peer: PeerCredentials
    ) -> RankSession | None:
        """Return the session of a process that registers again because it did not receive the first reply."""
        for session in self.sessions.of_job(runner.job_id):
            is_same_rank = (session.pp_rank, session.stage_rank) == (registration.pp_rank, registration.stage_rank)
            if is_same_rank and session.peer == peer:
                return session if session.gpu_uuid == registration.gpu_uuid else None
        return None

    def _reorder(
        self, runner: JobRunner, registration: RankRegistration, order: tuple[Instruction, ...], uid: int
    ) -> None:
        """Update a job for a rank that registers again with another number of microbatches.

        Raises:
            JobError: the registration contradicts its job in another way, or changes come too often.
        """
        ranks, first = runner.job.ranks, self._registrations[runner.job_id]
        index = ranks.description.rank_index(registration.pp_rank, registration.stage_rank)
        now = (ranks.description.num_microbatches, ranks.orders[registration.pp_rank])
        if ranks.changed_ranks.get(index, now) == (registration.num_microbatches, order):
            return
        require_agreement(registration, replace(first, num_microbatches=registration.num_microbatches))
        self.require_rate(uid)
        self.rates.count(uid)
        event = RankChangedMicrobatches(
            registration.pp_rank, order, registration.num_microbatches, registration.stage_rank
        )
        runner.microbatches_changed(event)
        if not ranks.changed_ranks:
            self._registrations[runner.job_id] = replace(first, num_microbatches=registration.num_microbatches)
            log.info("job %s: %s", runner.job_id, runner.job.notices.last)

    def _registered(self, session: RankSession) -> RankRegistered:
        job_id = session.runner.job_id
        observes = self.services.is_observing
        message = joining_message(session.runner.job, self._registrations[job_id], is_observing=observes)
        return RankRegistered(job_id, session.token.hex(), self.clock_socket_path, PROTOCOL_VERSION, message)

    def _runner_for(self, registration: RankRegistration, peer: PeerCredentials) -> JobRunner:
        policy = self.full_policy_name(registration.policy or self.default_policy)
        description = job_description(registration, policy, self.default_max_slowdown_ratio)
        owner = LeaseOwner(description.job_id, peer.pid, peer.uid)
        return self.new_runner(Job(description, self.rules_for(registration)), owner, registration)

    def full_policy_name(self, name: str) -> str:
        """Return the name of a policy with its options: those given after the name, else those of the settings.

        Raises:
            UnknownPolicyError: it is not installed, or the options are malformed.
        """
        self.policies.require(name)
        return with_default_options(name, self.policy_options)

    def new_runner(self, job: Job, owner: LeaseOwner, registration: RankRegistration) -> JobRunner:
        return JobRunner(
            job, self.services, self.replicas, owner, self._job_ended, is_member=registration.is_pipeline_member
        )

    def _is_late(self, session: RankSession) -> None:
        self.clock_requests.request_full_speed(session)

    def _process_ended(self, session: RankSession, end: ProcessEnd) -> None:
        process = f"process {session.peer.pid} {end.text}".rstrip()
        if end.is_failure:
            session.runner.handle(RankLost(session.pp_rank, process, session.stage_rank))
        else:
            how = f"ended without leaving the job ({process})"
            session.runner.handle(RankReleased(session.pp_rank, session.stage_rank, how))

    def _job_ended(self, runner: JobRunner) -> None:
        self.ended.append(
            EndedJob(
                job_id=runner.job_id,
                job_name=runner.job.description.job_name,
                replica_name=self.replica_name(runner),
                ended_mono_ns=time.monotonic_ns(),
                outcome=runner.outcome(),
                line=runner.outcome_line(),
                estimate=runner.job.estimate(),
            )
        )
        self.services.gpus.release(runner.job_id)
        self._runners.pop(runner.job_id, None)
        self.replicas.leave(runner.job_id)
        self.accounts.leave(runner.job_id)
        self._num_gpus_changed(runner)
        for key in [key for key, open_runner in self._open.items() if open_runner is runner]:
            del self._open[key]
        for on_end in self.on_end:
            on_end(runner)
        self._registrations.pop(runner.job_id, None)

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine in the background until it is done or the daemon stops."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
