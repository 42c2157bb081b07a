"""What can be expected of each GPU in the worker, and why one may not be changed now. Any thread may tell and ask."""

import threading
from collections.abc import Callable, Sequence

from gpuenergyd.errors import ProtocolError
from gpuenergyd.gpu.link.messages import GpuHealth

_NOT_TO_BE_CHANGED = frozenset({GpuHealth.OBSERVE_ONLY, GpuHealth.WEDGED, GpuHealth.LOST})


class GpuStates:
    """The health of each GPU; `on_change` gets what is new, on the thread that told it."""

    def __init__(self, gpu_uuids: Sequence[str], on_change: Callable[[str, GpuHealth, str], None]) -> None:
        self._on_change = on_change
        self._states: dict[str, tuple[GpuHealth, str]] = dict.fromkeys(gpu_uuids, (GpuHealth.OK, ""))
        self._wedged: set[str] = set()
        self._guard = threading.RLock()

    def note(self, gpu_uuid: str, health: GpuHealth, detail: str) -> None:
        """Take what was seen of a GPU; while a call does not return, nothing else counts."""
        with self._guard:
            before = self._states.get(gpu_uuid)
            is_settled = gpu_uuid in self._wedged and health is not GpuHealth.WEDGED
            if before is None or before[0] is health or is_settled:
                return
            self._states[gpu_uuid] = (health, detail)
        self._on_change(gpu_uuid, health, detail)

    def wedge(self, gpu_uuid: str, detail: str) -> None:
        """Note that a driver call for this GPU does not return."""
        self._wedged.add(gpu_uuid)
        self.note(gpu_uuid, GpuHealth.WEDGED, detail)

    def unwedge(self, gpu_uuid: str) -> bool:
        """Note that it returned; return whether it had been missed."""
        if gpu_uuid not in self._wedged:
            return False
        self._wedged.discard(gpu_uuid)
        self.note(gpu_uuid, GpuHealth.UNRESTORED, "its driver call returned; it has to be restored")
        return True

    def is_wedged(self, gpu_uuid: str) -> bool:
        """Return whether a driver call for this GPU does not return."""
        return gpu_uuid in self._wedged

    def health(self, gpu_uuid: str) -> GpuHealth:
        """Return the state of a GPU."""
        return self._states[gpu_uuid][0]

    def rows(self) -> list[list[str]]:
        """Return every GPU's state as it travels."""
        return [[uuid, health, detail] for uuid, (health, detail) in self._states.items()]

    def refusal(self, gpu_uuid: str) -> str | None:
        """Return why this GPU cannot be changed now, if so."""
        health, detail = self._states[gpu_uuid]
        return f"refused: {gpu_uuid} is {health}: {detail}" if health in _NOT_TO_BE_CHANGED else None

    def known(self, gpu_uuids: Sequence[str]) -> tuple[str, ...]:
        """Return the GPUs asked for.

        Raises:
            ProtocolError: there is no such GPU.
        """
        unknown = [u for u in gpu_uuids if u not in self._states]
        if unknown:
            raise ProtocolError(f"no GPU {unknown[0]!r}; there are: {', '.join(self._states)}")
        return tuple(gpu_uuids)
