"""Previous runs of a job: looked up in the history database by the job's signature, and stored for the next run.

The signature holds everything that is known of a job before it runs, its user included: no job is planned from what
another user's program reported. The policy verifies at full speed what the signature cannot hold (shapes, batch size).
"""

import asyncio
import hashlib
import json
import logging
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    OrdersRefused,
    PastJobsFound,
    PreviousRunFound,
    StoreCurves,
    StoreOrderRefusal,
    StoreRun,
)
from gpuenergyd.core.policy_api.past_jobs import MAX_GPUS, PastJob
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.audit_log import DAEMON, AuditLog
from gpuenergyd.daemon.jobs.past_jobs import past_job_record
from gpuenergyd.daemon.ports import JobServices, RunningJob
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.store import open_history
from gpuenergyd.store.records import PreviousRunRecord
from gpuenergyd.wire.daemon_codec import decode, encode

log = logging.getLogger(__name__)

_FORMAT = 2
_MAX_BYTES = 64 * 2**20
_RECALL_LIMIT_S = 5.0
_ORDER_REFUSAL = "order refusal"
"""What distinguishes the signature under which a refusal is stored from that of the profile."""


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
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def packed(run: PreviousRun | None) -> bytes:
    """Return a run as the history database stores it; empty to delete the stored one."""
    return zlib.compress(encode(run)) if run is not None else b""


def unpacked(blob: bytes) -> PreviousRun:
    """Return the run in a blob of the history database, or raise GpuEnergyError if the blob is damaged."""
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(blob, _MAX_BYTES)
    except zlib.error as error:
        raise GpuEnergyError(f"damaged run in the history database: {error}") from None
    return decode(text, PreviousRun, max_bytes=_MAX_BYTES)


class PreviousRunStore:
    """Reads previous runs from the history database, in a thread; an error counts as no previous run."""

    def __init__(self, path_or_url: str | Path) -> None:
        self._path_or_url = path_or_url

    async def recall(self, signature: str) -> PreviousRun | None:
        """Return the last run with a signature; None if there is none or it cannot be read."""
        try:
            return await asyncio.to_thread(self._read, signature)
        except (GpuEnergyError, OSError) as error:
            log.info("no previous run can be read: %s", error)
            return None

    def _read(self, signature: str) -> PreviousRun | None:
        with open_history(self._path_or_url) as history:
            blob = history.previous_run(signature)
        return unpacked(blob) if blob is not None else None


@dataclass(frozen=True, slots=True)
class JobRuns:
    """The previous run of one job and past jobs like it, and what it stores for later ones."""

    runner: RunningJob
    services: JobServices
    audit: AuditLog
    uid: int
    further_facts: tuple[str | int, ...] = ()
    """What must be equal beside the facts of every job."""

    async def recall(self) -> None:
        """Look up the previous run and past jobs, within a time limit, and pass them to the job."""
        await asyncio.gather(self._recall_run(), self._recall_past_jobs())

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
        job = self.runner.job
        if any(offer.is_allowed and not offer.refusal for offer in job.knowledge.reordering.offers.values()):
            refused = await self._recalled(_ORDER_REFUSAL)
            if refused is not None and not job.is_ended:
                reason = f"{refused.order_refusal} (in job {refused.job_id})"
                self.audit.record("recall", DAEMON, reason)
                self.runner.handle(OrdersRefused(reason, is_remembered=True))

    async def _recall_run(self) -> None:
        job = self.runner.job
        await self.recall_refusal()
        run = await self._recalled()
        if run is not None and not job.is_ended:
            profile = count_text(len(run.profile), "iteration")
            self.audit.record("recall", DAEMON, f"profile of job {run.job_id}", after=profile)
            self.runner.handle(PreviousRunFound(run))

    async def _recalled(self, *more_facts: str) -> PreviousRun | None:
        if self.services.previous_runs is None:
            return None
        signature = signature_of(self.runner.job, self.uid, *self.further_facts, *more_facts)
        try:
            return await asyncio.wait_for(self.services.previous_runs.recall(signature), _RECALL_LIMIT_S)
        except TimeoutError:
            log.warning("job %s: no previous run read within %g s", self.runner.job_id, _RECALL_LIMIT_S)
            return None

    async def store_refusal(self, command: StoreOrderRefusal) -> None:
        """Remember that no later run may run another order of instructions."""
        job_id = self.runner.job_id
        signature = signature_of(self.runner.job, self.uid, *self.further_facts, _ORDER_REFUSAL)
        blob = packed(PreviousRun(job_id, (), (), order_refusal=command.reason))
        self.services.history.write(PreviousRunRecord(signature, job_id, utc_at(time.monotonic_ns()), blob))

    async def store(self, command: StoreRun) -> None:
        """Store the profile of this run, or delete the stored one."""
        blob = await asyncio.to_thread(packed, command.run)
        signature = signature_of(self.runner.job, self.uid, *self.further_facts)
        now = utc_at(time.monotonic_ns())
        self.services.history.write(PreviousRunRecord(signature, self.runner.job_id, now, blob))

    def store_curves(self, command: StoreCurves) -> None:
        """Store what this job has shown of its curves."""
        now, name = utc_at(time.monotonic_ns()), self.runner.job.description.job_name
        uuids = self.runner.job.ranks.gpu_uuids[:MAX_GPUS]
        job = PastJob(self.runner.job_id, name, now, command.learned, gpu_uuids=uuids)
        if self.services.past_jobs is not None:
            self.services.history.write(past_job_record(job, self.uid))


@dataclass(frozen=True, slots=True)
class MemberRuns:
    """Earlier runs of a member of a pipeline across hosts, whose leader plans from the whole pipeline's run before.

    A member remembers only why it must not run another order: after a program has failed, nothing reaches its leader.
    """

    own: JobRuns

    async def recall(self) -> None:
        """Look up whether an earlier run ran out of memory in another order."""
        await self.own.recall_refusal()

    async def store(self, command: StoreRun) -> None:
        """Store nothing."""

    async def store_refusal(self, command: StoreOrderRefusal) -> None:
        """Remember that no later run may run another order of instructions."""
        await self.own.store_refusal(command)

    def store_curves(self, command: StoreCurves) -> None:
        """Store nothing: the leader stores the curves of the whole pipeline."""
