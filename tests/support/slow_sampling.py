"""A virtual training whose energy counters the real sampler reads, by slow calls, in virtual time.

The sampler's thread and the training take turns: time stands still for the sampler at the instant up to which the
training's energy is known. Nothing waits for real time, and the same seed gives the same readings.
"""

import random
import threading
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

from gpuenergyd.core.job.messages import RankReported
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.gpu.device import EnergyReading, GpuDetails, GpuIdentity, GpuReading
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.gpu.worker.threads import sampler
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.waiting import LIMIT_S

_WAKEUP_NS = (50_000, 200_000)
"""How late a waiting thread wakes up."""
_CALLS_PER_READING = 4
"""Driver calls of a reading of all values: energy, power, clock, temperature."""
_MAX_PENDING = 4
"""Iterations that wait for their energy, as in the daemon; then they are observed without it."""


class _Stopped(BaseException):
    """Ends the sampler's thread."""


@dataclass
class _Clock:
    """Time of the sampler's thread, which waits while it is ahead of the training."""

    random: random.Random
    now_ns: int
    _horizon_ns: int = 0
    _is_stopped: bool = False
    _turn: threading.Condition = field(default_factory=threading.Condition)

    def monotonic_ns(self) -> int:
        """Return the present of the sampler."""
        return self.now_ns

    def advance(self, duration_ns: int) -> None:
        """Let time pass in the sampler's thread."""
        self.now_ns += max(1, duration_ns)
        with self._turn:
            while self.now_ns > self._horizon_ns:
                self._turn.notify_all()
                if self._is_stopped:
                    raise _Stopped
                self._turn.wait()

    def run_until(self, horizon_ns: int) -> None:
        """Let the sampler run up to this instant; called by the training."""
        with self._turn:
            self._horizon_ns = horizon_ns
            self._turn.notify_all()
            has_come = self._turn.wait_for(lambda: self.now_ns > self._horizon_ns, timeout=LIMIT_S)
        assert has_come, "the sampler ended"

    def stop(self) -> None:
        """Have the sampler's thread end."""
        with self._turn:
            self._is_stopped = True
            self._horizon_ns = 0
            self._turn.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, timeout_s: float) -> None:
        """Sleep, as the condition that the sampler waits for."""
        self.advance(round(timeout_s * 1e9) + self.random.randint(*_WAKEUP_NS))

    def notify(self) -> None:
        """Do nothing: nobody else wakes the sampler."""


