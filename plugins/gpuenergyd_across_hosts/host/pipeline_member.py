"""Members of pipelines across hosts: their stages, their plans, and the pipelines led by a rank of this host."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from gpuenergyd.core.job.messages import TargetChanged
from gpuenergyd.core.pipeline.plan import check_plan
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.jobs.replicas import MAX_PACE_S
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.jobs.sessions import RankSession
from gpuenergyd.daemon.ports import HistoryPort
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import GpuEnergyError, JobError, ProtocolError
from gpuenergyd.store.records import ControlEventRecord, pipeline_id_of
from gpuenergyd.wire import MAX_REPLY_BYTES
from gpuenergyd.wire.daemon_codec import encode
from gpuenergyd.wire.messages import IterationReply
from gpuenergyd_across_hosts.host.host_stage import HostStage
from gpuenergyd_across_hosts.host.pipeline_leader import PipelineLeader
from gpuenergyd_across_hosts.host.validation import MAX_PERMITTED_RATIO, checked_plan, checked_size
from gpuenergyd_across_hosts.messages.pipeline_messages import (
    MemberPlan,
    MemberQuery,
    MemberReply,
    PipelineReply,
    PipelineReport,
)

log = logging.getLogger(__name__)

_MAX_REASONS_PER_JOB = 32
"""Most reasons recorded per job; some contain numbers, so their variety is unlimited."""
_NS_PER_S = 1e9


@dataclass(slots=True)
class _Refusal:
    """The last refusal of one kind of a job's messages."""

    reason: str
    at_mono_ns: int
    num_messages: int = 0


@dataclass(slots=True)
class Refusals:
    """The refused messages of this daemon's pipeline members, whose ranks then run at full speed."""

    history: HistoryPort
    _last: dict[tuple[str, str], _Refusal] = field(default_factory=dict)
    """The last refusal, by job id and kind of message."""
    _recorded: dict[str, set[str]] = field(default_factory=dict)
    """Reasons already recorded, by job id."""

    @contextmanager
    def of(self, job_id: str, kind: str) -> Iterator[None]:
        """Record an error raised in the block as a refusal; success clears the last refusal of this kind of message."""
        try:
            yield
        except GpuEnergyError as error:
            self.record(job_id, str(error), kind)
            raise
        self._last.pop((job_id, kind), None)

    def record(self, job_id: str, reason: str, kind: str = "") -> None:
        """Record that a message of a job was refused; ranks repeat such messages many times a second."""
        now_ns = time.monotonic_ns()
        known = self._last.get((job_id, kind))
        num_before = known.num_messages if known is not None and known.reason == reason else 0
        self._last[job_id, kind] = _Refusal(reason, now_ns, num_before + 1)
        recorded = self._recorded.setdefault(job_id, set())
        if reason in recorded or len(recorded) >= _MAX_REASONS_PER_JOB:
            return
        recorded.add(reason)
        log.warning("job %s: message refused, the pipeline runs at full speed: %s", job_id, reason)
        self.history.write(ControlEventRecord(utc_at(now_ns), "refusal", "pipeline", job_id, None, reason))

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """Drop the refusals of jobs for which `is_kept` is false."""
        self._last = {key: last for key, last in self._last.items() if is_kept(key[0])}
        self._recorded = {job_id: reasons for job_id, reasons in self._recorded.items() if is_kept(job_id)}

    def status_fields(self, job_id: str) -> dict[str, Any] | None:
        """Return a job's last refusal: reason, age, and how many such messages in a row; None without one."""
        own = [last for (job, _), last in self._last.items() if job == job_id]
        if not own:
            return None
        last = max(own, key=lambda refusal: refusal.at_mono_ns)
        age_s = (time.monotonic_ns() - last.at_mono_ns) / _NS_PER_S
        return {"reason": last.reason, "age_s": age_s, "num_messages": last.num_messages}


_DELIVERY_LIMIT_S = 0.5
_STATE, _POSTED_PLAN, _PIPELINE = "state of a member", "plan for a member", "report of the pipeline"
"""Kinds of messages; refusals are tracked separately for each kind."""
_StageKey = tuple[int, str, str, int, int]
"""uid, job name, run, data-parallel rank, pipeline rank."""


