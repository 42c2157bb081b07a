"""Evidence for a reset that an idle GPU has not shown: above the lock, held at it under load, or neither."""

import pytest

from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.gpu.worker.reset_watch import ResetEvidence, ResetWatch

_S = 1_000_000_000


def sample(at_s: float, clock_mhz: int | None, *, is_limited: bool | None = False) -> GpuSample:
    return GpuSample("GPU-a", round(at_s * _S), None, None, None, clock_mhz, None, False, is_limited)


def watch() -> ResetWatch:
    made = ResetWatch()
    made.expect("GPU-a", 916, 0)
    return made


def repetitions(made: ResetWatch, clock_mhz: int, *, until_s: int) -> list[float]:
    """Return when a reset would be repeated if the GPU showed one clock all the time."""
    samples = ((tenth / 10, sample(tenth / 10, clock_mhz)) for tenth in range(10 * until_s))
    return [at for at, one in samples if made.evidence(one) is ResetEvidence.WITHOUT_EFFECT]


def test_a_clock_above_the_lock_confirms_once_changes_have_taken_effect() -> None:
    made = watch()

    assert made.evidence(sample(0.5, 1410)) is None
    assert made.evidence(sample(1.5, 1410)) is ResetEvidence.CONFIRMED


def test_a_gpu_held_at_the_lock_is_reset_again_at_growing_intervals() -> None:
    first, second, third, *_ = times = repetitions(watch(), 900, until_s=600)

    assert first == pytest.approx(3.0)
    assert second - first == pytest.approx(2.0, abs=0.3)
    assert third - second == pytest.approx(4.0, abs=0.3)
    assert len(times) < 16


@pytest.mark.parametrize(("clock_mhz", "is_limited"), [(210, False), (210, True), (900, True), (None, False)])
def test_a_gpu_that_is_idle_or_limited_otherwise_proves_nothing(clock_mhz: int | None, is_limited: bool) -> None:  # noqa: FBT001
    made = watch()

    for second in range(100):
        assert made.evidence(sample(second, clock_mhz, is_limited=is_limited)) is None
    assert made.is_watched("GPU-a")


def test_only_a_lock_set_after_the_reset_replaces_it() -> None:
    made = ResetWatch()
    made.expect("GPU-a", 916, 5 * _S)

    assert not made.is_replaced("GPU-a", 4 * _S)
    assert not made.is_replaced("GPU-a", None)
    assert made.is_replaced("GPU-a", 6 * _S)
    assert not made.is_watched("GPU-a")