@dataclass
class _Counters:
    """Reads the counters of a training; a call looks at the counter at some instant within it."""

    training: "SlowlyReadTraining"
    clock: _Clock
    read_ns: int
    period_ns: int

    def release(self, gpu_uuids: Collection[str]) -> None:
        """Do nothing: nobody asks."""

    def reopen(self, gpu_uuids: Collection[str]) -> tuple[GpuIdentity, ...]:  # noqa: ARG002  nobody asks
        return ()

    def identities(self) -> tuple[GpuIdentity, ...]:
        return ()

    def details(self, gpu_uuid: str) -> GpuDetails:
        del gpu_uuid
        return GpuDetails()

    def observe_only_reasons(self) -> Mapping[str, str]:
        return {}

    def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return no process: nobody asks."""
        del gpu_uuid
        return ()

    def close(self) -> None:
        """Do nothing: there is no driver."""

    def read(self, gpu_uuid: str) -> GpuReading:
        """Read all values, the energy first."""
        energy = self.read_energy(gpu_uuid)
        self.clock.advance((_CALLS_PER_READING - 1) * self.read_ns)
        return GpuReading(gpu_uuid, energy.read_mono_ns, total_energy_j=energy.total_energy_j)

    def read_without_energy(self, gpu_uuid: str) -> GpuReading:
        """Read all values: the energy uses no CPU time."""
        return self.read(gpu_uuid)

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        begin_ns = self.clock.now_ns
        seen_ns = begin_ns + self.clock.random.randint(0, self.read_ns)
        self.clock.advance(self.read_ns)
        pp_rank = int(gpu_uuid.removeprefix("GPU-"))
        energy_j = round(self.training.counted_j(pp_rank, seen_ns, self.period_ns), 3)
        return EnergyReading(begin_ns + self.read_ns // 2, self.read_ns, energy_j)


@dataclass
class SlowlyReadTraining(VirtualTraining):
    """A virtual training with counters of a period, read by the daemon's sampler through calls of a duration."""

    read_s: float = 0.0005
    sampled_ratio: float = 1.0
    """Share of each counter period in which power is sampled; the rest of the period counts as that share."""
    sample_period_s: float = 0.02

    def __post_init__(self) -> None:
        assert self.counter_period_s > 0, "exact counters need no sampler"
        ranks = range(self.schedule.num_ranks)
        self._curves: dict[int, tuple[list[float], list[float]]] = {r: ([0.0], [0.0]) for r in ranks}
        self._held: list[list[RankIteration]] = []
        super().__post_init__()
        for r in ranks:
            self._curves[r] = ([0.0, self.now_s], [self.total_j[r], self.total_j[r]])
        self._counted: dict[int, dict[int, float]] = {r: {} for r in ranks}
        self._phases_ns = [self.random.randrange(round(self.counter_period_s * 1e9)) for _ in ranks]
        self._clock = _Clock(random.Random(self.seed), self._ns(self.now_s))
        reader = _Counters(self, self._clock, round(self.read_s * 1e9), round(self.counter_period_s * 1e9))
        self._patch = patch.object(sampler, "time", SimpleNamespace(monotonic_ns=self._clock.monotonic_ns))
        self._patch.start()
        self.sampler = sampler.Sampler(
            reader,
            [f"GPU-{r}" for r in ranks],
            period_s=self.sample_period_s,
            on_samples=self._record,
            on_settled=lambda _: None,
            on_health=_fail,
            on_counter_reset=_fail,
        )
        self.sampler._wakeup = self._clock  # type: ignore[assignment]  # it waits in virtual time
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the sampler's thread."""
        self._clock.stop()
        self._thread.join(LIMIT_S)
        self._patch.stop()

    def counted_j(self, pp_rank: int, at_ns: int, period_ns: int) -> float:
        """Return what a counter shows at an instant: the energy at its last update."""
        phase_ns = self._phases_ns[pp_rank]
        number = (at_ns - phase_ns) // period_ns
        if self.sampled_ratio == 1.0:
            return self._energy_j(pp_rank, (phase_ns + number * period_ns) / 1e9)
        counted = self._counted[pp_rank]
        first = max(counted, default=number)
        counted.setdefault(first, self._energy_j(pp_rank, (phase_ns + first * period_ns) / 1e9))
        for k in range(first + 1, number + 1):
            end_s = (phase_ns + k * period_ns) / 1e9
            sampled_j = self._energy_j(pp_rank, end_s) - self._energy_j(
                pp_rank, end_s - self.sampled_ratio * period_ns / 1e9
            )
            counted[k] = counted[k - 1] + sampled_j / self.sampled_ratio
        return counted[number]

    def _energy_j(self, pp_rank: int, at_s: float) -> float:
        instants, energies = self._curves[pp_rank]
        right = bisect_right(instants, at_s)
        if right == len(instants):
            return energies[-1]
        left = right - 1
        share = (at_s - instants[left]) / (instants[right] - instants[left])
        return energies[left] + share * (energies[right] - energies[left])

    @property
    def num_dated(self) -> int:
        """How many counters have updates slow enough to be dated one by one."""
        edges = [gpu.counter.edges for gpu in self.sampler._gpus.values()]
        return sum(bool(own.period_ns) and not own.is_fast for own in edges)

    def _sample(self) -> None:
        try:
            self._clock.advance(1)
            self.sampler._work()  # the sampler's own thread would wait in real time
        except _Stopped:
            return

    def _record(self, samples: Sequence[GpuSample]) -> None:
        for sample in samples:
            if sample.energy_edge_mono_ns is not None and sample.total_energy_j is not None:
                counter = self.counters[int(sample.gpu_uuid.removeprefix("GPU-"))]
                counter.record(sample.energy_edge_mono_ns, sample.total_energy_j)

    def _spend(self, r: int, power_w: float, from_s: float, until_s: float) -> None:
        self.total_j[r] += power_w * (until_s - from_s)
        instants, energies = self._curves[r]
        if until_s > instants[-1]:
            instants.append(until_s)
            energies.append(self._shown_j(r, self.total_j[r]))

    def _hear(self, reports: list[RankIteration]) -> None:
        self._held.append(reports)
        self._clock.run_until(self._ns(min(self._free_s.values())))
        while self._held and (self._is_covered(self._held[0]) or len(self._held) > _MAX_PENDING):
            for report in self._held.pop(0):
                self.feed(RankReported(report))

    def _is_covered(self, reports: Sequence[RankIteration]) -> bool:
        return all(self.counters[own.pp_rank].covers(own.next_begin_ns or own.end_ns) for own in reports)


def _fail(*arguments: Any) -> None:
    raise AssertionError(f"the sampler reports a failure: {arguments}")
