"""The thread that reads GPUs: on time or not at all, more often where something is about to change.

Like the actuator it is abandoned when a call does not return, and a successor reads the other GPUs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.device import GpuReader
from gpuenergyd.gpu.link.messages import ClockSet, GpuHealth, GpuSample
from gpuenergyd.gpu.worker.threads.actuator import health_after
from gpuenergyd.gpu.worker.threads.clock_settling import EffectWatch
from gpuenergyd.gpu.worker.threads.counter_edges import EnergyEdges
from gpuenergyd.gpu.worker.threads.driver_thread import DriverThread

_NS_PER_S = 1_000_000_000
_FAILED_READ_PAUSE_NS = 1_000_000_000


@dataclass(slots=True)
class _Watched:
    """One GPU: its counter, and the clock change whose effect is awaited."""

    gpu_uuid: str
    edges: EnergyEdges = field(default_factory=EnergyEdges)
    effect: EffectWatch = field(default_factory=EffectWatch)
    paused_until_ns: int = 0
    is_failing: bool = False

    def next_look_ns(self) -> int:
        """When this GPU wants an extra reading; 0 for never."""
        wanted = [t for t in (self.edges.next_look_ns, self.effect.next_look_ns) if t]
        return max(min(wanted), self.paused_until_ns) if wanted else 0


class Sampler(DriverThread):
    """Reads every GPU each `period_s`, near counter updates, and after a clock change until it shows.

    The callbacks run on the sampler's thread. Ticks that come too late are skipped and counted.
    """

    def __init__(
        self,
        reader: GpuReader,
        gpu_uuids: Sequence[str],
        *,
        period_s: float,
        on_samples: Callable[[Sequence[GpuSample]], None],
        on_settled: Callable[[ClockSet], None],
        on_health: Callable[[str, GpuHealth, str], None],
        on_counter_reset: Callable[[str], None],
        on_returned: Callable[[str], None],
    ) -> None:
        super().__init__("sampler", on_returned=on_returned)
        self.num_late_ticks = 0
        self._reader = reader
        self._period_s = period_s
        self._on_samples = on_samples
        self._on_settled = on_settled
        self._on_health = on_health
        self._on_counter_reset = on_counter_reset
        self._watched = {uuid: _Watched(uuid) for uuid in gpu_uuids}

    def succeed(self, stuck_gpu_uuid: str) -> "Sampler":
        """Abandon the thread that is stuck with one GPU, and return a sampler of all others, not started."""
        with self._wakeup:
            self._abandon(stuck_gpu_uuid)
            heir = Sampler(
                self._reader,
                [uuid for uuid in self._watched if uuid != stuck_gpu_uuid],
                period_s=self._period_s,
                on_samples=self._on_samples,
                on_settled=self._on_settled,
                on_health=self._on_health,
                on_counter_reset=self._on_counter_reset,
                on_returned=self._on_returned,
            )
            heir.num_late_ticks = self.num_late_ticks
            return heir

    def leave_out(self, gpu_uuid: str) -> None:
        """Do not read a GPU any more."""
        with self._wakeup:
            self._watched = {uuid: watched for uuid, watched in self._watched.items() if uuid != gpu_uuid}

    def take_in(self, gpu_uuid: str) -> None:
        """Read a GPU from now on."""
        with self._wakeup:
            self._watched = {**self._watched, gpu_uuid: _Watched(gpu_uuid)}
            self._wakeup.notify()

    def await_effect(self, change: ClockSet) -> None:
        """Look at the GPU until the clock shows, then report the change; a newer one replaces it."""
        with self._wakeup:
            watched = self._watched.get(change.gpu_uuid)
            if watched is None:
                self._on_settled(change)
                return
            overtaken = watched.effect.await_effect(change)
            if overtaken is not None:
                self._on_settled(overtaken)
            self._wakeup.notify()

    def _work(self) -> None:
        period_ns = round(self._period_s * _NS_PER_S)
        next_tick_ns = time.monotonic_ns()
        while True:
            with self._wakeup:
                if self._is_closing:
                    return
                looks = [t for w in self._watched.values() if (t := w.next_look_ns())]
                next_ns = min(next_tick_ns, *looks) if looks else next_tick_ns
                pause_s = (next_ns - time.monotonic_ns()) / _NS_PER_S
                if pause_s > 0:
                    self._wakeup.wait(pause_s)
                    continue
            now_ns = time.monotonic_ns()
            is_tick = now_ns >= next_tick_ns
            if is_tick:
                num_missed = (now_ns - next_tick_ns) // period_ns
                self.num_late_ticks += num_missed
                next_tick_ns += (num_missed + 1) * period_ns
            samples = self._look_at_due(now_ns, is_tick=is_tick)
            if is_tick and samples:
                self._on_samples(samples)

    def _look_at_due(self, now_ns: int, *, is_tick: bool) -> list[GpuSample]:
        samples = []
        for watched in tuple(self._watched.values()):
            is_due = is_tick or 0 < watched.next_look_ns() <= now_ns
            if self._is_closing or not is_due or now_ns < watched.paused_until_ns:
                continue
            sample = self._look(watched)
            if sample is not None:
                samples.append(sample)
        return samples

    def _look(self, watched: _Watched) -> GpuSample | None:
        self.call.begin(watched.gpu_uuid)
        try:
            reading = self._reader.read(watched.gpu_uuid)
        except GpuEnergyError as error:
            watched.paused_until_ns = time.monotonic_ns() + _FAILED_READ_PAUSE_NS
            watched.edges = EnergyEdges()
            if not watched.is_failing:
                watched.is_failing = True
                self._on_health(watched.gpu_uuid, health_after(error), str(error))
            return None
        finally:
            self.call.end()
        if watched.is_failing:
            watched.is_failing = False
            self._on_health(watched.gpu_uuid, GpuHealth.OK, "it answers again")
        edges = watched.edges
        num_resets = edges.num_resets
        edges.observe(reading.read_mono_ns, reading.total_energy_j)
        if edges.num_resets > num_resets:
            self._on_counter_reset(watched.gpu_uuid)
        with self._wakeup:
            settled = watched.effect.take(reading)
        if settled is not None:
            self._on_settled(settled)
        return GpuSample(
            gpu_uuid=reading.gpu_uuid,
            read_mono_ns=reading.read_mono_ns,
            power_w=reading.power_w,
            total_energy_j=edges.edge_energy_j if edges.edge_mono_ns is not None else reading.total_energy_j,
            energy_edge_mono_ns=edges.edge_mono_ns,
            sm_clock_mhz=reading.sm_clock_mhz,
            temperature_celsius=reading.temperature_celsius,
            is_power_capped=reading.is_power_capped,
        )
