"""GPUs whose driver handles are released for a reset, a MIG change or a driver upgrade, and reopened later."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuenergyd.daemon.gpus.inventory import Gpu, Gpus, utc_at
from gpuenergyd.daemon.ports import HistoryPort, WorkerPort
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import GpuError, JobError, UsageError
from gpuenergyd.gpu.link.messages import GpuHealth, ListProcesses, ReleaseGpus, ReopenGpus
from gpuenergyd.store.records import ControlEventRecord
from gpuenergyd.wire.operator_messages import ALL_GPUS, GpuRelease, GpuReopen, GpusReleased

log = logging.getLogger(__name__)

_MAX_LIFETIME_S = 30 * 86_400.0
_DEFAULT_LIFETIME_S = GpuRelease("").lifetime_s
_RETRY_S = 5.0
"""Pause between attempts to reopen a GPU that is not available yet."""


@dataclass(slots=True)
class GpuReleases:
    """Releases GPUs and reopens them; owned by the event loop. Administrators only: the caller has checked."""

    worker: WorkerPort
    gpus: Gpus
    history: HistoryPort
    spawn: Callable[[Coroutine[Any, Any, object]], None]
    """Runs a coroutine in the background."""
    _until_mono_s: dict[str, float] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _last_failure: str = ""

    async def release(self, request: GpuRelease, peer: PeerCredentials) -> GpusReleased:
        """Restore GPUs and release their driver handles; jobs on them run at full speed meanwhile.

        Raises:
            GpuNotFoundError: no such GPU.
            UsageError: the time is out of range.
            JobError: a GPU is leased outside a job.
            GpuError: the driver does not release them.
        """
        lifetime_s = request.lifetime_s
        if not (math.isfinite(lifetime_s) and 0 < lifetime_s <= _MAX_LIFETIME_S):
            raise UsageError(f"lifetime_s = {lifetime_s:g}: valid are values above 0 up to {_MAX_LIFETIME_S:g}")
        async with self._lock:
            gpus = self._named(request.gpu)
            for gpu in gpus:
                if gpu.claim is not None and gpu.claim.is_lease:
                    self.gpus.require_free(gpu.identity.gpu_uuid)
            uuids = tuple(gpu.identity.gpu_uuid for gpu in gpus)
            pids = {pid for uuid in uuids for pid in await self._process_ids(uuid)}
            await self.worker.do(ReleaseGpus(uuids, f"released for maintenance by {peer}"))
            until = time.monotonic() + lifetime_s
            self._until_mono_s.update(dict.fromkeys(uuids, until))
        for gpu in gpus:
            self._record(gpu, f"released by {peer}", "held", f"released for {lifetime_s:g} s", str(peer))
        job_ids = tuple(sorted({gpu.claim.job_id for gpu in gpus if gpu.claim is not None}))
        return GpusReleased(uuids, True, lifetime_s, tuple(sorted(pids)), job_ids)

    async def reopen(self, request: GpuReopen, peer: PeerCredentials) -> GpusReleased:
        """Open released GPUs again now.

        Raises:
            GpuNotFoundError: no such GPU.
            JobError: the GPU is not released.
            GpuError: a GPU or the driver is not available; the GPU stays released until the next attempt.
        """
        gpus = [gpu for gpu in self._named(request.gpu) if gpu.health is GpuHealth.RELEASED]
        if not gpus:
            raise JobError(f"GPU {request.gpu[:100]} is not released")
        await self._reopen(gpus, str(peer))
        return GpusReleased(tuple(gpu.identity.gpu_uuid for gpu in gpus), False, None)

    def handle_worker_ready(self) -> None:
        """Release GPUs again after a restart of the GPU worker, which has opened them all."""
        uuids = tuple(uuid for uuid in self._until_mono_s if self.gpus[uuid].health is not GpuHealth.RELEASED)
        if uuids:
            self.spawn(self._release_again(uuids))

    def check_time_limits(self) -> None:
        """Reopen GPUs whose time is over, also those that an earlier daemon released; called every second."""
        now_s, due = time.monotonic(), []
        for gpu in self.gpus:
            uuid = gpu.identity.gpu_uuid
            if gpu.health is not GpuHealth.RELEASED:
                continue
            until = self._until_mono_s.setdefault(uuid, now_s + _DEFAULT_LIFETIME_S)
            if now_s >= until and not self._lock.locked():
                self._until_mono_s[uuid] = now_s + _RETRY_S
                due.append(gpu)
        if due:
            self.spawn(self._reopen_in_time(due))

    async def _reopen_in_time(self, gpus: Sequence[Gpu]) -> None:
        try:
            await self._reopen(gpus, "daemon")
        except GpuError as error:
            if str(error) != self._last_failure:
                log.warning("released GPUs cannot be reopened yet: %s", error)
            self._last_failure = str(error)

    async def _reopen(self, gpus: Sequence[Gpu], actor: str) -> None:
        async with self._lock:
            uuids = tuple(gpu.identity.gpu_uuid for gpu in gpus)
            for identity in (await self.worker.do(ReopenGpus(uuids))).identities:
                self.gpus.refresh(identity)
                self._until_mono_s.pop(identity.gpu_uuid, None)
        self._last_failure = ""
        for gpu in gpus:
            self._record(gpu, f"reopened by {actor}", "released", "held", actor)

    async def _release_again(self, uuids: tuple[str, ...]) -> None:
        try:
            await self.worker.do(ReleaseGpus(uuids, "released for maintenance, before the GPU worker restarted"))
        except GpuError as error:
            log.warning("GPUs cannot be released again: %s", error)

    async def _process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        try:
            return (await self.worker.do(ListProcesses(gpu_uuid))).pids
        except GpuError:
            return ()  # the GPU may be broken, and be released to reset it

    def _named(self, name: str) -> list[Gpu]:
        return list(self.gpus) if name == ALL_GPUS else [self.gpus.find(name)]

    def _record(self, gpu: Gpu, reason: str, before: str, after: str, actor: str) -> None:
        uuid = gpu.identity.gpu_uuid
        log.info("GPU %s: %s", uuid, reason)
        job_id = gpu.claim.job_id if gpu.claim is not None and not gpu.claim.is_lease else None
        now = utc_at(time.monotonic_ns())
        self.history.write(ControlEventRecord(now, "release_gpu", actor, job_id, uuid, reason, before, after))
