"""Who takes part in which job: registration, tokens, reports, clock records, and the death of a training process."""

import asyncio
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpuenergyd.core.job import Job
from gpuenergyd.core.job_description import JobDescription
from gpuenergyd.core.job_rules import JobRules, part_rules
from gpuenergyd.core.messages import RankJoined, RankLost, RankReleased, RankReported
from gpuenergyd.core.pipeline import Instruction, InstructionKind
from gpuenergyd.core.switching import SwitchLatency
from gpuenergyd.core.target import PerformanceTarget
from gpuenergyd.core.telemetry import MeasuredInstruction, RankIteration
from gpuenergyd.daemon.gpus import Claim, Gpu, utc_at
from gpuenergyd.daemon.hand_over import HandedJob, HandedSession, memory_of, recalled
from gpuenergyd.daemon.job_length import checked_length
from gpuenergyd.daemon.job_runner import JobRunner
from gpuenergyd.daemon.job_tags import checked_tags
from gpuenergyd.daemon.peers import Peer
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.daemon.replicas import Replicas
from gpuenergyd.errors import GpuEnergyError, JobError, ProtocolError, UnknownPolicyError
from gpuenergyd.gpu.link import ClockSet, GpuHealth, GpuSample, GpuStateChange, LeaseOwner
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd.store.records import ControlEventRecord, JobRecord, JobResumedRecord, RankRecord
from gpuenergyd.wire import PROTOCOL_VERSION
from gpuenergyd.wire.clock_record import TOKEN_BYTES, ClockRecord
from gpuenergyd.wire.messages import (
    InstructionRow,
    IterationReply,
    IterationReport,
    PaceReply,
    PaceReport,
    RankRegistered,
    RankRegistration,
)

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000
_OLDEST_INSTANT_NS = 86_400 * _NS_PER_S
_CLOCK_SKEW_NS = _NS_PER_S
_LAST_COMMANDS_LIMIT_S = 5.0
_MAX_RANKS = 4096
_MAX_MICROBATCHES = 65_536
_MAX_LATER_NS = 3600 * _NS_PER_S
_LOST_FOR_CONTROL = frozenset({GpuHealth.LOST, GpuHealth.WEDGED, GpuHealth.OBSERVE_ONLY})

JobKey = tuple[int, str, str, int]
"""uid, job name, run key, data-parallel rank."""


class Wish(StrEnum):
    """What became of a clock record."""

    TAKEN = "taken"
    STALE = "stale"
    """From a plan that no longer counts: the sender has not heard of the next one yet."""
    HOSTILE = "hostile"
    """No well-behaved client sends this."""


@dataclass(slots=True)
class RankSession:
    """One training process that has registered."""

    token: bytes
    runner: JobRunner
    pp_rank: int
    gpu_uuid: str
    peer: Peer
    pidfd: int
    supported_sm_clocks_mhz: frozenset[int]
    last_sequence: int = 0


