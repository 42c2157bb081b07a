"""Release of GPUs for a reset, a MIG change or a driver upgrade, and their return; all on the actuator's thread."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.device import GpuDriver, GpuIdentity, HasRelease, require_capability
from gpuenergyd.gpu.link.messages import Done, GpuHealth, ReleaseGpus, Reopened
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.worker.health import HealthTable
from gpuenergyd.gpu.worker.threads.driver_threads import DriverThreads

_READ_LIMIT_S = 5.0
"""How long a reading that has begun may last."""
_POLL_S = 0.001
OBSERVES_ONLY = "this worker was started with --observe-only: mode observe in its own settings"


@dataclass(slots=True)
class Maintenance:
    """Lets go of GPUs and reopens them; `on_reopened` gets their identities."""

    controller: GpuDriver
    threads: DriverThreads
    health: HealthTable
    journal: Journal
    on_reopened: Callable[[Sequence[GpuIdentity]], None]
    observes_only: bool = False

    def release(self, request: ReleaseGpus) -> Done:
        """Stop reading GPUs, which are restored by now, and let go of their driver handles.

        Raises:
            GpuError: a reading does not return, or the driver refuses; the GPUs are read again.
        """
        uuids, driver = request.gpu_uuids, require_capability(self.controller, HasRelease)
        new = [uuid for uuid in uuids if not self.health.is_released(uuid)]
        for uuid in new:
            self.threads.sampler(uuid).remove(uuid)
        try:
            self._await_sampler(new)
            driver.release(uuids)
        except GpuError:
            for uuid in new:
                self.threads.sampler(uuid).add(uuid)
            raise
        for uuid in uuids:
            self.threads.actuator(uuid).forget_lock()
            self.health.release(uuid, request.reason)
        return Done()

    def reopen(self, gpu_uuids: Sequence[str]) -> Reopened:
        """Open released GPUs again, and read them; raise GpuError if one is not there, which stays released."""
        released = [uuid for uuid in gpu_uuids if self.health.is_released(uuid)]
        identities = require_capability(self.controller, HasRelease).reopen(released) if released else ()
        self.on_reopened(identities)
        for identity in identities:
            self.health.reopen(identity.gpu_uuid, *self._health_of(identity.gpu_uuid))
            self.threads.sampler(identity.gpu_uuid).add(identity.gpu_uuid)
        return Reopened(identities)

    def _health_of(self, gpu_uuid: str) -> tuple[GpuHealth, str]:
        """Return the health of a GPU that is there again; what could not be restored before is tried again."""
        if any(entry.gpu_uuid == gpu_uuid for entry in self.journal.read().entries):
            return GpuHealth.UNRESTORED, "reopened; restoring it"
        if self.observes_only:
            return GpuHealth.OBSERVE_ONLY, OBSERVES_ONLY
        reason = self.controller.observe_only_reasons().get(gpu_uuid)
        return (GpuHealth.OK, "reopened") if reason is None else (GpuHealth.OBSERVE_ONLY, reason)

    def _await_sampler(self, gpu_uuids: Sequence[str]) -> None:
        """Wait until the reading of these GPUs that may be under way has returned."""
        until_mono_s = time.monotonic() + _READ_LIMIT_S
        while any(self.threads.sampler(uuid).call.gpu_uuid == uuid for uuid in gpu_uuids):
            if time.monotonic() > until_mono_s:
                raise GpuError(f"a reading has not returned for {_READ_LIMIT_S:g} s")
            time.sleep(_POLL_S)
