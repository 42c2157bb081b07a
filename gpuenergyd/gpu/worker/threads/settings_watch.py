"""Settings watch: threads that read what is set on each GPU once a second, and report changes with their owner.

NVML can read power limits, modes and workload power profiles back, but no clock lock: whose lock is in force follows
from the clocks that the sampler reads.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpuenergyd.errors import GpuEnergyError, JournalError
from gpuenergyd.gpu.device import MeasuresGpus
from gpuenergyd.gpu.link.messages import GpuSettingsRead
from gpuenergyd.gpu.restore.executor import is_set_by_other
from gpuenergyd.gpu.restore.journal import Control, Journal

PERIOD_S = 1.0


class SettingsWatch:
    """Reports the settings of each GPU when they are first read and whenever they change; on a thread for each GPU.

    A call that does not return stops the watch of its GPU alone: the threads that change and sample it are supervised.
    """

    def __init__(
        self,
        reader: MeasuresGpus,
        journal: Journal,
        gpu_uuids: Sequence[str],
        *,
        is_readable: Callable[[str], bool],
        foreign_clock_mhz: Callable[[str], int | None],
        on_change: Callable[[GpuSettingsRead], None],
    ) -> None:
        self._reader = reader
        self._journal = journal
        self._gpu_uuids = gpu_uuids
        self._is_readable = is_readable
        self._foreign_clock_mhz = foreign_clock_mhz
        self._on_change = on_change
        self._last: dict[str, GpuSettingsRead] = {}
        self._stop = threading.Event()
        self._wakeups = {uuid: threading.Event() for uuid in gpu_uuids}

    def start(self) -> None:
        for uuid in self._gpu_uuids:
            threading.Thread(target=self._run, args=(uuid,), name="settings watch", daemon=True).start()

    def close(self) -> None:
        """Have the threads end after the reading that is under way."""
        self._stop.set()
        self.read_soon()

    def read_soon(self) -> None:
        """Read every GPU now rather than a period after the last reading: a lock of another program has been found."""
        for wakeup in self._wakeups.values():
            wakeup.set()

    def repeat(self) -> None:
        """Report all settings again: another daemon has connected."""
        self._last.clear()

    def _run(self, uuid: str) -> None:
        while not self._stop.is_set():
            self._wakeups[uuid].wait(PERIOD_S)
            self._wakeups[uuid].clear()
            if not self._stop.is_set() and self._is_readable(uuid):
                self._read(uuid)

    def _read(self, uuid: str) -> None:
        try:
            details = replace(self._reader.details(uuid), foreign_sm_clock_mhz=self._foreign_clock_mhz(uuid))
        except GpuEnergyError:
            return  # the sampler reports it
        known = self._last.get(uuid)
        if known is not None and known.details == details:
            return
        is_our_limit = self._is_our_limit(uuid, details.power_limit_w)
        read = GpuSettingsRead(uuid, details, is_our_limit, self._our_profile(uuid))
        self._last[uuid] = read
        self._on_change(read)

    def _our_profile(self, gpu_uuid: str) -> int | None:
        """Return the workload power profile that the journal says was added by this worker."""
        try:
            return self._journal.our_power_profile(gpu_uuid)
        except JournalError:
            return None

    def _is_our_limit(self, gpu_uuid: str, power_limit_w: float | None) -> bool:
        """Return whether a power limit is, or may be, the one that the journal says was set by this worker."""
        if power_limit_w is None:
            return False
        try:
            entry = self._journal.entry(gpu_uuid, Control.POWER_LIMIT)
        except JournalError:
            return False
        return entry is not None and not is_set_by_other(entry, power_limit_w)
