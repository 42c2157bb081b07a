"""Detection of foreign clock changes: our own changes, late or in flight, are none."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.gpu.worker.threads.actuator import ClockLock
from gpuenergyd.gpu.worker.threads.sample_stream import ForeignChangeDetector

PERIOD_MS = 20
LOCK = ClockLock(900, returned_mono_ns=1_000_000_000)


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


def test_lock_whose_effect_arrives_late_is_no_foreign_change() -> None:
    """Published clock changes take up to half a second."""
    read = [*samples(20, 700, 1410), *samples(700, 2000, 900)]

    assert detected_after_ms(ForeignChangeDetector(), read) == []


def test_a_kept_clock_from_before_the_call_does_not_show_the_lock_in_effect() -> None:
    """The lock before the last one was the same; then the GPU is seen above it until the late effect."""
    read = [*samples(0, 80, 900), *samples(80, 700, 1410), *samples(700, 2000, 900)]

    assert detected_after_ms(ForeignChangeDetector(), [replace(s, clock_age_ns=100_000_000) for s in read]) == []


def test_clock_below_a_lock_does_not_show_it_in_effect() -> None:
    """An idle GPU runs at a low clock of its own, then works before the change has an effect."""
    read = [*samples(20, 240, 210), *samples(240, 700, 1410), *samples(700, 2000, 900)]

    assert detected_after_ms(ForeignChangeDetector(), read) == []


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


def test_sample_without_a_clock_proves_nothing() -> None:
    read = [*samples(20, 600, 900), *samples(600, 760, 1410), sample(760, None), *samples(780, 1000, 900)]

    assert detected_after_ms(ForeignChangeDetector(), read) == []


def test_lower_lock_of_another_program_is_detected_where_nothing_else_keeps_the_clock_down() -> None:
    lowered = samples(600, 2000, 700, is_limited=False)

    assert detected_after_ms(ForeignChangeDetector(), [*samples(20, 600, 900), *lowered]) == [600 + 19 * PERIOD_MS]


@pytest.mark.parametrize("is_limited", [True, None])
def test_clock_that_a_cap_or_something_unknown_keeps_down_is_no_foreign_change(*, is_limited: bool | None) -> None:
    read = [*samples(20, 600, 900), *samples(600, 4000, 700, is_limited=is_limited)]

    assert detected_after_ms(ForeignChangeDetector(), read) == []


def test_gpu_that_stays_a_few_steps_below_its_lock_or_never_reached_it_is_left_alone() -> None:
    steps = [*samples(20, 600, 900), *samples(600, 4000, 850, is_limited=False)]

    assert detected_after_ms(ForeignChangeDetector(), steps) == []
    assert detected_after_ms(ForeignChangeDetector(), samples(20, 4000, 700, is_limited=False)) == []
