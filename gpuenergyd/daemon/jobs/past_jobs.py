"""Past jobs: the curves that jobs measured, stored by user and GPU model, and their refusals to be reordered.

Past jobs are private: the key of a row names its owner, and no user's jobs are planned from another user's. Jobs that
an administrator imports are for all users of the host. A job replaces an earlier one with the same name and number of
stages. A user has at most 256 rows per GPU model; imported jobs, whose number the administrator decides, have one row
each. A refusal is stored under its job's signature, a hash of all that is known of a job before it runs, its user
included.
"""

import asyncio
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import OrdersRefused, PastJobsFound, StoreCurves, StoreOrderRefusal
from gpuenergyd.core.policy_api.past_jobs import MAX_GPUS, PastJob, problem_of
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.audit_log import DAEMON, AuditLog
from gpuenergyd.daemon.ports import HistoryPort, JobServices, RunningJob
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.store import open_history
from gpuenergyd.store.records import PastJobRecord
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd.wire.operator_messages import MAX_IMPORTED, OwnedPastJob

T = TypeVar("T")

log = logging.getLogger(__name__)

NUM_SLOTS = 256
MAX_RECALLED = 32
"""Most past jobs that a job gets; the policy uses the newest ones that did the same work."""
MAX_LISTED = 1024
_MAX_BYTES = 65_536
_MAX_LISTED_BYTES = 3 * 2**20
"""Limit of a listing, which must fit into a reply."""
_PREFIX = "past"
_ALL_USERS = "all"


def past_job_record(job: PastJob, uid: int | None) -> PastJobRecord:
    """Return the record of a user's past job, or with None of one for all users of this host."""
    return PastJobRecord(_key(job, uid), job.job_id, utc_at(time.monotonic_ns()), zlib.compress(encode(job)))


@dataclass(frozen=True, slots=True)
class _OrderRefusal:
    """Why a job must not run another order of instructions, and which job found that out."""

    job_id: str
    order_refusal: str


def order_refusal_record(signature: str, job_id: str, reason: str) -> PastJobRecord:
    """Return the record that prevents jobs with a signature from running another order of instructions."""
    blob = zlib.compress(encode(_OrderRefusal(job_id, reason)))
    return PastJobRecord(signature, job_id, utc_at(time.monotonic_ns()), blob)


def _key(job: PastJob, uid: int | None) -> str:
    same = f"{job.job_name}\n{job.learned.num_stages}"
    slot = int.from_bytes(hashlib.sha256(same.encode()).digest()[:8])
    if uid is not None:
        slot %= NUM_SLOTS
    return f"{_prefix(uid, job.learned.gpu_model_name)}{slot}"


def _prefix(uid: int | None, gpu_model_name: str | None = None) -> str:
    owner = f"{_PREFIX}:{_ALL_USERS if uid is None else uid}:"
    return owner if gpu_model_name is None else f"{owner}{hashlib.sha256(gpu_model_name.encode()).hexdigest()[:16]}:"


def _decoded(record: PastJobRecord, form: type[T]) -> T | None:
    try:
        stream = zlib.decompressobj()
        return decode(stream.decompress(record.model, _MAX_BYTES), form, max_bytes=_MAX_BYTES)
    except (zlib.error, GpuEnergyError) as error:
        log.info("past job %s cannot be read: %s", record.job_id, error)
        return None


def _owned(record: PastJobRecord) -> OwnedPastJob | None:
    """Return the past job of a record; None if the record is damaged or written by another version."""
    owner = record.signature.split(":")[1]
    job = _decoded(record, PastJob)
    if job is None:
        return None
    if (problem := problem_of(job)) is not None:
        log.info("past job %s is not used: %s", record.job_id, problem)
        return None
    is_imported = owner == _ALL_USERS
    return OwnedPastJob(None if is_imported else int(owner), replace(job, is_imported=is_imported))


