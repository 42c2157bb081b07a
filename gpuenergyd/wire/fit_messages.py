"""What `plan --job` and `explain --job` get of a running job.

GET /v1/jobs/{job_id}/fit      -> JobFit
"""

from dataclasses import dataclass

from gpuenergyd.core.pipeline.fitted import FittedPipeline
from gpuenergyd.core.pipeline.plan import ClockPlan


@dataclass(frozen=True, slots=True)
class JobFit:
    """The fitted pipeline of a job and the plan in force; without a plan's ranks the job runs at full speed."""

    job_id: str
    job_name: str
    policy: str
    phase: str
    phase_reason: str
    plan: ClockPlan
    fitted: FittedPipeline
