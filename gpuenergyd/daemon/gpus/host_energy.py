"""Energy of CPU packages and memory from the kernel's counters, recorded apart from GPU energy.

Intervals without a reading are recorded as missing, and the status gives the reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpuenergyd.errors import GpuUnsupportedError
from gpuenergyd.powercap import POWERCAP, PowercapCounter, component_counters
from gpuenergyd.store.records import HostRollupRecord

PERIOD_S = 10.0
_BUCKETS_S = (60, 3600)
_MAX_GAP_S = 120.0
"""After a longer gap (host suspended, daemon hung) the counter may have wrapped more than once."""
_UJ_PER_J = 1e6
_NS_PER_S = 1e9


@dataclass(slots=True)
class HostEnergy:
    """Reads the counters every `period_s`; `reason` says why a counter cannot be read, and is None if all can."""

    root: Path = POWERCAP
    period_s: float = PERIOD_S
    reason: str | None = None
    _domains: list[PowercapCounter] = field(default_factory=list)
    _last_mono_ns: int = 0

    def __post_init__(self) -> None:
        self._domains = component_counters(self.root)
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

    def _used_j(self, domain: PowercapCounter, elapsed_s: float) -> float | None:
        try:
            used_uj = domain.used_uj()
        except GpuUnsupportedError as error:
            domain.last_uj = None  # it may have wrapped more than once until it can be read again
            self.reason = f"{domain.name}: {error}"
            return None
        return None if used_uj is None or elapsed_s > _MAX_GAP_S else used_uj / _UJ_PER_J