@dataclass(frozen=True, slots=True)
class PastJobStore:
    """Past jobs in the history database; read in a thread, written by the history's writer."""

    path_or_url: str | Path
    history: HistoryPort

    async def recall(self, uid: int, gpu_model_name: str) -> tuple[PastJob, ...]:
        prefixes = _prefix(uid, gpu_model_name), _prefix(None, gpu_model_name)
        try:
            found = await asyncio.to_thread(self._read, prefixes, MAX_RECALLED)
        except (GpuEnergyError, OSError) as error:
            log.info("no past job can be read: %s", error)
            return ()
        # Two model names may have the same short key.
        return tuple(past.job for past in found if past.job.learned.gpu_model_name == gpu_model_name)

    async def order_refusal(self, signature: str) -> str | None:
        try:
            records = await asyncio.to_thread(self._records, signature)
        except (GpuEnergyError, OSError) as error:
            log.info("no refusal of orders can be read: %s", error)
            return None
        refusal = _decoded(records[0], _OrderRefusal) if records else None
        return f"{refusal.order_refusal} (in job {refusal.job_id})" if refusal is not None else None

    async def of_user(self, uid: int) -> tuple[OwnedPastJob, ...]:
        """Return the past jobs of a user and the imported ones, newest first.

        Raises:
            StoreError: the history cannot be read.
        """
        return await asyncio.to_thread(self._read, (_prefix(uid), _prefix(None)), MAX_LISTED)

    async def of_all_users(self) -> tuple[OwnedPastJob, ...]:
        """Return the past jobs of all users and the imported ones, newest first.

        Raises:
            StoreError: the history cannot be read.
        """
        return await asyncio.to_thread(self._read, (f"{_PREFIX}:",), MAX_LISTED)

    def import_for_all(self, jobs: Sequence[PastJob]) -> int:
        """Store past jobs of another site for all users of this host, all or none; return their number.

        Raises:
            UsageError: there are too many, or one is invalid.
        """
        if len(jobs) > MAX_IMPORTED:
            raise UsageError(f"{len(jobs)} past jobs; at most {MAX_IMPORTED} can be imported at once")
        for number, job in enumerate(jobs, start=1):
            if (problem := problem_of(job)) is not None:
                raise UsageError(f"past job {number}: {problem}")
        for job in jobs:
            self.history.write(past_job_record(replace(job, gpu_uuids=()), None))
        return len(jobs)

    async def forget(self, uid: int | None) -> int:
        """Delete a user's past jobs, or with None those of all users and imported ones; return their number.

        Raises:
            StoreError: the history cannot be read.
        """
        prefix = f"{_PREFIX}:" if uid is None else _prefix(uid)
        records = await asyncio.to_thread(self._records, prefix)
        now = utc_at(time.monotonic_ns())
        for record in records:
            self.history.write(PastJobRecord(record.signature, "", now, b""))
        return len(records)

    def _read(self, prefixes: Sequence[str], limit: int) -> tuple[OwnedPastJob, ...]:
        with open_history(self.path_or_url) as history:
            records = [record for prefix in prefixes for record in history.past_jobs(prefix, limit=limit)]
        found, num_bytes = [], 0
        for record in sorted(records, key=lambda record: record.learned_at, reverse=True)[:limit]:
            own = _owned(record)
            num_bytes += len(encode(own))
            if num_bytes > _MAX_LISTED_BYTES:
                break
            if own is not None:
                found.append(own)
        return tuple(found)

    def _records(self, prefix: str) -> tuple[PastJobRecord, ...]:
        with open_history(self.path_or_url) as history:
            return history.past_jobs(prefix)


_FORMAT = 2
_RECALL_LIMIT_S = 5.0
_ORDER_REFUSAL = "order refusal"
"""Last fact of a signature, kept so that refusals stored by earlier versions still apply."""


def signature_of(job: Job, uid: int, *further_facts: str | int) -> str:
    """Return the signature of a user's job, which is equal for all runs of the same job on the same GPU models."""
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
    """Further facts of the signature that must be equal for a refusal to apply to a later run."""
    is_member: bool = False
    """Whether the job is a rank of a pipeline across hosts, whose leader plans from the pipeline's past jobs.

    A member itself stores only refusals, since a failed program can no longer reach its leader.
    """

    async def recall(self) -> None:
        """Look up past jobs and a refusal of other orders, within a time limit, and pass them to the job."""
        await asyncio.gather(self._recall_refusal(), self._recall_past_jobs())

    async def _recall_past_jobs(self) -> None:
        """Look up past jobs of this user on this job's GPU model; none if its GPUs are of several models."""
        models = {gpu.model_name for gpu in self.runner.job.ranks.gpus.values()}
        if self.is_member or self.services.past_jobs is None or len(models) != 1:
            return
        try:
            found = await asyncio.wait_for(self.services.past_jobs.recall(self.uid, models.pop()), _RECALL_LIMIT_S)
        except TimeoutError:
            log.warning("job %s: no past jobs read within %g s", self.runner.job_id, _RECALL_LIMIT_S)
            return
        if found and not self.runner.job.is_ended:
            self.runner.handle(PastJobsFound(found))

    async def _recall_refusal(self) -> None:
        """Look up whether an earlier run was refused another order of instructions, and pass that to the job."""
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
        """Record that later runs must keep the program's own order of instructions."""
        self.services.history.write(order_refusal_record(self._signature(), self.runner.job_id, command.reason))

    def store_curves(self, command: StoreCurves) -> None:
        now, name = utc_at(time.monotonic_ns()), self.runner.job.description.job_name
        uuids = self.runner.job.ranks.gpu_uuids[:MAX_GPUS]
        job = PastJob(self.runner.job_id, name, now, command.learned, gpu_uuids=uuids)
        if self.services.past_jobs is not None and not self.is_member:
            self.services.history.write(past_job_record(job, self.uid))
