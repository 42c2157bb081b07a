"""What earlier runs of a job showed, from the history: found by what the job is, read off the event loop.

A signature is everything that is known of a job before it runs, its user included: nobody plans from what another
user's program claimed. What it cannot know (shapes, the batch) the policy checks at full speed.
"""

import asyncio
import hashlib
import json
import logging
import zlib
from pathlib import Path

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.store import open_history
from gpuenergyd.wire.daemon_codec import decode, encode

log = logging.getLogger(__name__)

_FORMAT = 2
_MAX_BYTES = 64 * 2**20


def signature_of(job: Job, uid: int) -> str:
    """Return what two runs of the same job on the same models of GPU have in common."""
    description = job.description
    facts = [
        _FORMAT,
        uid,
        description.job_name,
        description.policy,
        description.schedule_name,
        description.num_pp_ranks,
        description.num_microbatches,
        description.num_chunks,
        [[job.gpus[r].model_name, job.gpus[r].supported_sm_clocks_mhz] for r in sorted(job.gpus)],
        [[[i.kind, i.microbatch_index, i.chunk_index] for i in order] for order in job.schedule.orders]
        if job.schedule is not None
        else [],
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def packed(model: PreviousRun | None) -> bytes:
    """Return a model as the history keeps it; nothing for a forgotten one."""
    return zlib.compress(encode(model)) if model is not None else b""


def unpacked(blob: bytes) -> PreviousRun:
    """Return the model in a blob.

    Raises:
        GpuEnergyError: it holds something else.
    """
    try:
        stream = zlib.decompressobj()
        text = stream.decompress(blob, _MAX_BYTES)
    except zlib.error as error:
        raise GpuEnergyError(f"damaged model in the history: {error}") from None
    return decode(text, PreviousRun, max_bytes=_MAX_BYTES)


class ModelMemory:
    """Reads the history when a job asks; trouble with it means that nothing is remembered."""

    def __init__(self, path_or_url: str | Path) -> None:
        self._path_or_url = path_or_url

    async def recall(self, signature: str) -> PreviousRun | None:
        """Return what the last run showed; None when nothing is known, or it cannot be read."""
        try:
            return await asyncio.to_thread(self._read, signature)
        except (GpuEnergyError, OSError) as error:
            log.info("nothing is remembered of earlier runs: %s", error)
            return None

    def _read(self, signature: str) -> PreviousRun | None:
        with open_history(self._path_or_url) as history:
            blob = history.previous_run(signature)
        return unpacked(blob) if blob is not None else None
