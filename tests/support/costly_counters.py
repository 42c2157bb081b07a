"""The real sampler on GPUs whose energy counters cost as much to read as an H200's, in virtual time.

Nothing waits, no CPU time is used, and the same seed gives the same readings. Power is a list of levels, or a recorded
trace of a real GPU.
"""

import csv
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast
from unittest.mock import patch

from gpuenergyd.core.measurement.telemetry import EnergyCounter
from gpuenergyd.gpu.device import EnergyReading, GpuReading
from gpuenergyd.gpu.link.messages import ClockChangeReport, GpuSample
from gpuenergyd.gpu.worker.threads import driver_thread, sampler

PERIOD_NS = 100_000_000
MAX_POWER_W = 900.0
CHEAP_CALL_NS = 60_000
"""All values but the energy, the binding included."""
ENERGY_CALLS = ((0.85, 2.41, 3.08), (0.12, 5.5, 6.9), (0.03, 16.2, 16.2))
"""How often a call takes that long, in ms, idle and under load: measured on one H200."""
LOAD_W = 200.0
LATE_NS = 150_000
"""Mean lateness of wake-ups."""
_BEGIN_NS = 1_000_000_000


class Source(Protocol):
    """What one GPU does."""

    def power_w(self, at_ns: int) -> float:
        """Return the power at an instant, as the driver reports it."""
        ...

    def counted_j(self, at_ns: int) -> float:
        """Return what the energy counter shows at an instant."""
        ...


class Levels:
    """A GPU that repeats durations in seconds at powers in W, each a little different every time."""

    def __init__(
        self, levels: Sequence[tuple[float, float]], *, until_ns: int, seed: int, scatter: float = 0.02
    ) -> None:
        draw = random.Random(seed)
        self.phase_ns = draw.randrange(PERIOD_NS)
        self.period_ns = PERIOD_NS * (1 + draw.uniform(-40e-6, 40e-6))
        self._noise = draw
        self._at_ns, self._energy_j, self._level_w = [0], [0.0], []
        for duration_s, level_w in itertools.cycle(levels):
            duration_ns = round(duration_s * 1e9 * max(0.5, 1 + scatter * draw.gauss(0, 1)))
            self._level_w.append(level_w * (1 + scatter / 2 * draw.gauss(0, 1)))
            self._at_ns.append(self._at_ns[-1] + duration_ns)
            self._energy_j.append(self._energy_j[-1] + self._level_w[-1] * duration_ns / 1e9)
            if self._at_ns[-1] > until_ns:
                break

    def true_j(self, at_ns: float) -> float:
        """Return the energy up to an instant."""
        k = min(bisect_right(self._at_ns, at_ns), len(self._level_w)) - 1
        return self._energy_j[k] + self._level_w[k] * (at_ns - self._at_ns[k]) / 1e9

    def power_w(self, at_ns: int) -> float:
        """Return the power, with the scatter of one H200."""
        level_w = self._level_w[min(bisect_right(self._at_ns, at_ns), len(self._level_w)) - 1]
        return level_w * (1 + (0.042 if level_w > LOAD_W else 0.003) * self._noise.gauss(0, 1))

    def counted_j(self, at_ns: int) -> float:
        """Return the energy at the counter's last update."""
        number = (at_ns - self.phase_ns) // self.period_ns
        return 1e5 + round(self.true_j(max(0.0, self.phase_ns + number * self.period_ns)), 3)


