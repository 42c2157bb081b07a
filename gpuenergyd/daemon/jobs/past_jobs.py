"""Past jobs: curves that jobs left, stored by user and GPU model, and refusals of other orders; read for later jobs.

The key of a row names its owner, so that no user's jobs are planned from, or shown, what another user's program
reported; only what an administrator imports holds for all users of the host. A job with the name and number of stages
of an earlier one replaces it. A user has 256 rows per GPU model, so that they cannot grow in number; imported jobs,
whose number the administrator decides, have one each. Refusals have the signature of their job as key.
"""

import asyncio
import hashlib
import logging
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gpuenergyd.core.policy_api.past_jobs import PastJob, problem_of
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.ports import HistoryPort
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.store import open_history
from gpuenergyd.store.records import PastJobRecord
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd.wire.past_job_messages import MAX_IMPORTED, OwnedPastJob

T = TypeVar("T")

log = logging.getLogger(__name__)

NUM_SLOTS = 256
MAX_RECALLED = 32
"""Newest past jobs that a job gets; the policy uses the newest that did the same work."""
MAX_LISTED = 1024
_MAX_BYTES = 65_536
_MAX_LISTED_BYTES = 3 * 2**20
"""A list must fit into a reply."""
_PREFIX = "past"
_ALL_USERS = "all"


def past_job_record(job: PastJob, uid: int | None) -> PastJobRecord:
    """Return the record of a past job of a user; None: of all users of this host."""
    return PastJobRecord(_key(job, uid), job.job_id, utc_at(time.monotonic_ns()), zlib.compress(encode(job)))


@dataclass(frozen=True, slots=True)
class _OrderRefusal:
    """Why a job must not run another order of instructions, and which job has found that out."""

    job_id: str
    order_refusal: str


def order_refusal_record(signature: str, job_id: str, reason: str) -> PastJobRecord:
    """Return the record that keeps jobs with a signature from running another order of instructions."""
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
    """Return the past job of a record; None for one that is damaged, or that another version wrote."""
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
        """Return past jobs of a user on a GPU model, and imported ones, newest first; empty if they cannot be read."""
        prefixes = _prefix(uid, gpu_model_name), _prefix(None, gpu_model_name)
        try:
            found = await asyncio.to_thread(self._read, prefixes, MAX_RECALLED)
        except (GpuEnergyError, OSError) as error:
            log.info("no past job can be read: %s", error)
            return ()
        # Two names may have the same short key.
        return tuple(own.job for own in found if own.job.learned.gpu_model_name == gpu_model_name)

    async def order_refusal(self, signature: str) -> str | None:
        """Return why jobs with a signature must not run another order; None if they may, or it cannot be read."""
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
            UsageError: there are too many, or one is impossible.
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
        """Delete the past jobs of a user, or with None of all users and the imported ones; return their number.

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
