"""Energy of processors and their memory from the kernel's counters (RAPL), for zeusd's /cpu routes.

Who could read these counters at will could learn what other processes compute, so most kernels let only root read them.
Every client of the socket gets a reading that is up to 50 ms old, which is the rate of zeusd's own power stream.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.errors import GpuUnsupportedError
from gpuenergyd.powercap import POWERCAP, PowercapCounter, energy_counters
from gpuenergyd_zeusd.parameters import BadParameterError

PERIOD_S = 0.05
WRAP_WATCH_S = 30.0
"""Counters wrap after minutes at full power, so they are read at least this often."""


@dataclass(slots=True)
class _Counter:
    """One energy counter without its wraps, read at most once per period."""

    counter: PowercapCounter
    energy_uj: int = 0
    _read_mono_s: float = float("-inf")

    def read_uj(self) -> int:
        """Return the energy in uJ.

        Raises:
            GpuUnsupportedError: the counter cannot be read.
        """
        now_s = time.monotonic()
        if now_s - self._read_mono_s >= PERIOD_S:
            used_uj = self.counter.used_uj()
            self.energy_uj += (self.counter.last_uj or 0) if used_uj is None else used_uj
            self._read_mono_s = now_s
        return self.energy_uj


@dataclass(frozen=True, slots=True)
class Cpu:
    """One package, or another zone of the highest level that the kernel counts: `psys` contains the packages."""

    package: _Counter
    dram: _Counter | None

    def energies_uj(self) -> tuple[int, int | None]:
        """Return the energy of the package and of its memory."""
        return self.package.read_uj(), None if self.dram is None else self.dram.read_uj()


class Cpus:
    """The processors by their zone's number, as Zeus numbers them; none if the daemon cannot read all counters."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self.by_index: dict[int, Cpu] = {}
        found: dict[int, dict[bool, _Counter]] = {}
        for counter in energy_counters(root):
            index = int(counter.zone.name.split(":")[1])
            found.setdefault(index, {})[counter.name.endswith("/dram")] = _Counter(counter)
        try:
            for index, domains in sorted(found.items()):
                self.by_index[index] = cpu = Cpu(domains[False], domains.get(True))
                cpu.energies_uj()
        except (GpuUnsupportedError, KeyError):
            self.by_index = {}

    def selected(self, indices: Iterable[int]) -> dict[int, Cpu]:
        """Return these processors, or all if none is named.

        Raises:
            BadParameterError: there is no such processor.
        """
        chosen = tuple(indices) or tuple(self.by_index)
        if unknown := [index for index in chosen if index not in self.by_index]:
            raise BadParameterError(f"cpu_ids: no CPU {unknown[0]}; CPUs: {', '.join(map(str, self.by_index))}")
        return {index: self.by_index[index] for index in chosen}

    async def watch_wraps(self) -> None:
        """Read all counters now and then, so that no wrap is missed; endless."""
        while True:
            await asyncio.sleep(WRAP_WATCH_S)
            for cpu in self.by_index.values():
                with suppress(GpuUnsupportedError):
                    cpu.energies_uj()


async def mean_power_mw(cpus: Mapping[int, Cpu]) -> dict[int, dict[str, int | None]]:
    """Return the mean power of processors between a reading now and one a period later."""
    before, began_s = {index: cpu.energies_uj() for index, cpu in cpus.items()}, time.monotonic()
    await asyncio.sleep(2 * PERIOD_S)
    elapsed_ms = 1e3 * (time.monotonic() - began_s)
    found: dict[int, dict[str, int | None]] = {}
    for index, cpu in cpus.items():
        mean_mw = [
            None if end is None or begin is None else round((end - begin) / elapsed_ms)
            for begin, end in zip(before[index], cpu.energies_uj(), strict=True)
        ]
        found[index] = {"cpu_mw": mean_mw[0], "dram_mw": mean_mw[1]}
    return found