class Trace:
    """A recorded GPU; its counter moves on the grid on which all readings lie. Power outside is that of the ends."""

    def __init__(self, path: Path, *, begin_ns: int) -> None:
        with path.open() as file:
            rows = list(csv.DictReader(file))
        at_ns = [begin_ns + round(float(row["time_ms"]) * 1e6) for row in rows]
        energy_j = [float(row["energy_counter_j"]) for row in rows]
        changed = [k for k in range(1, len(rows)) if energy_j[k] != energy_j[k - 1]]
        least_ns = max(at_ns[k - 1] - number * PERIOD_NS for number, k in enumerate(changed))
        most_ns = min(at_ns[k] - number * PERIOD_NS for number, k in enumerate(changed))
        assert least_ns < most_ns, "no such grid"
        self.updates = [
            ((least_ns + most_ns) // 2 + n * PERIOD_NS, energy_j[k]) for n, k in enumerate([0, *changed], -1)
        ]
        self._powers_w = [(0, float(rows[0]["power_instant_w"]))]
        for own_ns, row in zip(at_ns, rows, strict=True):
            if (power_w := float(row["power_instant_w"])) != self._powers_w[-1][1]:
                self._powers_w.append((own_ns, power_w))
        self.end_ns = at_ns[-1]

    def refreshed(self, at_ns: int) -> tuple[int, float]:
        """Return the newest recorded power, and since when it was kept: on a GPU the sampler itself refreshes it."""
        newest_ns, power_w = self._powers_w[bisect_right(self._powers_w, (at_ns, MAX_POWER_W)) - 1]
        return newest_ns if newest_ns > 0 and at_ns <= self.end_ns else at_ns, power_w

    def power_w(self, at_ns: int) -> float:
        """Return the recorded power."""
        return self.refreshed(at_ns)[1]

    def counted_j(self, at_ns: int) -> float:
        """Return the recorded value of the counter."""
        newest = bisect_right(self.updates, (at_ns, math.inf)) - 1
        if 0 <= newest < len(self.updates) - 1:
            return self.updates[newest][1]
        update_ns, energy_j = self.updates[max(0, newest)]
        return energy_j + self.power_w(at_ns) * ((at_ns - update_ns) // PERIOD_NS) * PERIOD_NS / 1e9


@dataclass
class CostlyHost:
    """A clock, and a driver that keeps all values but the energy for 100 ms."""

    sources: Sequence[Source]
    until_ns: int
    seed: int
    cpu_ratio: float = 1.0
    """CPU time of an energy reading over its duration; without any it costs nothing."""
    now_ns: int = _BEGIN_NS
    samples: list[GpuSample] = field(default_factory=list)
    energy_calls: list[tuple[int, int, int]] = field(default_factory=list)
    """GPU, begin and duration of each energy reading."""
    num_resets: int = 0
    thread: sampler.Sampler = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._kept = [(-PERIOD_NS, 0.0)] * len(self.sources)

    def run(self) -> Self:
        """Run the sampler to the end."""
        with patch.object(sampler, "time", self), patch.object(driver_thread, "time", self):
            self.thread = sampler.Sampler(
                cast("Any", self),
                [str(k) for k in range(len(self.sources))],
                period_s=0.1,
                on_samples=self._keep,
                on_settled=self._settle,
                on_health=lambda *_: None,
                on_counter_reset=self._count_reset,
            )
            self.thread._wakeup = cast("Any", self)
            self.thread._work()
        return self

    def counter(self, gpu: int) -> EnergyCounter:
        """Return what the daemon knows of a GPU's energy at the end."""
        counter = EnergyCounter(MAX_POWER_W)
        for sample in self.samples:
            if sample.gpu_uuid == str(gpu):
                if sample.energy_edge_mono_ns is not None and sample.total_energy_j is not None:
                    counter.record(sample.energy_edge_mono_ns, sample.total_energy_j)
                if sample.power_w is not None:
                    counter.record_power(sample.read_mono_ns, sample.power_w)
        return counter

    def cpu_ratio_between(self, gpu: int, begin_ns: int, end_ns: int) -> float:
        """Return the share of a core that energy readings of a GPU used."""
        used_ns = sum(took for own, at, took in self.energy_calls if own == gpu and begin_ns <= at < end_ns)
        return used_ns / (end_ns - begin_ns)

    # As the driver

    def monotonic_ns(self) -> int:
        """Return the time; asking takes some."""
        self.now_ns += 500
        return self.now_ns

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        """Read the energy counter, at some instant within the call."""
        gpu, called_ns = int(gpu_uuid), self.now_ns
        is_loaded = self.sources[gpu].power_w(called_ns) > LOAD_W
        (row,) = self._draw.choices(ENERGY_CALLS, [share for share, _, _ in ENERGY_CALLS])
        took_ns = round(row[1 + is_loaded] * 1e6 * self._draw.uniform(0.95, 1.05))
        seen_ns = called_ns + self._draw.randrange(took_ns)
        self.now_ns += took_ns
        self.energy_calls.append((gpu, called_ns, took_ns))
        energy_j = self.sources[gpu].counted_j(seen_ns)
        return EnergyReading(called_ns + took_ns // 2, took_ns, energy_j, round(self.cpu_ratio * took_ns))

    def read_without_energy(self, gpu_uuid: str) -> GpuReading:
        """Read all other values."""
        gpu, called_ns, source = int(gpu_uuid), self.now_ns, self.sources[int(gpu_uuid)]
        self.now_ns += CHEAP_CALL_NS
        if isinstance(source, Trace):
            refreshed_ns, power_w = source.refreshed(called_ns)
            return GpuReading(gpu_uuid, refreshed_ns, power_w=power_w)
        if self.now_ns - self._kept[gpu][0] >= PERIOD_NS:
            self._kept[gpu] = self.now_ns, round(source.power_w(self.now_ns), 3)
        return GpuReading(gpu_uuid, called_ns, power_w=self._kept[gpu][1])

    def read(self, gpu_uuid: str) -> GpuReading:
        """Read all values, the energy first."""
        energy, rest = self.read_energy(gpu_uuid), self.read_without_energy(gpu_uuid)
        return GpuReading(gpu_uuid, energy.read_mono_ns, power_w=rest.power_w, total_energy_j=energy.total_energy_j)

    def _settle(self, change: ClockChangeReport) -> None:
        """Take a clock change; here there are none."""

    def _keep(self, samples: Sequence[GpuSample]) -> None:
        self.samples += samples
        if self.now_ns > self.until_ns:
            self.thread._is_closing = True

    def _count_reset(self, _: str) -> None:
        self.num_resets += 1

    # As the condition on which the thread waits

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def notify(self) -> None:
        """Do nothing: the thread that is told of something waits no longer."""

    def wait(self, pause_s: float) -> None:
        """Sleep, a little too long."""
        self.now_ns += round(pause_s * 1e9 + self._draw.expovariate(1 / LATE_NS))
