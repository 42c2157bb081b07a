"""The GPUs of a virtual training, one per pipeline rank: delayed clock changes, energy counters and power limits."""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from gpuenergyd.core.measurement.switch_calibration import SwitchCalibration
from gpuenergyd.core.measurement.telemetry import ClockHistory, EnergyCounter
from gpuenergyd.core.pipeline.graph import InstructionKind, Schedule
from gpuenergyd.core.pipeline.switching import ObservedSwitch, constant_latency
from gpuenergyd_sim.virtual_training.work import CLOCKS_MHZ, Work, a100_waiting_power_w, actual_clock_mhz

_LOOK_EVERY_S = 0.001
_READ_EVERY_S = 0.1
_COUNTERS_BEGIN_AT_J = 1000.0


@dataclass(frozen=True, slots=True)
class Pending:
    """A clock that has not taken effect yet; `asked_s` is None for a restore."""

    effective_s: float
    clock: int
    asked_s: float | None = None


@dataclass
class VirtualGpus(ABC):
    """Settings, power and counters of the GPUs as time passes; `r` is a pipeline rank."""

    schedule: Schedule
    work: Mapping[tuple[int, InstructionKind], Work]
    _: KW_ONLY
    seed: int = 0
    clocks_mhz: tuple[int, ...] = CLOCKS_MHZ
    model_name: str = "A100 (virtual)"
    waiting_power_w: Callable[[int], float] = a100_waiting_power_w
    switch_latency_s: float = 0.006
    lower_latency_s: float | None = None
    """Latency of a clock reduction, where `switch_latency_s` is only that of a raise; None if both are equal."""
    assumed_latency_s: float | None = None
    """Latency that policies are told until enough changes were measured; None to tell the true one from the start."""
    latency_spread_ratio: float = 0.0
    energy_noise_ratio: float = 0.0
    """Relative error of the energy that a counter shows for one iteration."""
    counter_period_s: float = 0.0
    """Period in which counters are updated; 0 if they are exact at every boundary of an iteration."""
    ceiling_of: Callable[[int, int], int] | None = None
    """Clock that a rank's GPU does not exceed in an iteration, whatever is requested, e.g. because it is hot."""
    power_limit_range_w: tuple[float, float] | None = None
    """Range of each GPU's limit, which lowers the clock until no kind of instruction of the rank draws more power."""
    capped_clock_noise_ratio: float = 0.0
    """Scatter of the clock of a GPU at its power limit, as it is read."""
    power_profiles: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """For each workload power profile that the GPUs offer, its factors on the time and power of work."""

    def __post_init__(self) -> None:
        ranks = range(self.schedule.num_ranks)
        top_mhz = self.clocks_mhz[0]
        self.random = random.Random(self.seed)  # noqa: S311  not a secret
        self.now_s = 100.0
        self.iteration_index = 0
        self.clocks = {r: ClockHistory(top_mhz) for r in ranks}
        self.counters = {r: EnergyCounter() for r in ranks}
        self.total_j = dict.fromkeys(ranks, _COUNTERS_BEGIN_AT_J)
        self.pending: dict[int, list[Pending]] = {r: [] for r in ranks}
        prior = constant_latency(self.switch_latency_s if self.assumed_latency_s is None else self.assumed_latency_s)
        self.calibrations = dict.fromkeys(ranks, SwitchCalibration(top_mhz, prior))
        self.clock_now = dict.fromkeys(ranks, top_mhz)
        self.ceilings = dict.fromkeys(ranks, top_mhz)
        self.power_limits: list[tuple[int, dict[int, float]]] = []
        """Power limits by rank, each set with the first iteration in which it holds."""
        self.profiles: list[tuple[int, dict[int, int]]] = []
        self._free_s: dict[int, float] = {}
        self._last_total_j = dict(self.total_j)
        self._error_j = dict.fromkeys(ranks, 0.0)
        self._iteration_error = dict.fromkeys(ranks, 0.0)
        for r in ranks:
            self.counters[r].record(self._ns(self.now_s), self.total_j[r])

    @abstractmethod
    def report_gpus(self) -> None:
        """Tell the job what is known of its GPUs, which are of one model."""

    def _begin_iteration_of_gpus(self) -> None:
        """Draw the errors of the counters, and apply the ceilings of this iteration."""
        for r in self._iteration_error:
            self._iteration_error[r] = self.random.gauss(0, self.energy_noise_ratio) if self.energy_noise_ratio else 0.0
        if self.ceiling_of is None and self.power_limit_range_w is None:
            return
        for r, before in self.ceilings.items():
            self.ceilings[r] = self._ceiling_mhz(r)
            if min(before, self.clock_now[r]) != min(self.ceilings[r], self.clock_now[r]):
                self.clocks[r].record(self._ns(self.now_s), min(self.ceilings[r], self.clock_now[r]))

    def _ceiling_mhz(self, r: int) -> int:
        """Return the highest clock that `ceiling_of` and the power limit allow a rank's GPU now."""
        ceiling = self.clocks_mhz[0] if self.ceiling_of is None else self.ceiling_of(r, self.iteration_index)
        limits = [limits_w for apply_at, limits_w in self.power_limits if apply_at <= self.iteration_index]
        limit_w = limits[-1].get(r) if limits else None
        if limit_w is None:
            return ceiling
        own = [work for (rank, _), work in self.work.items() if rank == r]
        fitting = [mhz for mhz in self.clocks_mhz if max(work.power_w(mhz) for work in own) <= limit_w]
        return min(ceiling, fitting[0] if fitting else self.clocks_mhz[-1])

    def _profile_factors(self, r: int) -> tuple[float, float]:
        profiles = [profile for apply_at, profile in self.profiles if apply_at <= self.iteration_index]
        return self.power_profiles.get(profiles[-1].get(r, -1), (1.0, 1.0)) if profiles else (1.0, 1.0)

    def _clock_at(self, r: int, at_s: float) -> int:
        while self.pending[r] and self.pending[r][0].effective_s <= at_s:
            change = self.pending[r].pop(0)
            if change.clock != self.clock_now[r]:
                self.clocks[r].record(self._ns(change.effective_s), min(change.clock, self.ceilings[r]))
                self._learn_latency(r, change)
            self.clock_now[r] = change.clock
        return min(self.clock_now[r], self.ceilings[r])

    def _next_change_s(self, r: int) -> float:
        return self.pending[r][0].effective_s if self.pending[r] else math.inf

    def _ask(self, r: int, asked_s: float, clock: int) -> None:
        own = self.pending[r]
        before = own[-1].clock if own else self.clock_now[r]
        latency_s = self.switch_latency_s
        if clock <= before and self.lower_latency_s is not None:
            latency_s = self.lower_latency_s
        latency_s *= 1 + self.random.uniform(-1, 1) * self.latency_spread_ratio
        # A driver applies calls in order, so the last requested clock has to take effect last.
        effective_s = max([asked_s + latency_s, *(p.effective_s for p in own if p.clock != clock)])
        own.append(Pending(effective_s, clock, asked_s))
        if clock != before:
            self.clocks[r].record_call(self._ns(asked_s))
        own.sort(key=lambda p: p.effective_s)

    def _learn_latency(self, r: int, change: Pending) -> None:
        """Measure a clock change as the daemon does, by reads every millisecond, and tell the job its new latency."""
        if self.assumed_latency_s is None or change.asked_s is None:
            return
        settle_s = change.effective_s - change.asked_s
        looks = math.ceil(settle_s / _LOOK_EVERY_S)
        low_s, high_s = max(0, looks - 1) * _LOOK_EVERY_S, looks * _LOOK_EVERY_S
        switch = ObservedSwitch(self.clock_now[r], change.clock, 0.0, 0.0, low_s, high_s)
        if self.calibrations[r].observe(switch):
            self.report_gpus()

    def _wait_until(self, r: int, until_s: float) -> None:
        at_s = self._free_s[r]
        while at_s < until_s:
            clock = self._clock_at(r, at_s)
            next_s = min(until_s, self._next_change_s(r))
            self._spend(r, self.waiting_power_w(clock), at_s, next_s)
            self._read_clock(r, None, clock, at_s, next_s)
            at_s = next_s
        self._free_s[r] = max(self._free_s[r], until_s)

    def _spend(self, r: int, power_w: float, from_s: float, until_s: float) -> None:
        """Add energy, and record the counter's value at each of its updates in this time."""
        if self.counter_period_s:
            edge = math.floor(from_s / self.counter_period_s) + 1
            while edge * self.counter_period_s <= until_s:
                at_s = edge * self.counter_period_s
                self.counters[r].record(self._ns(at_s), self._shown_j(r, self.total_j[r] + power_w * (at_s - from_s)))
                edge += 1
        self.total_j[r] += power_w * (until_s - from_s)

    def _read_clock(self, r: int, work: Work | None, clock: int, from_s: float, until_s: float) -> None:
        """Read the clock at each instant of the daemon's grid that is passed, at work that a power limit may hold."""
        for tick in range(math.ceil(from_s / _READ_EVERY_S), math.ceil(until_s / _READ_EVERY_S)):
            actual_mhz = actual_clock_mhz(work, clock)
            is_power_capped = actual_mhz < clock
            if is_power_capped and self.capped_clock_noise_ratio:
                actual_mhz = min(clock, actual_mhz * (1 + self.random.gauss(0, self.capped_clock_noise_ratio)))
            read_ns = self._ns(tick * _READ_EVERY_S)
            self.clocks[r].record_reading(read_ns, round(actual_mhz), is_power_capped=is_power_capped)

    def _shown_j(self, r: int, total_j: float) -> float:
        """Return the counter's value; its error is a random walk, so errors of separate windows are independent."""
        if self.energy_noise_ratio:
            since_j = total_j - self._last_total_j[r]
            self._error_j[r] += since_j * self._iteration_error[r]
        self._last_total_j[r] = total_j
        return total_j + self._error_j[r]

    @staticmethod
    def _ns(seconds: float) -> int:
        return round(seconds * 1e9)