@dataclass(slots=True)
class Jobs:
    """All jobs and ranks of this daemon, owned by the event loop."""

    services: JobServices
    rules: JobRules
    default_policy: str
    default_max_slowdown_ratio: float
    installed_policies: tuple[str, ...]
    clock_socket_path: str
    max_ranks_per_user: int
    silence_limit_s: float
    num_hostile_records: int = 0
    num_stale_records: int = 0
    _runners: dict[str, JobRunner] = field(default_factory=dict)
    _open: dict[JobKey, JobRunner] = field(default_factory=dict)
    _registrations: dict[str, RankRegistration] = field(default_factory=dict)
    _sessions: dict[bytes, RankSession] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _is_observing_soon: bool = False
    replicas: Replicas = field(default_factory=Replicas)

    def __iter__(self) -> Iterator[JobRunner]:
        return iter(list(self._runners.values()))

    def runner(self, job_id: str) -> JobRunner | None:
        """Return a job that has not ended."""
        return self._runners.get(job_id)

    def sessions_of(self, job_id: str) -> tuple[RankSession, ...]:
        """Return the processes of a job, by rank."""
        mine = [s for s in self._sessions.values() if s.runner.job_id == job_id]
        return tuple(sorted(mine, key=lambda s: s.pp_rank))

    # --- joining ---

    def register(self, registration: RankRegistration, peer: Peer, pidfd: int) -> RankRegistered:
        """Take a training process into its job; on success the pidfd is ours.

        Raises:
            ProtocolError, ScheduleError, TargetError, UnknownPolicyError: the registration makes no sense.
            GpuNotFoundError: no such GPU.
            JobError: it contradicts its job, or the GPU works for another.
        """
        order = _checked_order(registration)
        checked_length(registration)
        checked_tags(registration.tags)
        gpu = self.services.gpus[registration.gpu_uuid]
        key = (peer.uid, registration.job_name, registration.run_key, registration.dp_rank)
        runner = self._open.get(key)
        if runner is not None and (known := self._same_process(runner, registration, peer)) is not None:
            os.close(pidfd)
            return self._registered(known)
        if sum(s.peer.uid == peer.uid for s in self._sessions.values()) >= self.max_ranks_per_user:
            raise JobError(f"uid {peer.uid} has {self.max_ranks_per_user} ranks registered, which is the limit")
        is_new = runner is None
        if runner is None:
            runner = self._new_runner(registration, peer)
        else:
            _require_agreement(registration, self._registrations[runner.job_id])
        job_id = runner.job_id
        self.services.gpus.claim(
            registration.gpu_uuid, Claim(job_id, registration.job_name, peer.uid, time.monotonic_ns())
        )
        try:
            runner.take(RankJoined(registration.pp_rank, order, gpu.view()))
        except JobError:
            gpu.claim = None
            raise
        if is_new:
            self._open[key] = self._runners[job_id] = runner
            self._registrations[job_id] = registration
            if not registration.is_part:  # its pipeline as a whole is the replica
                self.replicas.join(key[:3], runner)
            self._record_job(runner, registration, peer)
            self.spawn(self.services.policy.expect(runner.job.description.policy))
            runner.start()
        session = RankSession(
            token=secrets.token_bytes(TOKEN_BYTES),
            runner=runner,
            pp_rank=registration.pp_rank,
            gpu_uuid=registration.gpu_uuid,
            peer=peer,
            pidfd=pidfd,
            supported_sm_clocks_mhz=frozenset(gpu.identity.supported_sm_clocks_mhz),
        )
        self._sessions[session.token] = session
        runner.pidfds[session.pp_rank], runner.pids[session.pp_rank] = pidfd, session.peer.pid
        asyncio.get_running_loop().add_reader(pidfd, self._process_died, session)
        self.services.history.write(
            RankRecord(
                job_id,
                registration.pp_rank,
                registration.gpu_uuid,
                gpu.identity.model_name,
                peer.pid,
                peer.uid,
                utc_at(time.monotonic_ns()),
            )
        )
        log.info("job %s: rank %d joined (%s, %s)", job_id, registration.pp_rank, registration.gpu_uuid, peer)
        return self._registered(session)

    # --- what ranks say ---

    def report(self, report: IterationReport, peer: Peer) -> IterationReply | None:
        """Take an iteration and return the plans that the rank does not have; None for an unknown token.

        Raises:
            ProtocolError: instants or instructions that cannot be.
        """
        session = self.session(report.rank_token, peer)
        if session is None:
            return None
        runner = session.runner
        iteration = _checked_iteration(report, session.pp_rank)
        runner.last_report_mono_ns = time.monotonic_ns()
        if not runner.job.is_ended:
            runner.take(RankReported(iteration))
            if runner.is_suspended:
                self.spawn(runner.resume())
        return IterationReply(runner.plans_for(iteration))

    def take_pace(self, report: PaceReport, peer: Peer) -> PaceReply | None:
        """Take what replicas elsewhere need, and return what this one needs; None for an unknown token.

        Raises:
            ProtocolError: a time that cannot be one.
        """
        session = self.session(report.rank_token, peer)
        return None if session is None else self.replicas.told(session.runner, report)

    def release(self, rank_token: str, peer: Peer) -> bool:
        """Let a rank go; return whether the token was known."""
        session = self.session(rank_token, peer)
        if session is None:
            return False
        self._forget(session)
        session.runner.take(RankReleased(session.pp_rank))
        return True

    def take_clock_record(self, record: ClockRecord, peer: Peer) -> Wish:
        """Check a clock record and pass its wish on to the worker."""
        session = self._sessions.get(record.token)
        if session is None or session.peer.uid != peer.uid:
            return self._hostile()
        now_ns = time.monotonic_ns()
        clocks = {clock for clock in (record.sm_clock_mhz, record.later_sm_clock_mhz) if clock}
        is_possible = (
            0 < (record.sequence - session.last_sequence) % 2**32 < 2**31
            and clocks
            and clocks <= session.supported_sm_clocks_mhz
            and record.plan_epoch <= session.runner.last_epoch
            and now_ns - _OLDEST_INSTANT_NS < record.sent_mono_ns <= now_ns + _CLOCK_SKEW_NS
            and record.later_at_mono_ns <= now_ns + _MAX_LATER_NS
        )
        if not is_possible:
            return self._hostile()
        session.last_sequence = record.sequence
        if not session.runner.accepts(record.plan_epoch):
            self.num_stale_records += 1
            return Wish.STALE
        gpu = self.services.gpus[session.gpu_uuid]
        gpu.requested_sm_clock_mhz = record.sm_clock_mhz or record.later_sm_clock_mhz
        self.services.worker.want(
            session.gpu_uuid,
            record.sm_clock_mhz,
            later_sm_clock_mhz=record.later_sm_clock_mhz,
            later_at_mono_ns=record.later_at_mono_ns,
            asked_mono_ns=record.sent_mono_ns,
            reason=f"{session.runner.job_id} epoch {record.plan_epoch}",
        )
        return Wish.TAKEN

    # --- what the worker says ---

    def take_samples(self, samples: Sequence[GpuSample]) -> None:
        """Note readings; iterations that they complete are observed."""
        for sample in samples:
            gpu = self.services.gpus.known(sample.gpu_uuid)
            if gpu is not None:
                for record in gpu.take_sample(sample):
                    self.services.history.write(record)
        self._observe_soon()

    def take_clock_set(self, change: ClockSet) -> None:
        """Note a clock change."""
        gpu = self.services.gpus.known(change.gpu_uuid)
        if gpu is None:
            return
        runner = self._runners.get(gpu.claim.job_id) if gpu.claim is not None else None
        if change.error is None:
            before = gpu.switching.latency
            if gpu.take_clock_set(change):
                self._record_latency(gpu, before)
                if runner is not None:
                    runner.gpu_changed(gpu)
        elif runner is not None:
            runner.control_lost(f"GPU {change.gpu_uuid}: {change.error}")

    def take_gpu_state(self, change: GpuStateChange) -> None:
        """Note how a GPU is; a job with a GPU that cannot be controlled goes to full speed."""
        gpu = self.services.gpus.known(change.gpu_uuid)
        if gpu is None:
            return
        gpu.health, gpu.detail = change.health, change.detail
        if change.health in _LOST_FOR_CONTROL and gpu.claim is not None:
            runner = self._runners.get(gpu.claim.job_id)
            if runner is not None:
                runner.control_lost(f"GPU {change.gpu_uuid} is {change.health}: {change.detail}")

    def worker_lost(self, reason: str) -> None:
        """Take every job to full speed: nobody can set clocks now."""
        now_ns = time.monotonic_ns()
        for gpu in self.services.gpus:
            if gpu.requested_sm_clock_mhz is not None:
                gpu.note_restored(now_ns)
        for runner in self:
            runner.control_lost(reason)

    # --- time ---

    def host_slept(self, slept_s: float) -> None:
        """Begin anew after the host has slept: the driver may have forgotten every lock, and energy has a gap."""
        for gpu in self.services.gpus:
            gpu.counter.begin_anew()
        for runner in self:
            runner.forget_unobserved()
            runner.control_lost(f"the host slept for {slept_s:.0f} s")

    def look_after(self) -> None:
        """Do what time asks for: call it about once a second."""
        now_ns = time.monotonic_ns()
        self._observe_soon()
        self.replicas.look_after()
        for runner in self:
            last_ns = runner.last_report_mono_ns or runner.created_mono_ns
            baseline = runner.job.baseline
            typical_s = baseline.iteration_time_s if baseline is not None else 0.0
            silent_s = (now_ns - last_ns) / _NS_PER_S
            if runner.holds_clocks and silent_s > max(self.silence_limit_s, 3 * typical_s):
                self.spawn(runner.suspend(f"no report for {silent_s:.0f} s"))

    async def close(self, reason: str) -> None:
        """End every job; the caller restores the GPUs."""
        for session in list(self._sessions.values()):
            self._forget(session)
        runners = list(self)
        for runner in runners:
            runner.take(RankLost(0, reason))
        await asyncio.gather(*(runner.finish(_LAST_COMMANDS_LIMIT_S) for runner in runners))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- from one daemon to the next ---

    async def hand_over(self) -> tuple[HandedJob, ...]:
        """Stop working on every job without ending it; return what the next daemon goes on with."""
        runners = [runner for runner in self if not runner.job.is_ended]
        handed = await asyncio.gather(*(runner.pause(_LAST_COMMANDS_LIMIT_S) for runner in runners))
        jobs = []
        for runner, memory in zip(runners, handed, strict=True):
            if runner.job.is_ended:
                continue
            jobs.append(
                HandedJob(
                    description=runner.job.description,
                    memory=memory_of(runner.job),
                    registration=self._registrations[runner.job_id],
                    runner=memory,
                    sessions=tuple(self._handed(session) for session in self.sessions_of(runner.job_id)),
                )
            )
        return tuple(jobs)

    def take_over(self, handed: HandedJob, *, holds_leases: bool) -> None:
        """Go on with a job of an earlier daemon; whoever took part in it and is dead by now is lost to it.

        Raises:
            GpuEnergyError: it cannot be gone on with.
        """
        is_part = handed.registration.is_part
        job = recalled(handed.description, part_rules(self.rules) if is_part else self.rules, handed.memory)
        job.forget_question()
        runner = JobRunner(job, self.services, handed.runner.owner, self._job_ended, is_part=is_part)
        runner.posted = job.current_plan
        runner.recall(handed.runner)
        job_id, first = runner.job_id, handed.registration
        for known in handed.sessions:
            claim = Claim(job_id, first.job_name, known.peer.uid, time.monotonic_ns())
            try:
                self.services.gpus.claim(known.gpu_uuid, claim)
            except GpuEnergyError:
                self.services.gpus.release(job_id)
                raise
        uid = handed.sessions[0].peer.uid if handed.sessions else runner.owner.uid
        self._open[uid, first.job_name, first.run_key, first.dp_rank] = self._runners[job_id] = runner
        self.spawn(self.services.policy.expect(job.description.policy))
        self._registrations[job_id] = first
        if not is_part:
            self.replicas.join((uid, first.job_name, first.run_key), runner)
        self.services.history.write(JobResumedRecord(job_id))
        runner.start()
        if job.target.is_forced:
            runner.straggler_changed(None, "the daemon was restarted: what other replicas take is looked at anew")
        dead = [known for known in handed.sessions if not self._readmit(runner, known)]
        log.info("job %s: taken over in phase %s with plan %s", job_id, job.phase, job.current_plan.plan_id)
        if not holds_leases:
            runner.control_lost("its GPUs were given back while the daemon was away")
        for known in dead:
            runner.take(RankLost(known.pp_rank, f"process {known.peer.pid} died"))

    def _handed(self, session: RankSession) -> HandedSession:
        return HandedSession(
            token=session.token,
            pp_rank=session.pp_rank,
            gpu_uuid=session.gpu_uuid,
            peer=session.peer,
            start_ticks=process_start_ticks(session.peer.pid) or 0,
            last_sequence=session.last_sequence,
            requested_sm_clock_mhz=self.services.gpus[session.gpu_uuid].requested_sm_clock_mhz,
        )

    def _readmit(self, runner: JobRunner, known: HandedSession) -> bool:
        """Know a training process again by its token; return whether it still lives."""
        try:
            pidfd = os.pidfd_open(known.peer.pid)
        except OSError:
            return False
        if not known.is_alive:
            os.close(pidfd)
            return False
        gpu = self.services.gpus[known.gpu_uuid]
        if known.requested_sm_clock_mhz is not None:
            gpu.requested_sm_clock_mhz = known.requested_sm_clock_mhz
            gpu.clocks.record(time.monotonic_ns(), known.requested_sm_clock_mhz)
        session = RankSession(
            token=known.token,
            runner=runner,
            pp_rank=known.pp_rank,
            gpu_uuid=known.gpu_uuid,
            peer=known.peer,
            pidfd=pidfd,
            supported_sm_clocks_mhz=frozenset(gpu.identity.supported_sm_clocks_mhz),
            last_sequence=known.last_sequence,
        )
        self._sessions[session.token] = session
        runner.pidfds[session.pp_rank], runner.pids[session.pp_rank] = pidfd, session.peer.pid
        asyncio.get_running_loop().add_reader(pidfd, self._process_died, session)
        return True

    # --- inside ---

    def _observe_soon(self) -> None:
        """Observe what is covered by now, one iteration per turn of the event loop: requests come in between."""
        if not self._is_observing_soon:
            self._is_observing_soon = True
            asyncio.get_running_loop().call_soon(self._observe_one)

    def _observe_one(self) -> None:
        self._is_observing_soon = False
        if any(runner.observe_one_if_covered() for runner in self):
            self._observe_soon()

    def session(self, rank_token: str, peer: Peer) -> RankSession | None:
        """Return the session of a token that belongs to its sender; None for any other."""
        try:
            token = bytes.fromhex(rank_token)
        except ValueError:
            return None
        session = self._sessions.get(token)
        if session is None or not hmac.compare_digest(session.token, token) or session.peer.uid != peer.uid:
            return None
        return session

    def _same_process(self, runner: JobRunner, registration: RankRegistration, peer: Peer) -> RankSession | None:
        """Return the session of a process that registers again because the first answer did not reach it."""
        for session in self.sessions_of(runner.job_id):
            if session.pp_rank == registration.pp_rank and session.peer == peer:
                return session if session.gpu_uuid == registration.gpu_uuid else None
        return None

    def _registered(self, session: RankSession) -> RankRegistered:
        return RankRegistered(session.runner.job_id, session.token.hex(), self.clock_socket_path, PROTOCOL_VERSION)

    def _new_runner(self, registration: RankRegistration, peer: Peer) -> JobRunner:
        policy = registration.policy or self.default_policy
        if policy not in self.installed_policies:
            installed = ", ".join(self.installed_policies) or "none"
            raise UnknownPolicyError(f"no policy {policy!r}; installed: {installed}")
        ratio = registration.max_slowdown_ratio
        job_id = _new_job_id(registration.job_name)
        description = JobDescription(
            job_id=job_id,
            job_name=registration.job_name,
            num_pp_ranks=registration.num_pp_ranks,
            schedule_name=registration.schedule_name,
            num_microbatches=registration.num_microbatches,
            num_chunks=registration.num_chunks,
            policy=policy,
            target=PerformanceTarget(self.default_max_slowdown_ratio if ratio is None else ratio),
            length=checked_length(registration),
        )
        is_part = registration.is_part
        rules = part_rules(self.rules) if is_part else self.rules
        owner = LeaseOwner(job_id, peer.pid, peer.uid)
        return JobRunner(Job(description, rules), self.services, owner, self._job_ended, is_part=is_part)

    def _record_job(self, runner: JobRunner, registration: RankRegistration, peer: Peer) -> None:
        description = runner.job.description
        self.services.history.write(
            JobRecord(
                job_id=runner.job_id,
                job_name=registration.job_name,
                run_key=registration.run_key,
                dp_rank=registration.dp_rank,
                policy=description.policy,
                schedule_name=registration.schedule_name,
                framework=registration.framework,
                is_simulated=self.services.gpus[registration.gpu_uuid].identity.is_simulated,
                num_ranks=registration.num_pp_ranks,
                num_microbatches=registration.num_microbatches,
                max_slowdown_ratio=description.target.max_slowdown_ratio,
                uid=peer.uid,
                started_at=utc_at(runner.created_mono_ns),
                tags=checked_tags(registration.tags),
            )
        )

    def _record_latency(self, gpu: Gpu, before: SwitchLatency) -> None:
        """Keep what clock changes are planned with from now on."""
        self.services.history.write(
            ControlEventRecord(
                at=utc_at(time.monotonic_ns()),
                action="switch_latency",
                actor="core",
                job_id=gpu.claim.job_id if gpu.claim is not None else None,
                gpu_uuid=gpu.identity.gpu_uuid,
                reason=f"{gpu.switching.num_seen} clock changes seen",
                before=_latency_text(before),
                after=_latency_text(gpu.switching.latency),
            )
        )

    def _process_died(self, session: RankSession) -> None:
        log.info("job %s: rank %d died (%s)", session.runner.job_id, session.pp_rank, session.peer)
        self._forget(session)
        session.runner.take(RankLost(session.pp_rank, f"process {session.peer.pid} died"))

    def _forget(self, session: RankSession) -> None:
        if self._sessions.pop(session.token, None) is not None:
            session.runner.pidfds.pop(session.pp_rank, None)
            session.runner.pids.pop(session.pp_rank, None)
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)

    def _job_ended(self, runner: JobRunner) -> None:
        self.services.gpus.release(runner.job_id)
        self._runners.pop(runner.job_id, None)
        self._registrations.pop(runner.job_id, None)
        self.replicas.leave(runner.job_id)
        for key in [key for key, open_runner in self._open.items() if open_runner is runner]:
            del self._open[key]

    def _hostile(self) -> Wish:
        self.num_hostile_records += 1
        return Wish.HOSTILE

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until it is done or the daemon ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _latency_text(latency: SwitchLatency) -> str:
    return f"raise {1000 * latency.raise_s:.3g} ms, lower {1000 * latency.lower_s:.3g} ms, {latency.basis}"


