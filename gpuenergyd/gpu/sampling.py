"""The thread that reads GPUs: on time or not at all, more often where something is about to change."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gpuenergyd.errors import GpuEnergyError, GpuLostError
from gpuenergyd.gpu.actuator import DriverCall
from gpuenergyd.gpu.device import GpuReader, GpuReading
from gpuenergyd.gpu.energy_edges import EnergyEdges
from gpuenergyd.gpu.link_messages import ClockSet, GpuHealth, GpuSample

_NS_PER_S = 1_000_000_000
_SETTLE_POLL_NS = 1_000_000
_SETTLE_LIMIT_NS = 15_000_000
_FAILED_READ_PAUSE_NS = 1_000_000_000


@dataclass(slots=True)
class _Watched:
    """One GPU: its counter, and the clock changes whose effect is awaited."""

    gpu_uuid: str
    edges: EnergyEdges = field(default_factory=EnergyEdges)
    settling: ClockSet | None = None
    was_at_mhz: int | None = None
    next_settle_ns: int = 0
    paused_until_ns: int = 0
    is_failing: bool = False

    def next_look_ns(self) -> int:
        """When this GPU wants an extra reading; 0 for never."""
        wanted = [t for t in (self.edges.next_look_ns, self.next_settle_ns) if t]
        return max(min(wanted), self.paused_until_ns) if wanted else 0


@dataclass(slots=True)
class Sampler:
    """Reads every GPU each `period_s`, near counter updates, and after a clock change until it shows.

    The callbacks run on the sampler's thread. Ticks that come too late are skipped and counted.
    """

    reader: GpuReader
    gpu_uuids: Sequence[str]
    period_s: float
    on_samples: Callable[[Sequence[GpuSample]], None]
    on_settled: Callable[[ClockSet], None]
    on_health: Callable[[str, GpuHealth, str], None]
    num_late_ticks: int = 0
    call: DriverCall = field(default_factory=DriverCall)
    _watched: dict[str, _Watched] = field(init=False)
    _wakeup: threading.Condition = field(default_factory=threading.Condition)
    _is_closing: bool = False
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._watched = {uuid: _Watched(uuid) for uuid in self.gpu_uuids}

    def start(self) -> None:
        """Begin to read."""
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop reading."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def await_effect(self, change: ClockSet) -> None:
        """Look at the GPU every millisecond until the clock shows, then report the change; a newer one replaces it."""
        with self._wakeup:
            watched = self._watched[change.gpu_uuid]
            if watched.settling is not None:
                self.on_settled(watched.settling)
            watched.settling = change
            watched.next_settle_ns = change.returned_mono_ns
            self._wakeup.notify()

    def _run(self) -> None:
        period_ns = round(self.period_s * _NS_PER_S)
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
            samples = [
                sample
                for watched in self._watched.values()
                if now_ns >= watched.paused_until_ns
                and (is_tick or 0 < watched.next_look_ns() <= now_ns)
                and (sample := self._look(watched)) is not None
            ]
            if is_tick and samples:
                self.on_samples(samples)

    def _look(self, watched: _Watched) -> GpuSample | None:
        self.call.since_mono_ns, self.call.gpu_uuid = time.monotonic_ns(), watched.gpu_uuid
        try:
            reading = self.reader.read(watched.gpu_uuid)
        except GpuEnergyError as error:
            watched.paused_until_ns = time.monotonic_ns() + _FAILED_READ_PAUSE_NS
            watched.edges = EnergyEdges()
            if not watched.is_failing:
                watched.is_failing = True
                is_lost = isinstance(error, GpuLostError)
                self.on_health(watched.gpu_uuid, GpuHealth.LOST if is_lost else GpuHealth.DEGRADED, str(error))
            return None
        finally:
            self.call.gpu_uuid = None
        if watched.is_failing:
            watched.is_failing = False
            self.on_health(watched.gpu_uuid, GpuHealth.OK, "it answers again")
        edges = watched.edges
        edges.observe(reading.read_mono_ns, reading.total_energy_j)
        self._check_effect(watched, reading)
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

    def _check_effect(self, watched: _Watched, reading: GpuReading) -> None:
        """Report the awaited change once this reading shows it, or when it has had its time."""
        with self._wakeup:
            change = watched.settling
            if change is None:
                watched.was_at_mhz = reading.sm_clock_mhz
                return
            if reading.read_mono_ns < change.returned_mono_ns:
                return
            if _shows(reading, change.requested_sm_clock_mhz, watched.was_at_mhz):
                settled = replace(
                    change, effective_mono_ns=reading.read_mono_ns, actual_sm_clock_mhz=reading.sm_clock_mhz
                )
            elif reading.read_mono_ns > change.returned_mono_ns + _SETTLE_LIMIT_NS:
                settled = replace(change, actual_sm_clock_mhz=reading.sm_clock_mhz)
            else:
                watched.next_settle_ns = reading.read_mono_ns + _SETTLE_POLL_NS
                return
            watched.settling = None
            watched.next_settle_ns = 0
            watched.was_at_mhz = reading.sm_clock_mhz
        self.on_settled(settled)


def _shows(reading: GpuReading, requested_mhz: int, was_at_mhz: int | None) -> bool:
    """Return whether a reading shows the requested clock, as far as the GPU will ever show it."""
    actual_mhz = reading.sm_clock_mhz
    if actual_mhz is None:
        return False
    if was_at_mhz is None or was_at_mhz > requested_mhz:
        return actual_mhz <= requested_mhz
    has_risen_to_cap = bool(reading.is_power_capped) and actual_mhz > was_at_mhz
    return actual_mhz >= requested_mhz or has_risen_to_cap
