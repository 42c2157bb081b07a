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
from gpuenergyd_zeusd.parameters import BadParameterError

POWERCAP = Path("/sys/class/powercap")
PERIOD_S = 0.05
WRAP_WATCH_S = 30.0
"""Counters wrap after minutes at full power, so they are read at least this often."""


@dataclass(slots=True)
class _Counter:
    """One energy counter without its wraps, read at most once per period."""

    folder: Path
    energy_uj: int = 0
    _raw_uj: int = 0
    _read_mono_s: float | None = None

    def read_uj(self) -> int:
        """Return the energy in uJ.

        Raises:
            GpuUnsupportedError: the counter cannot be read.
        """
        now_s = time.monotonic()
        if self._read_mono_s is None or now_s - self._read_mono_s >= PERIOD_S:
            raw_uj = self._integer("energy_uj")
            wrapped_uj = self._integer("max_energy_range_uj") if raw_uj < self._raw_uj else 0
            self.energy_uj += raw_uj - self._raw_uj + wrapped_uj
            self._raw_uj, self._read_mono_s = raw_uj, now_s
        return self.energy_uj

    def _integer(self, name: str) -> int:
        try:
            return int((self.folder / name).read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            raise GpuUnsupportedError(f"{self.folder / name}: cannot be read: {type(error).__name__}") from None


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
        numbers = (zone.name.partition(":")[2] for zone in root.glob("intel-rapl:*"))
        try:
            for index in sorted(int(number) for number in numbers if number.isdecimal()):
                zone = root / f"intel-rapl:{index}"
                drams = [part for part in root.glob(f"{zone.name}:*") if _name(part) == "dram"]
                cpu = Cpu(_Counter(zone), _Counter(drams[0]) if drams else None)
                cpu.energies_uj()
                self.by_index[index] = cpu
        except GpuUnsupportedError:
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


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


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
