"""What a job gets from earlier ones, and leaves for later ones: curves, and why its order must not change.

Curves are those of past jobs on its GPU model. The refusal of other orders is looked up by a signature, which holds all
that is known of a job before it runs, its user included: no job is planned from what another user's program reported.
"""

import asyncio
import hashlib
import json
import logging
import time
from dataclasses import dataclass

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import OrdersRefused, PastJobsFound, StoreCurves, StoreOrderRefusal
from gpuenergyd.core.policy_api.past_jobs import MAX_GPUS, PastJob
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.audit_log import DAEMON, AuditLog
from gpuenergyd.daemon.jobs.past_jobs import order_refusal_record, past_job_record
from gpuenergyd.daemon.ports import JobServices, RunningJob

log = logging.getLogger(__name__)

_FORMAT = 2
_RECALL_LIMIT_S = 5.0
_ORDER_REFUSAL = "order refusal"
"""Ends the facts of a signature: refusals of earlier versions, which also stored measurements by it, still hold."""


def signature_of(job: Job, uid: int, *further_facts: str | int) -> str:
    """Return the signature of a job of a user: equal for all runs of the same job on the same GPU models."""
    description, gpus, schedule = job.description, job.ranks.gpus, job.ranks.schedule
    facts = [
        _FORMAT,
        uid,
        description.job_name,
        description.policy,
        description.schedule_name,
        description.num_pp_ranks,
        description.num_microbatches,
        description.num_chunks,
        [[gpus[r].model_name, gpus[r].supported_sm_clocks_mhz] for r in sorted(gpus)],
        *([description.num_stage_ranks] if description.num_stage_ranks > 1 else []),
        [[[i.kind, i.microbatch_index, i.chunk_index] for i in order] for order in schedule.orders]
        if schedule is not None
        else [],
        *further_facts,
        _ORDER_REFUSAL,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class JobRuns:
    """What one job gets from earlier ones, and what it stores for later ones."""

    runner: RunningJob
    services: JobServices
    audit: AuditLog
    uid: int
    further_facts: tuple[str | int, ...] = ()
    """What must be equal beside the facts of every job for a refusal of other orders to hold."""

    async def recall(self) -> None:
        """Look up past jobs and a refusal of other orders, within a time limit, and pass them to the job."""
        await asyncio.gather(self.recall_refusal(), self._recall_past_jobs())

    async def _recall_past_jobs(self) -> None:
        """Look up past jobs of this user on the GPU model of this job; none if its GPUs are of several models."""
        models = {gpu.model_name for gpu in self.runner.job.ranks.gpus.values()}
        if self.services.past_jobs is None or len(models) != 1:
            return
        try:
            found = await asyncio.wait_for(self.services.past_jobs.recall(self.uid, models.pop()), _RECALL_LIMIT_S)
        except TimeoutError:
            log.warning("job %s: no past jobs read within %g s", self.runner.job_id, _RECALL_LIMIT_S)
            return
        if found and not self.runner.job.is_ended:
            self.runner.handle(PastJobsFound(found))

    async def recall_refusal(self) -> None:
        """Look up whether an earlier run may not run another order of instructions, and pass that to the job."""
        job, past_jobs = self.runner.job, self.services.past_jobs
        offers = job.knowledge.reordering.offers.values()
        if past_jobs is None or not any(offer.is_allowed and not offer.refusal for offer in offers):
            return
        try:
            reason = await asyncio.wait_for(past_jobs.order_refusal(self._signature()), _RECALL_LIMIT_S)
        except TimeoutError:
            log.warning("job %s: no refusal of orders read within %g s", self.runner.job_id, _RECALL_LIMIT_S)
            return
        if reason is not None and not job.is_ended:
            self.audit.record("recall", DAEMON, reason)
            self.runner.handle(OrdersRefused(reason, is_remembered=True))

    def _signature(self) -> str:
        return signature_of(self.runner.job, self.uid, *self.further_facts)

    def store_refusal(self, command: StoreOrderRefusal) -> None:
        """Remember that no later run may run another order of instructions."""
        self.services.history.write(order_refusal_record(self._signature(), self.runner.job_id, command.reason))

    def store_curves(self, command: StoreCurves) -> None:
        """Store what this job has shown of its curves."""
        now, name = utc_at(time.monotonic_ns()), self.runner.job.description.job_name
        uuids = self.runner.job.ranks.gpu_uuids[:MAX_GPUS]
        job = PastJob(self.runner.job_id, name, now, command.learned, gpu_uuids=uuids)
        if self.services.past_jobs is not None:
            self.services.history.write(past_job_record(job, self.uid))


@dataclass(frozen=True, slots=True)
class MemberRuns:
    """Earlier runs of a member of a pipeline across hosts, whose leader plans from past jobs like the whole pipeline.

    A member remembers only why it must not run another order: after a program has failed, nothing reaches its leader.
    """

    own: JobRuns

    async def recall(self) -> None:
        """Look up whether an earlier run ran out of memory in another order."""
        await self.own.recall_refusal()

    def store_refusal(self, command: StoreOrderRefusal) -> None:
        """Remember that no later run may run another order of instructions."""
        self.own.store_refusal(command)

    def store_curves(self, command: StoreCurves) -> None:
        """Store nothing: the leader stores the curves of the whole pipeline."""
