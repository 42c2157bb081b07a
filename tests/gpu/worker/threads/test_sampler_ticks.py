"""Counters with the sampler's own period are dated, wherever their updates fall between its ticks. Time is virtual."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Self, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.gpu.device import EnergyReading, GpuReading
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.gpu.worker.threads import driver_thread, sampler
from gpuenergyd.gpu.worker.threads.actuator import ClockLock
from gpuenergyd.gpu.worker.threads.sample_stream import ForeignChangeDetector
from tests.support.examples import examples

PERIOD_NS = 100_000_000
CALL_NS, CALLS_PER_READING = 700_000, 4
LATE_NS = 100_000
"""Mean lateness of wake-ups."""
JOULES_PER_UPDATE = 40.0
OLDEST_S = 1.3
"""As long as the daemon waits for the energy of an iteration that has ended, with this period."""
PERIOD_MS = 20
LOCK = ClockLock(900, returned_mono_ns=1_000_000_000)


@dataclass
class VirtualHost:
    """A clock, and a driver whose calls take time; each GPU's counter is updated at its own phase of the period."""

    phases_ns: Sequence[int]
    until_ns: int
    seed: int
    now_ns: int = 1_000_000_000
    samples: list[list[GpuSample]] = field(default_factory=list)
    thread: sampler.Sampler | None = None

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def monotonic_ns(self) -> int:
        """Return the time; asking takes some."""
        self.now_ns += 500
        return self.now_ns

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        """Read the energy alone, at some instant within the call."""
        called_ns, took_ns = self.now_ns, round(CALL_NS * self._draw.uniform(1.0, 1.2))
        seen_ns = called_ns + self._draw.randrange(took_ns)
        energy_j = JOULES_PER_UPDATE * ((seen_ns - self.phases_ns[int(gpu_uuid)]) // PERIOD_NS)
        self.now_ns += took_ns
        return EnergyReading((called_ns + self.now_ns) // 2, took_ns, energy_j)

    def read(self, gpu_uuid: str) -> GpuReading:
        """Read all values, the energy first."""
        energy = self.read_energy(gpu_uuid)
        self.now_ns += (CALLS_PER_READING - 1) * CALL_NS
        return GpuReading(gpu_uuid, energy.read_mono_ns, total_energy_j=energy.total_energy_j)

    def keep(self, samples: Sequence[GpuSample]) -> None:
        """Keep the samples of a tick; end at the last one."""
        self.samples.append(list(samples))
        if self.now_ns > self.until_ns and self.thread is not None:
            self.thread._is_closing = True

    # As the condition on which the thread waits

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self, pause_s: float) -> None:
        """Sleep, a little too long."""
        self.now_ns += round(pause_s * 1e9 + self._draw.expovariate(1 / LATE_NS))


def run(host: VirtualHost) -> sampler.Sampler:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "time", host)
        patch.setattr(driver_thread, "time", host)
        thread = sampler.Sampler(
            cast("Any", host),
            [str(k) for k in range(len(host.phases_ns))],
            period_s=PERIOD_NS / 1e9,
            on_samples=host.keep,
            on_settled=lambda *_: pytest.fail("no clock is set"),
            on_health=lambda *_: pytest.fail("no GPU fails"),
            on_counter_reset=lambda *_: pytest.fail("no counter is reset"),
        )
        thread._wakeup = cast("Any", host)
        host.thread = thread
        thread._work()
    return thread


