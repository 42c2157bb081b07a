"""Energy windows: counters of GPUs read where a `with` block begins and ends, from the daemon, else from pynvml.

The counters only rise, so windows may be nested, overlap, and run on several threads. A counter is updated every 20 to
100 ms, so a window of a second is measured to a few per cent. Work that a GPU has yet to do when the block ends belongs
to it, and work of earlier code does not: a torch that uses CUDA is synchronized at both ends.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.client.environment import find_gpu_uuid, find_socket_path
from gpuenergyd.energy_windows.nvml import energy_counters_j
from gpuenergyd.log_lines import safe_logger

logger = safe_logger("gpuenergyd.client")
_READ_LIMIT_S = 2.0


class EnergyWindow:
    """Time and energy of a `with` block; None inside the block, and afterwards if they could not be measured."""

    def __init__(self, name: str, gpu_uuids: Sequence[str], socket_path: str | None) -> None:
        self.name = name
        self.time_s: float | None = None
        self.energy_by_gpu_j: dict[str, float] = {}
        """Energy of each GPU whose counter could be read, by UUID."""
        self.source: str | None = None
        """Who read the counters, `daemon` or `nvml`; None if nobody could."""
        self._gpu_uuids = tuple(gpu_uuids)
        self._socket_path = find_socket_path(socket_path)
        self._begun_s = 0.0
        self._begun_j: dict[str, float | None] = {}

    @property
    def energy_j(self) -> float | None:
        """Energy of all GPUs of the window; None if one of them could not be read at both ends."""
        by_gpu_j = self.energy_by_gpu_j
        is_complete = by_gpu_j and set(self._gpu_uuids or self._begun_j) <= set(by_gpu_j)
        return sum(by_gpu_j.values()) if is_complete else None

    @property
    def power_w(self) -> float | None:
        """Mean power of all GPUs of the window; None like the energy."""
        return self.energy_j / self.time_s if self.energy_j is not None and self.time_s else None

    def __enter__(self) -> Self:
        self.time_s, self.energy_by_gpu_j = None, {}
        _synchronize()
        self._begun_j = self._first_reading()
        self._begun_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _synchronize()
        self.time_s = time.monotonic() - self._begun_s
        ended_j = self._reading(self.source) if self.source is not None else {}
        for gpu_uuid, begun_j in self._begun_j.items():
            end_j = ended_j.get(gpu_uuid)
            if begun_j is not None and end_j is not None and end_j >= begun_j:  # one that has fallen was reset
                self.energy_by_gpu_j[gpu_uuid] = end_j - begun_j

    def _first_reading(self) -> dict[str, float | None]:
        """Return the counters from the first source that has them, which is used at the end, too."""
        for source in ("daemon", "nvml"):
            found = self._reading(source)
            if any(counter_j is not None for counter_j in found.values()):
                self.source = source
                return found
        self.source = None
        what = "gpuenergyd: window %s has no energy: no daemon with GPUs at %s, and no driver by pynvml"
        logger.warning(what, self.name, self._socket_path)
        return {}

    def _reading(self, source: str) -> dict[str, float | None]:
        try:
            if source == "daemon":
                return _daemon_counters_j(self._socket_path, self._gpu_uuids)
            return energy_counters_j(self._gpu_uuids)
        except Exception as error:  # noqa: BLE001  whatever fails must not reach the program
            logger.info("gpuenergyd: window %s: no energy from %s: %r", self.name, source, error)
            return {}


def measure(name: str = "", *, gpu_uuids: Sequence[str] = (), socket_path: str | None = None) -> EnergyWindow:
    """Return a context manager that measures the energy of its block; never raises.

    Args:
        name: name of the window in log messages.
        gpu_uuids: the GPUs to measure; by default the one that this process uses, and if that is not known, all GPUs of
            the host.
        socket_path: path of the daemon's socket; by default from GPUENERGYD_SOCKET or the usual places.
    """
    own = find_gpu_uuid() if not gpu_uuids else None
    return EnergyWindow(name, (own,) if own else gpu_uuids, socket_path)


def _daemon_counters_j(socket_path: str, gpu_uuids: Sequence[str]) -> dict[str, float | None]:
    with closing(DaemonClient(socket_path, limit_s=_READ_LIMIT_S)) as client:
        gpus = client.post("/v1/energy", {"gpu_uuids": gpu_uuids})["gpus"]
    return {gpu["gpu_uuid"]: gpu["total_energy_j"] for gpu in gpus}


def _synchronize() -> None:
    """Wait until the GPU has done what torch has launched so far."""
    torch: Any = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        logger.info("gpuenergyd: the GPU could not be synchronized", exc_info=True)