@dataclass(slots=True)
class PipelineMembers:
    """The members of pipelines across hosts that run on this host, their stages, and the leaders among them."""

    jobs: Jobs
    _leaders: dict[str, PipelineLeader] = field(default_factory=dict)
    """The leaders on this host, by the job id of the leading member."""
    _stages: dict[_StageKey, HostStage] = field(default_factory=dict)
    refusals: Refusals = field(init=False)

    def __post_init__(self) -> None:
        self.refusals = Refusals(self.jobs.services.history)
        self.jobs.on_end.append(self._job_ended)

    def state(self, query: MemberQuery, peer: PeerCredentials) -> MemberReply | None:
        """Return the stage's report if this member sends it for the stage, else only the leader's agreement.

        The reply is None for an unknown token.

        Raises:
            JobError: the rank belongs to an ordinary job, or the ranks of its stage do not fit together.
            ProtocolError: the rank's place is missing or out of range.
        """
        session = self._session(query.rank_token, peer)
        if session is None:
            return None
        with self.refusals.of(session.runner.job_id, _STATE):
            return self._state(query, session)

    def _state(self, query: MemberQuery, session: RankSession) -> MemberReply:
        place, runner = query.place, session.runner
        if place is None:
            raise ProtocolError(
                "the rank does not say its place in the pipeline: its program uses another version of gpuenergyd;"
                " all hosts of a job must run the same version"
            )
        num_pp_ranks, num_tp_ranks = checked_size(place)
        if not (0 <= place.pp_rank < num_pp_ranks and 0 <= place.tp_rank < num_tp_ranks):
            raise ProtocolError(
                f"place {place.pp_rank}.{place.tp_rank}: outside of {num_pp_ranks} x {count_text(num_tp_ranks, 'rank')}"
            )
        key = (session.peer.uid, runner.job.description.job_name, place.run, place.dp_rank, place.pp_rank)
        stage = self._stages.get(key)
        if stage is None or (stage.num_pp_ranks, stage.num_tp_ranks) != (num_pp_ranks, num_tp_ranks):
            self._stages = {k: stage for k, stage in self._stages.items() if not stage.is_ended}
            zone = self.jobs.services.carbon_zone
            stage = self._stages[key] = HostStage(place.pp_rank, num_pp_ranks, num_tp_ranks, zone)
        gpus = self.jobs.services.gpus
        stage.update(place.tp_rank, query, runner.job, gpus.view(gpus[session.gpu_uuid]))
        reply = MemberReply(runner.job.phase, place.tp_rank == stage.carrier, agreement=stage.agreement)
        if not reply.is_carrier or stage.is_changing:
            return reply
        facts = stage.facts()
        is_known = facts.facts_id == query.known_facts
        return replace(reply, report=stage.report(), facts=None if is_known else facts)

    async def post_plan(self, message: MemberPlan, peer: PeerCredentials) -> IterationReply | None:
        """Let a member follow a plan from the plan window that its leader grants; return None for an unknown token.

        The reply holds the member's slice if it is ready by then, so that the rank need not wait for its next report.

        Raises:
            JobError: the rank belongs to an ordinary job.
            ProtocolError: the plan does not fit the member or its GPU.
        """
        session = self._session(message.rank_token, peer)
        if session is None:
            return None
        with self.refusals.of(session.runner.job_id, _POSTED_PLAN):
            self._install(message, session)
        await session.runner.idle(_DELIVERY_LIMIT_S)
        return IterationReply(session.runner.delivery.pop(session.pp_rank))

    def _install(self, message: MemberPlan, session: RankSession) -> None:
        runner = session.runner
        schedule = runner.job.ranks.schedule
        if schedule is None:
            raise JobError("the rank has not joined its job yet")
        plan = checked_plan(message.plan)
        if message.plan.num_microbatches not in {0, runner.job.description.num_microbatches}:
            return  # the leader is about to learn that the order has changed
        clocks = self.jobs.services.gpus[session.gpu_uuid].identity.supported_sm_clocks_mhz
        try:
            check_plan(plan, schedule, [clocks])
        except GpuEnergyError as error:
            raise ProtocolError(str(error)) from None
        straggler_time_s = message.plan.straggler_time_s
        if straggler_time_s is not None and not 0 < straggler_time_s < MAX_PACE_S:
            raise ProtocolError(f"straggler_time_s {straggler_time_s} must be in (0, {MAX_PACE_S:g}) s")
        ratio = message.plan.permitted_slowdown_ratio
        if ratio is not None and not 0 <= ratio < MAX_PERMITTED_RATIO:
            raise ProtocolError(f"permitted_slowdown_ratio {ratio} must be in [0, {MAX_PERMITTED_RATIO:g})")
        if straggler_time_s != runner.job.target.straggler_time_s:
            runner.straggler_changed(straggler_time_s, message.plan.reason or "the pace of the slowest replica")
        self._permit(runner, ratio)
        runner.post_plan(plan)

    def _permit(self, runner: JobRunner, ratio: float | None) -> None:
        """Apply the target of the leader's plan to a member's slowdown guard, relative to the member's own baseline."""
        job, watcher = runner.job, self.jobs.services.watcher
        target = job.description.target
        if ratio is not None:
            target = PerformanceTarget(ratio)
            if job.baseline is not None:
                permitted_s = target.iteration_time_s(job.baseline.iteration_time_s)
                target = replace(job.description.target, permitted_time_s=permitted_s)
        if target == replace(job.target, straggler_time_s=None):
            return
        runner.handle(TargetChanged(target))
        if watcher is not None:
            name = job.description.job_name
            num_members = sum(each.is_member and each.job.description.job_name == name for each in self.jobs)
            watcher.target_posted(runner, num_members=num_members)

    async def plan_pipeline(self, report: PipelineReport, peer: PeerCredentials) -> PipelineReply | None:
        """Pass the observations of all members to the leader, and return its plan; None for an unknown token.

        Raises:
            JobError, ProtocolError: the members do not form one pipeline.
        """
        session = self._session(report.rank_token, peer)
        if session is None:
            return None
        runner = session.runner
        with self.refusals.of(runner.job_id, _PIPELINE):
            leader = self._leaders.get(runner.job_id) or self._new_leader(runner, report)
            reply = await leader.handle_report(report)
            self._leaders[runner.job_id] = leader
            if reply.slices and (num_bytes := len(encode(reply))) > MAX_REPLY_BYTES:
                raise ProtocolError(f"the plan takes {num_bytes} bytes; at most {MAX_REPLY_BYTES} can be sent")
            return reply

    def refuse(self, peer: PeerCredentials, reason: str) -> None:
        """Record, for the members in a process, that a message from it was refused before it could be read."""
        for session in self.jobs.sessions:
            if session.peer == peer and session.runner.is_member:
                self.refusals.record(session.runner.job_id, reason)

    def leader(self, job_id: str) -> PipelineLeader | None:
        """Return the leader of the pipeline that a member leads; None for any other job."""
        return self._leaders.get(job_id)

    def status(self, job_id: str) -> Mapping[str, Any]:
        """Return the fields of a job's status: the pipeline that it leads, and its last refused message."""
        leader, watcher, pipeline = self._leaders.get(job_id), self.jobs.services.watcher, None
        if leader is not None:
            targets = {"target": None, "carbon": None} if watcher is None else watcher.status(leader)
            pipeline = {**leader.status_fields(), **targets}
        return {"pipeline": pipeline, "pipeline_refusal": self.refusals.status_fields(job_id)}

    def _job_ended(self, runner: JobRunner) -> None:
        ended = self._leaders.pop(runner.job_id, None)
        if ended is not None:
            ended.close()
            self.jobs.spawn(self.jobs.services.policy.drop_job(ended.job_id))
        self.refusals.keep(lambda job_id: self.jobs.runner(job_id) is not None)

    def _new_leader(self, runner: JobRunner, report: PipelineReport) -> PipelineLeader:
        num_pp_ranks, num_tp_ranks = checked_size(report)
        own = runner.job.description
        leader = PipelineLeader(
            description=replace(own, job_id=pipeline_id_of(own.job_id), num_pp_ranks=num_pp_ranks),
            rules=self.jobs.rules,
            services=self.jobs.services,
            leader_job_id=own.job_id,
            uid=runner.owner.uid,
            pids=runner.pids,
            spawn=self.jobs.spawn,
            num_tp_ranks=num_tp_ranks,
        )
        self.jobs.accounts.claim(leader)
        if (ordered := self.jobs.stored_orders(runner)) is not None:
            leader.job.handle(ordered)
        return leader

    def _session(self, rank_token: str, peer: PeerCredentials) -> RankSession | None:
        session = self.jobs.sessions.of_hex_token(rank_token, peer)
        if session is not None and not session.runner.is_member:
            raise JobError(f"job {session.runner.job_id} is not a member of a pipeline across hosts")
        return session