@settings(max_examples=examples(25), deadline=None)
@given(phases_ms=st.lists(st.integers(0, 99), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_counter_with_the_period_of_the_ticks_is_dated_at_any_phase(phases_ms: list[int], seed: int) -> None:
    host = VirtualHost([ms * 1_000_000 for ms in phases_ms], until_ns=16_000_000_000, seed=seed)

    run(host)

    settled = [sample for samples in host.samples for sample in samples if sample.read_mono_ns > 8_000_000_000]
    undated = [s for s in settled if s.energy_edge_mono_ns is None]
    assert undated == []
    ages_s = [(s.read_mono_ns - s.energy_edge_mono_ns) / 1e9 for s in settled if s.energy_edge_mono_ns is not None]
    assert max(ages_s) < OLDEST_S


def test_ticks_keep_the_period_on_average_and_leave_time_between_them() -> None:
    num_gpus = 8
    host = VirtualHost([9_000_000 * k for k in range(num_gpus)], until_ns=30_000_000_000, seed=1)

    thread = run(host)

    begun_ns = [samples[0].read_mono_ns for samples in host.samples]
    gaps_s = [(after - before) / 1e9 for before, after in pairwise(begun_ns)]
    reading_s = num_gpus * CALLS_PER_READING * CALL_NS / 1e9
    assert fmean(gaps_s) == pytest.approx(PERIOD_NS / 1e9, rel=0.01)
    assert min(gaps_s) > 2 * reading_s
    assert max(gaps_s) < 2 * PERIOD_NS / 1e9
    assert thread.num_late_ticks <= 2


def sample(after_ms: float, clock_mhz: int | None, *, is_limited: bool | None = None) -> GpuSample:
    """Return a sample read that long after the call that set LOCK had returned."""
    read_mono_ns = LOCK.returned_mono_ns + round(after_ms * 1e6)
    return GpuSample("GPU-0", read_mono_ns, None, None, None, clock_mhz, None, None, is_limited)


def samples(from_ms: int, to_ms: int, clock_mhz: int, *, is_limited: bool | None = None) -> list[GpuSample]:
    """Return samples of one clock at the worker's period."""
    return [sample(at_ms, clock_mhz, is_limited=is_limited) for at_ms in range(from_ms, to_ms, PERIOD_MS)]


def detected_after_ms(
    detector: ForeignChangeDetector, read: Iterable[GpuSample], lock: ClockLock | None = LOCK
) -> list[float]:
    """Return the instants after the call of the samples that prove a foreign change."""
    return [(s.read_mono_ns - LOCK.returned_mono_ns) / 1e6 for s in read if detector.is_detected(s, lock)]


def test_lock_released_by_another_program_is_detected_within_half_a_second() -> None:
    read = [*samples(20, 600, 900), *samples(600, 2000, 1410)]

    assert detected_after_ms(ForeignChangeDetector(), read) == [600 + 9 * PERIOD_MS]


def test_lock_released_before_it_was_ever_seen_is_detected_too() -> None:
    (at_ms,) = detected_after_ms(ForeignChangeDetector(), samples(20, 3000, 1410))

    assert 1000 < at_ms <= 1000 + 10 * PERIOD_MS


def test_samples_read_before_the_lock_and_handled_after_it_do_not_count() -> None:
    detector = ForeignChangeDetector()

    assert detected_after_ms(detector, samples(-2000, 0, 1410)) == []
    assert detected_after_ms(detector, samples(0, 2000, 900)) == []


def test_samples_above_one_lock_do_not_count_for_the_next() -> None:
    detector = ForeignChangeDetector()
    assert detected_after_ms(detector, [*samples(20, 300, 900), *samples(300, 480, 1410)]) == []
    replaced = ClockLock(1200, returned_mono_ns=LOCK.returned_mono_ns + 500_000_000)

    assert detected_after_ms(detector, [*samples(510, 540, 1410), *samples(540, 2000, 1200)], replaced) == []


def test_clock_above_a_lock_during_our_own_call_is_no_foreign_change() -> None:
    """While a call is in progress no lock is known, and the samples of that time count for none."""
    detector = ForeignChangeDetector()
    assert detected_after_ms(detector, [*samples(20, 300, 900), *samples(300, 480, 1410)]) == []
    assert detected_after_ms(detector, samples(480, 1000, 1410), None) == []

    assert detected_after_ms(detector, [sample(1000, 1410), *samples(1020, 2000, 900)]) == []


def test_lower_lock_of_another_program_is_detected_where_nothing_else_keeps_the_clock_down() -> None:
    lowered = samples(600, 2000, 700, is_limited=False)

    assert detected_after_ms(ForeignChangeDetector(), [*samples(20, 600, 900), *lowered]) == [600 + 19 * PERIOD_MS]


AT_LOCK = samples(20, 600, 900)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param([*samples(20, 700, 1410), *samples(700, 2000, 900)], id="published: up to half a second late"),
        pytest.param(  # the lock before the last one was the same
            [
                replace(one, clock_age_ns=100_000_000)
                for one in (*samples(0, 80, 900), *samples(80, 700, 1410), *samples(700, 2000, 900))
            ],
            id="late after a kept clock from before the call",
        ),
        pytest.param(
            [*samples(20, 240, 210), *samples(240, 700, 1410), *samples(700, 2000, 900)],
            id="late on a GPU that was idle, below the lock",
        ),
        pytest.param(
            [*AT_LOCK, *samples(600, 760, 1410), sample(760, None), *samples(780, 1000, 900)], id="a missing clock"
        ),
        pytest.param([*AT_LOCK, *samples(600, 4000, 700, is_limited=True)], id="kept down by a cap"),
        pytest.param([*AT_LOCK, *samples(600, 4000, 700)], id="kept down by something unknown"),
        pytest.param([*AT_LOCK, *samples(600, 4000, 850, is_limited=False)], id="a few steps below the lock"),
        pytest.param(samples(20, 4000, 700, is_limited=False), id="never at the lock"),
    ],
)
def test_what_is_no_foreign_change_is_not_detected(read: list[GpuSample]) -> None:
    assert detected_after_ms(ForeignChangeDetector(), read) == []