def _new_job_id(job_name: str) -> str:
    readable = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-")[:40] or "job"
    return f"{readable}-{secrets.token_hex(3)}"


def _checked_order(registration: RankRegistration) -> tuple[Instruction, ...]:
    if registration.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol version {registration.protocol_version}; this daemon speaks version {PROTOCOL_VERSION}"
        )
    for name, lowest, highest in (
        ("num_pp_ranks", 1, _MAX_RANKS),
        ("pp_rank", 0, registration.num_pp_ranks - 1),
        ("dp_rank", 0, 2**31 - 1),
        ("num_microbatches", 1, _MAX_MICROBATCHES),
        ("num_chunks", 1, _MAX_RANKS),
    ):
        value = getattr(registration, name)
        if not lowest <= value <= highest:
            raise ProtocolError(f"{name} {value} must be in [{lowest}, {highest}]")
    if registration.is_part and registration.num_pp_ranks != 1:
        raise ProtocolError(f"num_pp_ranks {registration.num_pp_ranks}: a part of a pipeline is one rank")
    if not registration.order:
        raise ProtocolError("order: a rank runs one instruction at least")
    return tuple(
        _instruction(registration.pp_rank, kind, microbatch, chunk) for kind, microbatch, chunk in registration.order
    )


def _checked_iteration(report: IterationReport, pp_rank: int) -> RankIteration:
    now_ns = time.monotonic_ns()
    oldest_ns, newest_ns = max(1, now_ns - _OLDEST_INSTANT_NS), now_ns + _CLOCK_SKEW_NS
    next_ns = report.next_begin_mono_ns or report.end_mono_ns
    if not oldest_ns <= report.begin_mono_ns <= report.end_mono_ns <= next_ns <= newest_ns:
        raise ProtocolError(
            f"begin {report.begin_mono_ns}, end {report.end_mono_ns}, next begin {report.next_begin_mono_ns}:"
            " instants must be of this host's monotonic clock, in order"
        )
    if not 0 <= report.iteration_index < 2**53:
        raise ProtocolError(f"iteration_index {report.iteration_index} must be in [0, 2**53)")
    return RankIteration(
        pp_rank=pp_rank,
        iteration_index=report.iteration_index,
        plan_epoch=report.plan_epoch,
        begin_ns=report.begin_mono_ns,
        end_ns=report.end_mono_ns,
        next_begin_ns=report.next_begin_mono_ns,
        instructions=tuple(_measured(pp_rank, row, oldest_ns, newest_ns) for row in report.instructions),
    )


