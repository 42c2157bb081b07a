"""Energy of CPU packages and memory from the counters in /sys/class/powercap, recorded apart from GPU energy.

Kernel interface: Documentation/power/powercap/powercap.rst. `energy_uj` counts up to `max_energy_range_uj` and wraps.
On many kernels only root can read it: intervals without a reading are recorded as missing, and the status gives the
reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpuenergyd.store.records import HostRollupRecord

POWERCAP = Path("/sys/class/powercap")
PERIOD_S = 10.0
_BUCKETS_S = (60, 3600)
_MAX_GAP_S = 120.0
"""After a longer gap (host suspended, daemon hung) the counter may have wrapped more than once."""
_UJ_PER_J = 1e6
_NS_PER_S = 1e9


@dataclass(slots=True)
class _Domain:
    """One counter: a CPU package with all its cores, or the memory attached to it."""

    name: str
    folder: Path
    range_uj: int
    last_uj: int | None = None


@dataclass(slots=True)
class HostEnergy:
    """Reads the counters every `period_s`; `reason` says why a counter cannot be read, and is None if all can."""

    root: Path = POWERCAP
    period_s: float = PERIOD_S
    reason: str | None = None
    _domains: list[_Domain] = field(default_factory=list)
    _last_mono_ns: int = 0

    def __post_init__(self) -> None:
        self._domains = sorted(_domains(self.root), key=lambda domain: domain.name)
        if not self._domains:
            self.reason = f"no CPU energy counters in {self.root}"

    def records(self, mono_ns: int, at: datetime) -> Iterator[HostRollupRecord]:
        """Yield the energy used since the last reading if `period_s` is over; `at` is the wall clock at `mono_ns`.

        An interval is added to the minute and the hour in which it begins.
        """
        elapsed_s = (mono_ns - self._last_mono_ns) / _NS_PER_S
        if not self._domains or (self._last_mono_ns and elapsed_s < self.period_s):
            return
        is_first, self._last_mono_ns = not self._last_mono_ns, mono_ns
        self.reason = None
        begun_s = int((at - timedelta(seconds=elapsed_s)).timestamp()) if not is_first else 0
        for domain in self._domains:
            energy_j = self._used_j(domain, elapsed_s)
            if is_first:
                continue
            for bucket_s in _BUCKETS_S:
                yield HostRollupRecord(
                    bucket_s,
                    datetime.fromtimestamp(begun_s - begun_s % bucket_s, tz=UTC),
                    domain.name,
                    energy_j,
                    measured_s=elapsed_s if energy_j is not None else 0.0,
                    missing_s=0.0 if energy_j is not None else elapsed_s,
                )

    def status(self) -> dict[str, Any]:
        """Return the readable domains, and the reason if one is not readable."""
        return {
            "domains": [domain.name for domain in self._domains if domain.last_uj is not None],
            "reason": self.reason,
        }

    def _used_j(self, domain: _Domain, elapsed_s: float) -> float | None:
        before = domain.last_uj
        try:
            domain.last_uj = now_uj = _read_integer(domain.folder / "energy_uj")
        except (OSError, ValueError) as error:
            domain.last_uj = None
            cause = error.strerror if isinstance(error, OSError) else "not a number"
            self.reason = f"{domain.name}: cannot read {domain.folder / 'energy_uj'}: {cause}"
            return None
        if before is None or elapsed_s > _MAX_GAP_S:
            return None
        used_uj = now_uj - before
        if used_uj < 0:
            used_uj += domain.range_uj
        return used_uj / _UJ_PER_J if used_uj >= 0 else None


def _domains(root: Path) -> Iterator[_Domain]:
    """Yield CPU packages and their memory; core and platform counters would count the same energy twice."""
    for folder in sorted(root.glob("intel-rapl:*")):
        try:
            name = (folder / "name").read_text(encoding="utf-8").strip()
            if name.startswith("package"):
                yield _Domain(name, folder, _read_integer(folder / "max_energy_range_uj"))
            elif name == "dram":
                parent = (root / folder.name.rpartition(":")[0] / "name").read_text(encoding="utf-8").strip()
                yield _Domain(f"{parent}/dram", folder, _read_integer(folder / "max_energy_range_uj"))
        except (OSError, ValueError):
            continue


def _read_integer(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))
