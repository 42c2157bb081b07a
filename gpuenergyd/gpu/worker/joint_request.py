"""A request of the daemon for several GPUs: each GPU's thread does its part, and the last one to be done replies."""

import threading
from collections.abc import Callable, Sequence

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.link.messages import Failed, Reply
from gpuenergyd.gpu.worker.threads.actuator import Actuator


class JointRequest:
    """One request; it is replied to once, at its end or when a part of it fails or cannot be done."""

    def __init__(
        self,
        gpu_uuids: Sequence[str],
        *,
        each: Callable[[str], None] | None = None,
        last: Callable[[], Reply],
        reply: Callable[[Reply], None],
    ) -> None:
        """`each` is called for each GPU on its thread, then `last` on one of the threads; both may raise."""
        self._pending = set(gpu_uuids)
        self._each = each
        self._last = last
        self._reply = reply
        self._is_over = False
        self._guard = threading.Lock()

    def submit(self, actuators: Callable[[str], Actuator]) -> None:
        """Queue each GPU's part behind what its thread has to do already."""
        if not self._pending:
            self._end(self._last)
        for uuid in tuple(self._pending):
            actuators(uuid).submit(lambda uuid=uuid: self._run(uuid), self._refuse)  # type: ignore[misc]  # mypy: default of uuid

    def _run(self, gpu_uuid: str) -> None:
        try:
            if self._each is not None:
                self._each(gpu_uuid)
        except GpuEnergyError as error:
            self._refuse(str(error))
            return
        with self._guard:
            self._pending.discard(gpu_uuid)
            if self._pending:
                return
        self._end(self._last)

    def _refuse(self, reason: str) -> None:
        self._end(lambda: Failed(reason))

    def _end(self, outcome: Callable[[], Reply]) -> None:
        with self._guard:
            if self._is_over:
                return
            self._is_over = True
        try:
            reply = outcome()
        except GpuEnergyError as error:
            reply = Failed(str(error))
        self._reply(reply)
