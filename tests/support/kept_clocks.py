"""The real sampler on GPUs whose clocks the driver keeps for 100 ms, as one H200's does, while a program changes them.

In virtual time: nothing waits, and the same seed gives the same readings. Clock and power are kept apart, each
refreshed when it is asked for and old enough.
"""

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.gpu.device import GpuIdentity, GpuReading
from gpuenergyd.gpu.link.messages import ClockChangeReport, GpuSample
from gpuenergyd.gpu.worker.threads.actuator import ClockLock
from gpuenergyd.gpu.worker.threads.sample_stream import ForeignChangeDetector
from tests.support.costly_counters import CostlyHost, Levels

CLOCKS_MHZ = (1980, 1740, 1500, 1200, 960)
CALL_NS = 3_000_000
GPU = "0"
_MS = 1_000_000
_FIRST_CALL_NS = 5_000_000_000


@dataclass(frozen=True)
class Change:
    """One change of the program: its instants, and the clocks before and after."""

    called_ns: int
    effective_ns: int
    before_mhz: int
    requested_mhz: int

    @property
    def returned_ns(self) -> int:
        return self.called_ns + CALL_NS


@dataclass(frozen=True)
class Program:
    """A walk among clocks at chance intervals; latencies are by target clock, each a tenth more or less."""

    latency_ms: Mapping[int, float]
    num_changes: int
    every_ms: tuple[float, float] = (60.0, 400.0)
    seed: int = 0
    num_clocks: int = len(CLOCKS_MHZ)

    def changes(self) -> list[Change]:
        """Return all changes in order; a later one replaces one that is not in effect."""
        draw = random.Random(self.seed)
        at_ns, clock_mhz, changes = _FIRST_CALL_NS, CLOCKS_MHZ[0], []
        for _ in range(self.num_changes):
            target_mhz = draw.choice([clock for clock in CLOCKS_MHZ[: self.num_clocks] if clock != clock_mhz])
            latency_ms = self.latency_ms[target_mhz] * draw.uniform(0.9, 1.1)
            changes.append(Change(at_ns, at_ns + CALL_NS + round(latency_ms * _MS), clock_mhz, target_mhz))
            clock_mhz = target_mhz
            at_ns += round(draw.uniform(*self.every_ms) * _MS)
        return changes


@dataclass
class KeptClocks(CostlyHost):
    """One GPU, what is asked of it, and the daemon's view of it."""

    changes: Sequence[Change] = ()
    keep_ns: int = 100 * _MS
    """0: clocks are read as they are."""
    reports: list[ClockChangeReport] = field(default_factory=list)
    num_foreign: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        identity = GpuIdentity(GPU, 0, "H200", CLOCKS_MHZ, is_simulated=True, driver_version="580")
        gpus = Gpus()
        gpus.update([identity])
        self.gpu = gpus[GPU]
        self._returned_ns = [change.returned_ns for change in self.changes]
        self._num_reported = 0
        self._detector = ForeignChangeDetector()
        self._kept_clock = -self.keep_ns, CLOCKS_MHZ[0]

    def true_clock_mhz(self, at_ns: int) -> int:
        """Return the clock in force: that of the newest change that has taken effect."""
        for change in reversed(self.changes[: bisect_right(self._returned_ns, at_ns)]):
            if change.effective_ns <= at_ns:
                return change.requested_mhz
        return CLOCKS_MHZ[0]

    def read_without_energy(self, gpu_uuid: str) -> GpuReading:
        """Read power and clock, each as the driver keeps it."""
        begin_ns = self.now_ns
        reading = super().read_without_energy(gpu_uuid)
        if self.now_ns - self._kept_clock[0] >= self.keep_ns:
            self._kept_clock = self.now_ns, self.true_clock_mhz(self.now_ns)
        return replace(
            reading,
            read_mono_ns=begin_ns,
            sm_clock_mhz=self._kept_clock[1],
            is_clock_limited=False,
            sm_clock_by_mono_ns=self.now_ns,
        )

    def wait(self, pause_s: float) -> None:
        """Sleep, or until a call has returned whose effect is to be watched for."""
        num = self._num_reported
        if num < len(self.changes) and self._returned_ns[num] < self.now_ns + round(pause_s * 1e9):
            self.now_ns = max(self.now_ns, self._returned_ns[num])
            self._num_reported += 1
            self.thread.await_effect(_report(self.changes[num]))
            return
        super().wait(pause_s)

    def _settle(self, change: ClockChangeReport) -> None:
        self.reports.append(change)
        self.gpu.record_clock_change(change)

    def _keep(self, samples: Sequence[GpuSample]) -> None:
        super()._keep(samples)
        for sample in samples:
            self.num_foreign += self._detector.is_detected(sample, self._lock())

    def _lock(self) -> ClockLock | None:
        """Return the lock in force; None while a call is in progress."""
        num_returned = bisect_right(self._returned_ns, self.now_ns)
        if not num_returned or any(c.called_ns <= self.now_ns for c in self.changes[num_returned : num_returned + 1]):
            return None
        return ClockLock(self.changes[num_returned - 1].requested_mhz, self._returned_ns[num_returned - 1])


def _report(change: Change) -> ClockChangeReport:
    return ClockChangeReport(
        GPU, change.requested_mhz, change.called_ns, change.called_ns, change.returned_ns, None, None, None
    )


def switching_host(program: Program, *, keep_ns: int = 100 * _MS) -> KeptClocks:
    """Run the sampler until all changes of a program are done."""
    changes = program.changes()
    until_ns = changes[-1].effective_ns + 1_000_000_000
    levels = Levels([(0.063, 690.0), (0.03, 126.0)], until_ns=until_ns + 5_000_000_000, seed=program.seed)
    host = KeptClocks([levels], until_ns, program.seed, changes=changes, keep_ns=keep_ns)
    host.run()
    return host
