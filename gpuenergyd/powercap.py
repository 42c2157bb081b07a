"""Energy counters of CPU packages and memory in /sys/class/powercap (RAPL), read over their wraps.

Kernel interface: Documentation/power/powercap/powercap.rst. `energy_uj` counts up to `max_energy_range_uj` and wraps.
On many kernels only root can read it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.errors import GpuUnsupportedError

POWERCAP = Path("/sys/class/powercap")


@dataclass(slots=True)
class PowercapCounter:
    """One counter: a zone of the highest level, or memory attached to it."""

    zone: Path
    name: str
    """E.g. package-0, which has all its cores; package-0/dram; psys, which has the packages, too."""
    last_uj: int | None = None

    def used_uj(self) -> int | None:
        """Return the energy since the last reading, across at most one wrap; None at the first one.

        Raises:
            GpuUnsupportedError: the counter cannot be read.
        """
        before_uj, now_uj = self.last_uj, self._integer("energy_uj")
        wrapped_uj = self._integer("max_energy_range_uj") if before_uj is not None and now_uj < before_uj else 0
        self.last_uj = now_uj
        return None if before_uj is None else max(0, now_uj + wrapped_uj - before_uj)

    def _integer(self, name: str) -> int:
        try:
            return int((self.zone / name).read_text(encoding="ascii"))
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else "not a number"
            raise GpuUnsupportedError(f"cannot read {self.zone / name}: {cause}") from None


def energy_counters(root: Path) -> Iterator[PowercapCounter]:
    """Yield the zones of the highest level and their memory; other parts would count the same energy twice."""
    for zone in sorted(root.glob("intel-rapl:*")):
        parent = zone.name.rpartition(":")[0]
        try:
            name = (zone / "name").read_text(encoding="utf-8").strip()
            if parent == "intel-rapl":
                yield PowercapCounter(zone, name)
            elif name == "dram":
                yield PowercapCounter(zone, f"{(root / parent / 'name').read_text(encoding='utf-8').strip()}/dram")
        except (OSError, ValueError):
            continue


def component_counters(root: Path) -> list[PowercapCounter]:
    """Return CPU packages and memory, without counters of the platform, by name."""
    found = [one for one in energy_counters(root) if one.name.startswith("package") or one.name.endswith("/dram")]
    return sorted(found, key=lambda counter: counter.name)