def _measured(pp_rank: int, row: InstructionRow, oldest_ns: int, newest_ns: int) -> MeasuredInstruction:
    kind, microbatch, chunk, begin_ns, end_ns = row
    if not oldest_ns <= begin_ns <= end_ns <= newest_ns:
        raise ProtocolError(f"instruction {kind}{microbatch}: begin {begin_ns} and end {end_ns} cannot be")
    return MeasuredInstruction(_instruction(pp_rank, kind, microbatch, chunk), begin_ns, end_ns)


def _instruction(pp_rank: int, kind: str, microbatch_index: int, chunk_index: int) -> Instruction:
    if kind not in InstructionKind.__members__:
        raise ProtocolError(f"instruction kind {kind!r}; known: {', '.join(InstructionKind)}")
    if not (0 <= microbatch_index < _MAX_MICROBATCHES and 0 <= chunk_index < _MAX_RANKS):
        raise ProtocolError(f"instruction {kind}{microbatch_index} of chunk {chunk_index}: no such index")
    return Instruction(pp_rank, InstructionKind(kind), microbatch_index, chunk_index)


def _require_agreement(registration: RankRegistration, first: RankRegistration) -> None:
    for name in ("num_pp_ranks", "schedule_name", "num_microbatches", "num_chunks", "policy", "max_slowdown_ratio"):
        mine, theirs = getattr(registration, name), getattr(first, name)
        if mine != theirs:
            raise JobError(
                f"{name} {mine!r} of rank {registration.pp_rank} contradicts {theirs!r} of rank {first.pp_rank}"
                f" in job {registration.job_name!r}"
            )
