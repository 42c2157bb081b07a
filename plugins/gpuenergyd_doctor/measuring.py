"""Reads and times the GPUs of this host, one of each model; sets nothing.

Readings are timed alone first. Then the GPU worker's own sampler reads the GPU as in the daemon, while it is idle,
waits and computes: it learns the period of the energy counter, and its CPU time is what readings cost.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean, median

from gpuenergyd.core.host.measured_gpu import ENERGY, IDLE, IN_USE, MeasuredGpu, StateMeans, TimedCall
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.device import GpuDriver, GpuIdentity, GpuReading, HasProcesses, HasReadingWithoutEnergy, HasSettings
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.gpu.worker.reading_gate import ReadingGate
from gpuenergyd.gpu.worker.threads.sampler import Sampler
from gpuenergyd_doctor.load import GpuLoad

_NS_PER_S = 1_000_000_000
_SAMPLE_PERIOD_S = 0.1
_LEARNING_LIMIT_S, _LOOK_S, _CLOSE_LIMIT_S = 12.0, 0.1, 5.0
_MIN_CHANGES = 5
"""Changes of a value that show how often it is renewed."""


@dataclass(frozen=True, slots=True)
class Durations:
    """How long each kind of call is timed, values are polled, and the GPU is watched after settling in a state."""

    calls_s: float = 1.5
    polling_s: float = 3.0
    settling_s: float = 1.5
    state_s: float = 8.0


def measure_gpus(
    host: GpuDriver,
    loads: Mapping[str, Callable[[], GpuLoad]],
    durations: Durations,
    on_progress: Callable[[GpuIdentity], None],
) -> tuple[MeasuredGpu, ...]:
    """Measure one GPU of each model, one without processes if there is any.

    `loads` opens the load of each state; a GpuError then says why that state is not measured.
    """
    chosen: dict[str, tuple[int, GpuIdentity]] = {}
    for gpu in host.identities():
        num_processes = len(host.process_ids(gpu.gpu_uuid)) if isinstance(host, HasProcesses) else 0
        if gpu.model_name not in chosen or num_processes < chosen[gpu.model_name][0]:
            chosen[gpu.model_name] = num_processes, gpu
    found = []
    for num_processes, gpu in chosen.values():
        on_progress(gpu)
        measurement = _GpuMeasurement(host, gpu, durations)
        if num_processes:
            users = count_text(num_processes, "process")
            reason = f"power of an idle GPU and under loads, since {users} computed on it"
            found.append(measurement.run({IN_USE: _NoLoad}, [reason]))
        else:
            found.append(measurement.run({IDLE: _NoLoad, **loads}, []))
    return tuple(found)


class _NoLoad:
    """Leaves a GPU idle."""

    @contextmanager
    def on(self, gpu_uuid: str) -> Iterator[None]:
        del gpu_uuid
        yield


@dataclass(slots=True)
class _GpuMeasurement:
    """The measurement of one GPU."""

    host: GpuDriver
    gpu: GpuIdentity
    durations: Durations
    samples: list[GpuSample] = field(default_factory=list)
    polled: list[list[GpuReading]] = field(default_factory=list)
    """Readings that followed one another, of each time."""
    cpu_ratios: list[float] = field(default_factory=list)
    """Part of a core that the sampler took in each state."""
    period_ns: float = 0.0
    """Last known update period of the energy counter: on a busy host the sampler may be learning it again."""

    def run(self, loads: Mapping[str, Callable[[], GpuLoad]], not_measured: list[str]) -> MeasuredGpu:
        """Time the calls, then watch the GPU under each load."""
        gpu, gate = self.gpu, ReadingGate(self.host, [self.gpu])
        calls = tuple(_timed(name, call, self.durations.calls_s) for name, call in self._calls(gate))
        self._poll(gate)
        states, facts = [], dict[str, float]()
        with self._sampling(gate) as sampler:
            if any(call.name == ENERGY for call in calls):
                self._learn(sampler)
            for name, open_load in loads.items():
                try:
                    with open_load().on(gpu.gpu_uuid) as known:
                        state = self._watch(sampler, name)
                        self._poll(gate)
                    states.append(state)  # only of a load that has computed until then
                    facts |= known or {}
                except GpuError as error:
                    not_measured.append(f"{name}: {error}")
            counter = sampler.counter(gpu.gpu_uuid)
        details = gate.details(gpu.gpu_uuid)
        return MeasuredGpu(
            model_name=gpu.model_name,
            driver_version=gpu.driver_version,
            is_simulated=gpu.is_simulated,
            measured_at=datetime.now(tz=UTC),
            max_sm_clock_mhz=max(gpu.supported_sm_clocks_mhz, default=None),
            power_limit_w=details.enforced_power_limit_w or details.power_limit_w,
            calls=calls,
            counter_period_s=self.period_ns / _NS_PER_S if self.period_ns else None,
            is_counter_read_apart=counter.is_read_apart,
            power_refresh_s=self._refresh_s(lambda reading: reading.power_w, 0.5),
            clock_refresh_s=self._refresh_s(lambda reading: reading.sm_clock_mhz, 0.25),
            worker_cpu_ratio=self.cpu_ratios[0],
            states=tuple(states),
            not_measured=tuple(not_measured),
            energy_scope=gpu.energy_scope,
            **facts,
        )

    def _calls(self, gate: ReadingGate) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield each kind of reading that the driver has; of the energy if the GPU has a counter."""
        host, uuid = self.host, self.gpu.gpu_uuid
        yield "all values", lambda: host.read(uuid)
        if isinstance(host, HasReadingWithoutEnergy):
            yield "without energy", lambda: host.read_without_energy(uuid)
        if gate.read_energy(uuid).total_energy_j is not None:
            yield ENERGY, lambda: gate.read_energy(uuid)
        if isinstance(host, HasSettings):
            yield "settings", lambda: host.details(uuid)
        if isinstance(host, HasProcesses):
            yield "processes", lambda: host.process_ids(uuid)

    def _poll(self, gate: ReadingGate) -> None:
        readings, until_s = [], time.monotonic() + self.durations.polling_s
        while time.monotonic() < until_s:
            readings.append(gate.read_without_energy(self.gpu.gpu_uuid))
            time.sleep(0.001)  # other programs call the driver, too
        self.polled.append(readings)

    def _refresh_s(self, value: Callable[[GpuReading], float | None], quantile: float) -> float | None:
        """Return a quantile of the time between two new values; None if there were hardly any."""
        gaps_ns: list[int] = []
        for readings in self.polled:
            changed_ns = [new.read_mono_ns for old, new in pairwise(readings) if value(old) != value(new)]
            gaps_ns += [after - before for before, after in pairwise(changed_ns)]
        return sorted(gaps_ns)[int(quantile * len(gaps_ns))] / _NS_PER_S if len(gaps_ns) >= _MIN_CHANGES else None

    @contextmanager
    def _sampling(self, gate: ReadingGate) -> Iterator[Sampler]:
        sampler = Sampler(
            gate,
            [self.gpu.gpu_uuid],
            period_s=_SAMPLE_PERIOD_S,
            on_samples=self.samples.extend,
            on_settled=lambda _: None,
            on_health=lambda *_: None,
            on_counter_reset=lambda _: None,
        )
        sampler.start()
        try:
            yield sampler
        finally:
            sampler.close(_CLOSE_LIMIT_S)

    def _learn(self, sampler: Sampler) -> None:
        """Wait until the counter's period is known, or cannot be learned."""
        until_s = time.monotonic() + _LEARNING_LIMIT_S
        while not self.period_ns and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            self.period_ns = sampler.counter(self.gpu.gpu_uuid).period_ns

    def _watch(self, sampler: Sampler, name: str) -> StateMeans:
        """Return the means from a while after now; of power by the energy counter, if that was dated there twice."""
        time.sleep(self.durations.settling_s)
        begin_ns, begin_cpu_s = time.monotonic_ns(), sampler.cpu_s()
        time.sleep(self.durations.state_s)
        self.cpu_ratios.append((sampler.cpu_s() - begin_cpu_s) / (time.monotonic_ns() - begin_ns) * _NS_PER_S)
        self.period_ns = sampler.counter(self.gpu.gpu_uuid).period_ns or self.period_ns
        own = [sample for sample in self.samples if sample.read_mono_ns >= begin_ns]
        dated = {s.energy_edge_mono_ns: s.total_energy_j for s in own if s.energy_edge_mono_ns is not None}
        edges = sorted((at, energy_j) for at, energy_j in dated.items() if at >= begin_ns and energy_j is not None)
        power_w = _mean(sample.power_w for sample in own)
        if len(edges) > 1:
            (first_ns, first_j), (last_ns, last_j) = edges[0], edges[-1]
            power_w = (last_j - first_j) / (last_ns - first_ns) * _NS_PER_S
        clock_mhz, capped_ratio = _mean(s.sm_clock_mhz for s in own), _mean(s.is_power_capped for s in own)
        return StateMeans(name, power_w, clock_mhz, capped_ratio)


def _timed(name: str, call: Callable[[], object], time_s: float) -> TimedCall:
    took_s: list[float] = []
    until_s, begin_cpu_s = time.monotonic() + time_s, time.thread_time()
    while not took_s or time.monotonic() < until_s:
        called_s = time.perf_counter()
        call()
        took_s.append(time.perf_counter() - called_s)
    num_calls = len(took_s)
    cpu_s = (time.thread_time() - begin_cpu_s) / num_calls
    return TimedCall(name, num_calls, median(took_s), sorted(took_s)[int(0.99 * num_calls)], cpu_s)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else None
