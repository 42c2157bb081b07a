"""Health of each GPU in the worker, and why one must not be changed now. Methods may be called on any thread.

A GPU that is only observed or not restored stays so, whatever else fails and recovers in the meantime.
"""

import threading
from collections.abc import Callable, Sequence

from gpuenergyd.errors import GpuError, ProtocolError
from gpuenergyd.gpu.link.messages import GpuHealth, GpuHealthChange

_NOT_CHANGEABLE = frozenset({GpuHealth.OBSERVE_ONLY, GpuHealth.WEDGED, GpuHealth.LOST, GpuHealth.RELEASED})
UNPROVEN = frozenset({GpuHealth.UNRESTORED, GpuHealth.UNCONFIRMED})


class HealthTable:
    """The health of each GPU; `on_change` gets each change on the thread that recorded it."""

    def __init__(self, gpu_uuids: Sequence[str], on_change: Callable[[GpuHealthChange], None]) -> None:
        self._on_change = on_change
        self._table = {uuid: GpuHealthChange(uuid, GpuHealth.OK, "") for uuid in gpu_uuids}
        self._wedged: set[str] = set()
        self._released: set[str] = set()
        self._observed: dict[str, GpuHealthChange] = {}
        self._unrestored: dict[str, GpuHealthChange] = {}
        self._guard = threading.RLock()

    def record(self, gpu_uuid: str, health: GpuHealth, detail: str) -> None:
        """Record a GPU's health; ignored while a driver call for it does not return, or it is released."""
        with self._guard:
            if health is GpuHealth.OBSERVE_ONLY:
                self._observed.setdefault(gpu_uuid, GpuHealthChange(gpu_uuid, health, detail))
            elif health is GpuHealth.UNRESTORED:
                self._unrestored[gpu_uuid] = GpuHealthChange(gpu_uuid, health, detail)
            elif health is GpuHealth.OK:
                self._unrestored.pop(gpu_uuid, None)
        self.record_reading(gpu_uuid, health, detail)

    def record_reading(self, gpu_uuid: str, health: GpuHealth, detail: str) -> None:
        """Record the health that readings show: one that succeeds proves no restore."""
        change = GpuHealthChange(gpu_uuid, health, detail)
        with self._guard:
            before = self._table.get(gpu_uuid)
            is_settled = gpu_uuid in self._wedged and health is not GpuHealth.WEDGED
            is_settled = is_settled or (gpu_uuid in self._released and health is not GpuHealth.RELEASED)
            if health is GpuHealth.OK:
                change = self._unrestored.get(gpu_uuid) or self._observed.get(gpu_uuid) or change
            if before is None or before.health is change.health or is_settled:
                return
            self._table[gpu_uuid] = change
        self._on_change(change)

    def record_restored(self, gpu_uuid: str, detail: str) -> None:
        """Record that nothing is left to restore."""
        self._unrestored.pop(gpu_uuid, None)
        if self.health(gpu_uuid) in UNPROVEN:
            self.record(gpu_uuid, GpuHealth.OK, detail)

    def is_unrestored(self, gpu_uuid: str) -> bool:
        """Return whether the last restore failed and can be retried."""
        return gpu_uuid in self._unrestored and gpu_uuid not in self._wedged

    def resolve(self, gpu_uuid: str, cause: str, detail: str) -> None:
        """Record that a GPU is well again, if it is still in the state whose detail begins with this cause."""
        last = self._observed.get(gpu_uuid, self._table[gpu_uuid])
        if last.detail.startswith(cause):
            self._observed.pop(gpu_uuid, None)
            self.record(gpu_uuid, GpuHealth.OK, detail)

    def mark_wedged(self, gpu_uuid: str, detail: str) -> None:
        """Record that a driver call for this GPU does not return."""
        self._wedged.add(gpu_uuid)
        self.record(gpu_uuid, GpuHealth.WEDGED, detail)

    def clear_wedged(self, gpu_uuid: str) -> bool:
        """Record that the driver call returned; return whether the GPU was wedged."""
        if gpu_uuid not in self._wedged:
            return False
        self._wedged.discard(gpu_uuid)
        self.record(gpu_uuid, GpuHealth.UNRESTORED, "its driver call returned; restoring it")
        return True

    def release(self, gpu_uuid: str, detail: str) -> None:
        """Record that a GPU is neither read nor changed until it is reopened."""
        self._released.add(gpu_uuid)
        self.record(gpu_uuid, GpuHealth.RELEASED, detail)

    def reopen(self, gpu_uuid: str, health: GpuHealth, detail: str) -> None:
        """Record that a GPU is read again."""
        self._released.discard(gpu_uuid)
        self._observed.pop(gpu_uuid, None)
        self.record(gpu_uuid, health, detail)

    def is_released(self, gpu_uuid: str) -> bool:
        return gpu_uuid in self._released

    def is_wedged(self, gpu_uuid: str) -> bool:
        """Return whether a driver call for this GPU does not return."""
        return gpu_uuid in self._wedged

    def health(self, gpu_uuid: str) -> GpuHealth:
        return self._table[gpu_uuid].health

    def current(self) -> tuple[GpuHealthChange, ...]:
        """Return the last change of every GPU."""
        return tuple(self._table.values())

    def refusal(self, gpu_uuid: str) -> str | None:
        """Return why this GPU must not be changed now, or None."""
        last = self._table[gpu_uuid]
        if last.health not in _NOT_CHANGEABLE:
            last = self._observed.get(gpu_uuid, last)
        return f"refused: {gpu_uuid} is {last.health}: {last.detail}" if last.health in _NOT_CHANGEABLE else None

    def require_changeable(self, gpu_uuids: Sequence[str]) -> None:
        """Check that the GPUs can be changed now.

        Raises:
            ProtocolError: a GPU does not exist.
            GpuError: a GPU must not be changed now.
        """
        self.require_known(gpu_uuids)
        for uuid in gpu_uuids:
            refusal = self.refusal(uuid)
            if refusal is not None:
                raise GpuError(refusal)

    def require_known(self, gpu_uuids: Sequence[str]) -> None:
        """Check that the GPUs exist, or raise ProtocolError."""
        unknown = [u for u in gpu_uuids if u not in self._table]
        if unknown:
            raise ProtocolError(f"no GPU {unknown[0]!r}; known GPUs: {', '.join(self._table)}")
