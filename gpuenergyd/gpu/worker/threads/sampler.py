"""The thread that reads GPUs periodically, and more often near updates of energy counters and clock changes.

An energy counter that costs much CPU time is read apart from the other values: its updates are predicted, and it is
read about once a second, and when power has changed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.device import EnergyReading, GpuReading, MeasuresGpus
from gpuenergyd.gpu.link.messages import ClockChangeReport, GpuHealth, GpuSample
from gpuenergyd.gpu.worker.threads.actuator import health_after
from gpuenergyd.gpu.worker.threads.clock_age import GOLDEN_RATIO
from gpuenergyd.gpu.worker.threads.clock_settling import EffectWatch
from gpuenergyd.gpu.worker.threads.driver_thread import DriverThread
from gpuenergyd.gpu.worker.threads.followed_counter import FollowedCounter

_NS_PER_S = 1_000_000_000
_FAILED_READ_PAUSE_NS = 1_000_000_000
_LEARNING_TIME_NS = 2_000_000
"""Time for a reading of each counter whose period is being learned; with slow drivers they learn one by one."""
_OLD_EDGE_NS = 3_000_000_000
"""Age of the last dated update from which a sample shows the counter as read, undated. One a second is dated."""
_PAUSE_AFTER_TICK = 3
"""A multiple of the time that the readings of a tick take: the longest delay of the next tick, or the mean pause before
it where the driver is slow. Dating and clock changes need time without periodic readings."""
_UNEVEN_RATIO = 0.5
"""Longest delay of a tick in periods, where energy follows power between dated updates: ticks at equal distances would
always meet the same part of a program that repeats as often."""
_POWER_STEP_RATIO, _POWER_STEP_W = 0.15, 20.0
"""A change of power from one reading to the next after which the energy is read."""


@dataclass(slots=True)
class _SampledGpu:
    """One GPU: its energy counter, and the clock change whose effect is awaited."""

    gpu_uuid: str
    counter: FollowedCounter = field(default_factory=FollowedCounter)
    effect: EffectWatch = field(default_factory=EffectWatch)
    paused_until_ns: int = 0
    is_failing: bool = False
    power_w: float | None = None
    energy_j: float | None = None
    """Power and energy at the newest reading."""

    def next_read_ns(self) -> int:
        """Return the instant of the next extra reading, in monotonic ns; 0 for none."""
        effect = self.effect
        wanted = [t for t in (self.counter.next_read_ns, effect.next_read_ns, effect.age.next_read_ns) if t]
        return max(min(wanted), self.paused_until_ns) if wanted else 0

    def needs_clock(self, now_ns: int) -> bool:
        """Return whether the extra reading that is due is one of the clock."""
        return 0 < self.effect.next_read_ns <= now_ns or self.needs_power(now_ns)

    def needs_power(self, now_ns: int) -> bool:
        """Return whether a reading without energy is due."""
        return 0 < self.effect.age.next_read_ns <= now_ns


class Sampler(DriverThread):
    """Reads every GPU each `period_s`, near counter updates, and after a clock change until it takes effect.

    The callbacks run on the sampler's thread. Late ticks are skipped and counted.
    """

    def __init__(
        self,
        reader: MeasuresGpus,
        gpu_uuids: Sequence[str],
        *,
        period_s: float,
        on_samples: Callable[[Sequence[GpuSample]], None],
        on_settled: Callable[[ClockChangeReport], None],
        on_health: Callable[[str, GpuHealth, str], None],
        on_counter_reset: Callable[[str], None],
    ) -> None:
        super().__init__("sampler")
        self.num_late_ticks = 0
        self._num_ticks = 0
        self._tick_delay_ns = 0  # of the next tick, beyond the grid of the period
        self._reader = reader
        self._period_s = period_s
        self._on_samples = on_samples
        self._on_settled = on_settled
        self._on_health = on_health
        self._on_counter_reset = on_counter_reset
        self._gpus = {uuid: _SampledGpu(uuid) for uuid in gpu_uuids}

    def separate(self, gpu_uuid: str) -> "Sampler":
        """Leave a GPU, with what is known of its counter and clock, to a new sampler; return that, not started."""
        own = Sampler(
            self._reader,
            [],
            period_s=self._period_s,
            on_samples=self._on_samples,
            on_settled=self._on_settled,
            on_health=self._on_health,
            on_counter_reset=self._on_counter_reset,
        )
        with self._wakeup:
            own._gpus = {uuid: gpu for uuid, gpu in self._gpus.items() if uuid == gpu_uuid}
            self._gpus = {uuid: gpu for uuid, gpu in self._gpus.items() if uuid != gpu_uuid}
        return own

    def remove(self, gpu_uuid: str) -> None:
        """Stop reading a GPU."""
        with self._wakeup:
            self._gpus = {uuid: gpu for uuid, gpu in self._gpus.items() if uuid != gpu_uuid}

    def add(self, gpu_uuid: str) -> None:
        """Start reading a GPU."""
        with self._wakeup:
            self._gpus = {**self._gpus, gpu_uuid: _SampledGpu(gpu_uuid)}
            self._wakeup.notify()

    def counter(self, gpu_uuid: str) -> FollowedCounter:
        """Return what is known of a GPU's energy counter, to be read only."""
        return self._gpus[gpu_uuid].counter

    def await_effect(self, change: ClockChangeReport) -> None:
        """Read the GPU until a clock change takes effect, then report the change; a newer one replaces it."""
        with self._wakeup:
            gpu = self._gpus.get(change.gpu_uuid)
            if gpu is None:
                self._on_settled(change)
                return
            replaced = gpu.effect.await_effect(change)
            if replaced is not None:
                self._on_settled(replaced)
            self._wakeup.notify()

    def _work(self) -> None:
        period_ns = round(self._period_s * _NS_PER_S)
        next_tick_ns = time.monotonic_ns()
        while True:
            with self._wakeup:
                if self._is_closing:
                    return
                self._postpone_learning()
                instants = [t for gpu in self._gpus.values() if (t := gpu.next_read_ns())]
                next_ns = min(next_tick_ns, *instants) if instants else next_tick_ns
                pause_s = (next_ns - time.monotonic_ns()) / _NS_PER_S
                if pause_s > 0:
                    self._wakeup.wait(pause_s)
                    continue
            now_ns = time.monotonic_ns()
            is_tick = now_ns >= next_tick_ns
            if is_tick:
                next_tick_ns -= self._tick_delay_ns
                num_missed = (now_ns - next_tick_ns) // period_ns
                self.num_late_ticks += num_missed
                next_tick_ns += (num_missed + 1) * period_ns
            samples = self._read_due(now_ns, is_tick=is_tick)
            if is_tick:
                next_tick_ns = self._tick_after(now_ns, next_tick_ns, period_ns)
            if is_tick and samples:
                self._on_samples(samples)

    def _tick_after(self, began_ns: int, next_tick_ns: int, period_ns: int) -> int:
        """Return the instant of the tick after the one whose readings began at `began_ns` and have just ended.

        The more readings take, the less regular are ticks: otherwise an update of a counter with the same period could
        fall into the readings of every tick, which never date it. On average ticks keep the period, unless the driver
        is too slow for that.
        """
        done_ns = time.monotonic_ns()
        pause_ns = _PAUSE_AFTER_TICK * (done_ns - began_ns)
        if any(gpu.counter.is_read_apart for gpu in self._gpus.values()):
            pause_ns = max(pause_ns, round(_UNEVEN_RATIO * period_ns))
        if any(gpu.effect.age.age_ns for gpu in self._gpus.values()):
            pause_ns = max(pause_ns, period_ns - (done_ns - began_ns))
        self._num_ticks += 1
        share = self._num_ticks * GOLDEN_RATIO % 1.0
        if done_ns - began_ns + pause_ns <= period_ns:
            self._tick_delay_ns = round(share * pause_ns)
            return next_tick_ns + self._tick_delay_ns
        self._tick_delay_ns = 0
        tick_ns = max(next_tick_ns, done_ns + round((0.5 + share) * pause_ns))
        self.num_late_ticks += -(-(tick_ns - next_tick_ns) // period_ns)
        return tick_ns

    def _read_due(self, now_ns: int, *, is_tick: bool) -> list[GpuSample]:
        samples = []
        for gpu in tuple(self._gpus.values()):
            is_due = is_tick or 0 < gpu.next_read_ns() <= now_ns
            is_removed = gpu.gpu_uuid not in self._gpus
            if self._is_closing or is_removed or not is_due or now_ns < gpu.paused_until_ns:
                continue
            if not is_tick and not gpu.needs_clock(now_ns):
                self._read_energy(gpu)
                continue
            sample = self._read(gpu, leaves_energy=not is_tick and gpu.needs_power(now_ns))
            if sample is not None:
                samples.append(sample)
        return samples

    def _postpone_learning(self) -> None:
        """Let as many counters learn their period as can be read within a few milliseconds, the others later."""
        learning = [gpu.counter for gpu in self._gpus.values() if gpu.counter.is_learning]
        took_ns = max((counter.call_ns for counter in learning), default=0)
        num_at_once = max(1, _LEARNING_TIME_NS // took_ns) if took_ns else len(learning)
        for counter in sorted(learning, key=lambda counter: counter.learning_since_ns)[num_at_once:]:
            counter.postpone_learning(time.monotonic_ns())

    def _read_energy(self, gpu: _SampledGpu) -> None:
        """Read the energy counter alone, to date its updates."""
        self.call.begin(gpu.gpu_uuid)
        try:
            reading = self._reader.read_energy(gpu.gpu_uuid)
        except GpuEnergyError as error:
            self._record_failure(gpu, error)
            return
        finally:
            self.call.end()
        gpu.counter.observe_alone(reading)
        self._report_reset(gpu, reading.total_energy_j)

    def _report_reset(self, gpu: _SampledGpu, energy_j: float | None) -> None:
        """Report a counter that has fallen, perhaps while it could not be read."""
        if energy_j is not None:
            if gpu.energy_j is not None and energy_j < gpu.energy_j:
                self._on_counter_reset(gpu.gpu_uuid)
            gpu.energy_j = energy_j

    def _record_failure(self, gpu: _SampledGpu, error: GpuEnergyError) -> None:
        gpu.paused_until_ns = time.monotonic_ns() + _FAILED_READ_PAUSE_NS
        gpu.counter.forget(gpu.paused_until_ns)
        if not gpu.is_failing:
            gpu.is_failing = True
            self._on_health(gpu.gpu_uuid, health_after(error), str(error))

    def _read(self, gpu: _SampledGpu, *, leaves_energy: bool = False) -> GpuSample | None:
        self.call.begin(gpu.gpu_uuid)
        try:
            is_apart = leaves_energy or gpu.counter.is_read_apart
            read = self._reader.read_without_energy if is_apart else self._reader.read
            reading = read(gpu.gpu_uuid)
        except GpuEnergyError as error:
            self._record_failure(gpu, error)
            return None
        finally:
            self.call.end()
        if gpu.is_failing:
            gpu.is_failing = False
            self._on_health(gpu.gpu_uuid, GpuHealth.OK, "it can be read again")
        if not is_apart:
            gpu.counter.observe(EnergyReading(reading.read_mono_ns, gpu.counter.call_ns, reading.total_energy_j))
            self._report_reset(gpu, reading.total_energy_j)
        with self._wakeup:
            settled = gpu.effect.observe(reading)
        if settled is not None:
            self._on_settled(settled)
        if settled is not None or _has_stepped(gpu.power_w, reading):
            gpu.counter.read_soon(reading.read_mono_ns)
        gpu.power_w = reading.power_w
        edge = gpu.counter.newest_edge
        if edge is not None and reading.read_mono_ns - edge[0] > _OLD_EDGE_NS:
            edge = None
        return GpuSample(
            gpu_uuid=reading.gpu_uuid,
            read_mono_ns=reading.read_mono_ns,
            power_w=reading.power_w,
            total_energy_j=reading.total_energy_j if edge is None else edge[1],
            energy_edge_mono_ns=None if edge is None else edge[0],
            sm_clock_mhz=reading.sm_clock_mhz,
            temperature_celsius=reading.temperature_celsius,
            is_power_capped=reading.is_power_capped,
            is_clock_limited=reading.is_clock_limited,
            refused=reading.refused,
            clock_age_ns=gpu.effect.age.age_ns,
            utilization_ratio=reading.utilization_ratio,
        )


def _has_stepped(before_w: float | None, reading: GpuReading) -> bool:
    """Return whether power has changed so much that the energy since is of another kind."""
    if before_w is None or reading.power_w is None:
        return False
    return abs(reading.power_w - before_w) > max(_POWER_STEP_W, _POWER_STEP_RATIO * max(before_w, reading.power_w))
