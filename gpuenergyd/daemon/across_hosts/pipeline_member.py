"""The routes of pipelines across hosts: what was measured of a part, plans posted to it, and the whole's planning."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, RankClocks, check_plan
from gpuenergyd.daemon.across_hosts.pipeline_leader import WholePipeline, spoken_of
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.jobs.sessions import RankSession
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import GpuEnergyError, JobError, ProtocolError
from gpuenergyd.wire import MAX_STRING_CHARS
from gpuenergyd.wire.messages import IterationReply
from gpuenergyd.wire.part_messages import PartPlan, PartQuestion, PartState, PipelineReply, PipelineReport, PostedPlan

_OBSERVATIONS_TOLD = 6
_MAX_RANKS = 4096
_MAX_PACE_S = 86_400.0
_INSTALL_LIMIT_S = 0.5


@dataclass(slots=True)
class Parts:
    """Parts of pipelines on this host, and the pipelines that are planned here."""

    jobs: Jobs
    _wholes: dict[str, WholePipeline] = field(default_factory=dict)
    """By the job id of the part that leads."""

    def state(self, question: PartQuestion, peer: PeerCredentials) -> PartState | None:
        """Return how a part is; None for an unknown token.

        Raises:
            JobError: the rank belongs to an ordinary job.
        """
        session = self._part(question.rank_token, peer)
        if session is None:
            return None
        job = session.runner.job
        order = job.schedule.orders[0] if job.schedule is not None else ()
        return PartState(
            gpu=self.jobs.services.gpus[session.gpu_uuid].view(),
            order=tuple((str(i.kind), i.microbatch_index, i.chunk_index) for i in order),
            observations=tuple(job.observations[-_OBSERVATIONS_TOLD:]),
            phase=job.phase,
        )

    async def post(self, message: PartPlan, peer: PeerCredentials) -> IterationReply | None:
        """Have a part follow a plan once its leader's term for it begins; None for an unknown token.

        What is answered holds the plan's slice if it is installed by now, so that nobody waits for the next report.

        Raises:
            JobError: the rank belongs to an ordinary job.
            ProtocolError: the plan does not fit the part or its GPU.
        """
        session = self._part(message.rank_token, peer)
        if session is None:
            return None
        schedule = session.runner.job.schedule
        if schedule is None:
            raise JobError("the rank has not joined its job yet")
        plan = _clock_plan(message.plan)
        clocks = self.jobs.services.gpus[session.gpu_uuid].identity.supported_sm_clocks_mhz
        try:
            check_plan(plan, schedule, [clocks])
        except GpuEnergyError as error:
            raise ProtocolError(str(error)) from None
        straggler_time_s = message.plan.straggler_time_s
        if straggler_time_s is not None and not 0 < straggler_time_s < _MAX_PACE_S:
            raise ProtocolError(f"straggler_time_s {straggler_time_s}: must be a time of 0 to {_MAX_PACE_S:g} s")
        if straggler_time_s != session.runner.job.target.straggler_time_s:
            session.runner.straggler_changed(straggler_time_s, message.plan.reason or "the pace of the slowest replica")
        session.runner.post(plan)
        return IterationReply(await session.runner.slices_soon(_INSTALL_LIMIT_S))

    def plan(self, report: PipelineReport, peer: PeerCredentials) -> PipelineReply | None:
        """Take what all parts have observed and return what is decided; None for an unknown token.

        Raises:
            JobError, ProtocolError: the parts are none of one pipeline.
        """
        session = self._part(report.rank_token, peer)
        if session is None:
            return None
        for job_id in [job_id for job_id in self._wholes if self.jobs.runner(job_id) is None]:
            whole = self._wholes.pop(job_id)
            self.jobs.spawn(self.jobs.services.policy.drop_job(whole.pipeline_id))
        runner = session.runner
        known = self._wholes.get(runner.job_id)
        whole = known if known is not None else self._new_whole(session, report)
        reply = whole.take(report, runner.job.target)
        self._wholes[runner.job_id] = whole
        return reply

    def spoken_of(self, job_id: str) -> Mapping[str, Any] | None:
        """Return what the status says of the pipeline that a part leads; None where it leads none."""
        whole = self._wholes.get(job_id)
        return None if whole is None else spoken_of(whole)

    def _new_whole(self, session: RankSession, report: PipelineReport) -> WholePipeline:
        if not (1 <= report.num_pp_ranks <= _MAX_RANKS and 1 <= report.num_tp_ranks <= _MAX_RANKS):
            raise ProtocolError(f"{report.num_pp_ranks} x {report.num_tp_ranks} ranks: 1 to {_MAX_RANKS} of each")
        part = session.runner.job.description
        return WholePipeline(
            description=replace(part, job_id=f"{part.job_id}-whole", num_pp_ranks=report.num_pp_ranks),
            rules=self.jobs.rules,
            services=self.jobs.services,
            leader_job_id=part.job_id,
            spawn=self.jobs.spawn,
        )

    def _part(self, rank_token: str, peer: PeerCredentials) -> RankSession | None:
        session = self.jobs.sessions.of_text(rank_token, peer)
        if session is not None and not session.runner.is_part:
            raise JobError(f"job {session.runner.job_id} is planned here as a whole; it is no part of another pipeline")
        return session


def _clock_plan(posted: PostedPlan) -> ClockPlan:
    if not 0 < len(posted.plan_id) <= MAX_STRING_CHARS or len(posted.reason) > MAX_STRING_CHARS:
        raise ProtocolError(f"plan_id and reason: at most {MAX_STRING_CHARS} characters, and a plan_id is not empty")
    for kind, *_ in posted.changes:
        if kind not in InstructionKind.__members__:
            raise ProtocolError(f"instruction kind {kind!r}; known: {', '.join(InstructionKind)}")
    changes = tuple(
        ClockChange(Instruction(0, InstructionKind(kind), microbatch, chunk), delay_ns / 1e9, clock)
        for kind, microbatch, chunk, delay_ns, clock in posted.changes
    )
    ranks = (RankClocks(0, posted.sm_clocks_mhz, changes),) if posted.sm_clocks_mhz else ()
    return ClockPlan(posted.plan_id, posted.purpose, ranks, reason=posted.reason)
