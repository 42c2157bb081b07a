"""Hands running jobs over from one daemon to the next: stops them without ending them, and continues them."""

import asyncio
import logging
import os
import time

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import RankReleased
from gpuenergyd.daemon.gpus.inventory import GpuClaim
from gpuenergyd.daemon.handover.file import HandedJob, HandedSession
from gpuenergyd.daemon.jobs.registry import LAST_COMMANDS_LIMIT_S, Jobs
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.jobs.sessions import RankSession
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd.store.records import JobResumedRecord

log = logging.getLogger(__name__)


async def hand_over_jobs(jobs: Jobs) -> tuple[HandedJob, ...]:
    """Stop all jobs without ending them; return their state for the next daemon."""
    runners = [runner for runner in jobs if not runner.job.is_ended]
    snapshots = await asyncio.gather(*(runner.pause(LAST_COMMANDS_LIMIT_S) for runner in runners))
    return tuple(
        HandedJob(
            description=runner.job.description,
            state=runner.job.snapshot(),
            registration=jobs.registration(runner.job_id),
            runner=snapshot,
            sessions=tuple(_handed(jobs, session) for session in jobs.sessions.of_job(runner.job_id)),
        )
        for runner, snapshot in zip(runners, snapshots, strict=True)
        if not runner.job.is_ended
    )


def take_over_job(jobs: Jobs, handed: HandedJob, *, holds_leases: bool) -> None:
    """Continue a job of an earlier daemon; ranks whose process has ended since then are released.

    Raises:
        GpuEnergyError: the job cannot be continued.
    """
    first, services = handed.registration, jobs.services
    job = Job(handed.description, jobs.rules_for(first))
    job.restore(handed.state)
    runner = jobs.new_runner(job, handed.runner.owner, first)
    runner.restore(handed.runner)
    job_id = runner.job_id
    for known in handed.sessions:
        claim = GpuClaim(job_id, first.job_name, known.peer.uid, time.monotonic_ns())
        try:
            services.gpus.claim(known.gpu_uuid, claim)
        except GpuEnergyError:
            services.gpus.release(job_id)
            raise
    jobs.add(runner, first, handed.sessions[0].peer.uid if handed.sessions else runner.owner.uid)
    services.history.write(JobResumedRecord(job_id))
    runner.start()
    if job.target.is_forced:
        runner.straggler_changed(None, "the daemon was restarted: the pace of other replicas is measured again")
    dead = [known for known in handed.sessions if not _readmit(jobs, runner, known)]
    log.info("job %s: taken over in phase %s with plan %s", job_id, job.phase, job.current_plan.plan_id)
    if not holds_leases:
        runner.control_lost("its GPUs were restored while the daemon was away")
    elif (lever := runner.forbidden_lever) is not None:
        runner.control_lost(f"the settings do not permit {lever} in plans any more")
    for known in dead:
        how = f"ended while the daemon was away (process {known.peer.pid})"
        runner.handle(RankReleased(known.pp_rank, known.stage_rank, how))


def _handed(jobs: Jobs, session: RankSession) -> HandedSession:
    return HandedSession(
        token=session.token,
        pp_rank=session.pp_rank,
        gpu_uuid=session.gpu_uuid,
        peer=session.peer,
        start_ticks=process_start_ticks(session.peer.pid) or 0,
        last_sequence=session.last_sequence,
        requested_sm_clock_mhz=jobs.services.gpus[session.gpu_uuid].requested_sm_clock_mhz,
        stage_rank=session.stage_rank,
    )


def _readmit(jobs: Jobs, runner: JobRunner, known: HandedSession) -> bool:
    """Continue the session of a training process; return whether the process is still alive."""
    try:
        pidfd = os.pidfd_open(known.peer.pid)
    except OSError:
        return False
    if not known.is_alive:
        os.close(pidfd)
        return False
    gpu = jobs.services.gpus[known.gpu_uuid]
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
        stage_rank=known.stage_rank,
    )
    jobs.sessions.add(session)
    return True
