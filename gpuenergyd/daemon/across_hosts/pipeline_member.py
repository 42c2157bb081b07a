"""Members of pipelines across hosts: their state and their posted plans, and the pipelines that are led from here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuenergyd.core.pipeline.plan import check_plan
from gpuenergyd.daemon.across_hosts.pipeline_leader import PipelineLeader
from gpuenergyd.daemon.across_hosts.validation import MAX_PACE_S, checked_plan, checked_size
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.jobs.sessions import RankSession
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import GpuEnergyError, JobError, ProtocolError
from gpuenergyd.wire.messages import IterationReply
from gpuenergyd.wire.pipeline_messages import MemberPlan, MemberQuery, MemberReport, PipelineReply, PipelineReport

_OBSERVATIONS_SENT = 6
_DELIVERY_LIMIT_S = 0.5


@dataclass(slots=True)
class PipelineMembers:
    """The members of pipelines across hosts that run on this host, and the leaders among them."""

    jobs: Jobs
    _leaders: dict[str, PipelineLeader] = field(default_factory=dict)
    """By the job id of the leading member."""

    def state(self, question: MemberQuery, peer: PeerCredentials) -> MemberReport | None:
        """Return the state of a member; None for an unknown token.

        Raises:
            JobError: the rank belongs to an ordinary job.
        """
        session = self._session(question.rank_token, peer)
        if session is None:
            return None
        job = session.runner.job
        order = job.ranks.schedule.orders[0] if job.ranks.schedule is not None else ()
        return MemberReport(
            gpu=self.jobs.services.gpus[session.gpu_uuid].view(),
            order=tuple((str(i.kind), i.microbatch_index, i.chunk_index) for i in order),
            observations=tuple(job.observations[-_OBSERVATIONS_SENT:]),
            phase=job.phase,
        )

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
        runner = session.runner
        schedule = runner.job.ranks.schedule
        if schedule is None:
            raise JobError("the rank has not joined its job yet")
        plan = checked_plan(message.plan)
        clocks = self.jobs.services.gpus[session.gpu_uuid].identity.supported_sm_clocks_mhz
        try:
            check_plan(plan, schedule, [clocks])
        except GpuEnergyError as error:
            raise ProtocolError(str(error)) from None
        straggler_time_s = message.plan.straggler_time_s
        if straggler_time_s is not None and not 0 < straggler_time_s < MAX_PACE_S:
            raise ProtocolError(f"straggler_time_s {straggler_time_s} must be in (0, {MAX_PACE_S:g}) s")
        if straggler_time_s != runner.job.target.straggler_time_s:
            runner.straggler_changed(straggler_time_s, message.plan.reason or "the pace of the slowest replica")
        runner.post_plan(plan)
        await runner.idle(_DELIVERY_LIMIT_S)
        return IterationReply(runner.delivery.pop(session.pp_rank))

    async def plan_pipeline(self, report: PipelineReport, peer: PeerCredentials) -> PipelineReply | None:
        """Pass the observations of all members to the leader, and return its plan; None for an unknown token.

        Raises:
            JobError, ProtocolError: the members do not form one pipeline.
        """
        session = self._session(report.rank_token, peer)
        if session is None:
            return None
        for job_id in [job_id for job_id in self._leaders if self.jobs.runner(job_id) is None]:
            ended = self._leaders.pop(job_id)
            self.jobs.spawn(self.jobs.services.policy.drop_job(ended.pipeline_id))
        runner = session.runner
        leader = self._leaders.get(runner.job_id) or self._new_leader(runner, report)
        reply = await leader.handle_report(report, runner.job.target)
        self._leaders[runner.job_id] = leader
        return reply

    def status_fields(self, job_id: str) -> Mapping[str, Any] | None:
        """Return the status of the pipeline that a member leads; None for any other job."""
        leader = self._leaders.get(job_id)
        return None if leader is None else leader.status_fields()

    def _new_leader(self, runner: JobRunner, report: PipelineReport) -> PipelineLeader:
        num_pp_ranks, _ = checked_size(report)
        own = runner.job.description
        return PipelineLeader(
            description=replace(own, job_id=f"{own.job_id}-whole", num_pp_ranks=num_pp_ranks),
            rules=self.jobs.rules,
            services=self.jobs.services,
            leader_job_id=own.job_id,
            spawn=self.jobs.spawn,
        )

    def _session(self, rank_token: str, peer: PeerCredentials) -> RankSession | None:
        session = self.jobs.sessions.of_hex_token(rank_token, peer)
        if session is not None and not session.runner.is_member:
            raise JobError(f"job {session.runner.job_id} is not a member of a pipeline across hosts")
        return session
