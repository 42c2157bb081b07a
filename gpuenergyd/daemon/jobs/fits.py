"""What a job's policy has fitted to it, asked for by an operator."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.pipeline.fitted import FittedPipeline
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.errors import GpuNotFoundError, JobError
from gpuenergyd.wire.fit_messages import JobFit


@dataclass(frozen=True, slots=True)
class JobFits:
    """Answers for the jobs of this daemon, and for the pipelines that are led from here."""

    jobs: Jobs
    ask_policy: Callable[[str, str, JobView], Awaitable[FittedPipeline | PolicyFailure]]
    """Returns what the policy of a job has fitted to its view; called with job id and policy."""
    led_job: Callable[[str], Job | None]
    """Returns the job of the pipeline that a member leads; None for any other job."""

    async def fit(self, job_id: str) -> JobFit:
        """Return the fitted pipeline of a job with the plan in force.

        Raises:
            GpuNotFoundError: no such job runs.
            JobError: the job is led on another host, has no baseline yet, or its policy has fitted nothing.
        """
        runner = self.jobs.runner(job_id)
        if runner is None:
            running = ", ".join(one.job_id for one in self.jobs) or "none"
            raise GpuNotFoundError(f"no job {job_id[:100]!r}; running: {running}")
        job = self.led_job(job_id) or runner.job
        if runner.is_member and job is runner.job:
            raise JobError(f"job {job_id} is a rank of a pipeline across hosts; ask on the host that leads it")
        view = job.view()
        if view is None:
            raise JobError(f"job {job_id} has no baseline yet: {job.phase}, {job.phase_reason}")
        fitted = await self.ask_policy(job.description.job_id, job.description.policy, view)
        if isinstance(fitted, PolicyFailure):
            raise JobError(f"job {job_id}: {fitted.reason}")
        return JobFit(
            job_id=job_id,
            job_name=job.description.job_name,
            policy=job.description.policy,
            phase=job.phase,
            phase_reason=job.phase_reason,
            plan=job.current_plan,
            fitted=fitted,
        )
