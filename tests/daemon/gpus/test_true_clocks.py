"""Clocks that a GPU has counted narrow the bounds of changes, within what the worker has read."""

import pytest

from gpuenergyd.core.pipeline.switching import ENOUGH, LatencyBasis
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.gpus.true_clocks import TrueClocks
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.messages import ClockChangeReport

MS = 1_000_000
AGE_NS = 102 * MS


def change(at_ms: float, *, clocks_mhz: tuple[int, int] = (1980, 1200), shown_ms: float = 120.0) -> ClockChangeReport:
    """Return a change by a call of 4 ms whose effect a kept clock has shown so long after the call had returned."""
    called_ns, returned_ns = round(at_ms * MS), round((at_ms + 4) * MS)
    return ClockChangeReport(
        *("GPU-0", clocks_mhz[1], called_ns, called_ns, returned_ns, returned_ns + round(shown_ms * MS)),
        *(clocks_mhz[1], None),
        previous_sm_clock_mhz=clocks_mhz[0],
        clock_age_ns=AGE_NS,
    )


def counted(at_ms: float, sm_clock_mhz: int) -> tuple[int, int, int]:
    return round(at_ms * MS), round((at_ms + 0.1) * MS), sm_clock_mhz


def test_an_effect_is_between_the_last_old_and_the_first_new_clock_and_is_used_once() -> None:
    clocks = TrueClocks()
    clocks.add_change(change(1000.0))

    assert clocks.narrowed([counted(990.0, 1980), counted(1010.0, 1980)]) == ()
    ((_, narrow),) = clocks.narrowed([counted(1016.0, 1981), counted(1021.0, 1201), counted(1030.0, 1200)])

    assert narrow.unseen_until_mono_ns == 1016 * MS
    assert narrow.effective_mono_ns == round(1021.1 * MS)
    assert narrow.clock_age_ns == 0
    assert clocks.narrowed([counted(1040.0, 1200)]) == ()


@pytest.mark.parametrize(
    "counted_clocks",
    [
        [counted(1050.0, 1200)],  # nothing before: not close enough
        [counted(1130.0, 1980), counted(1135.0, 1200)],  # the driver had shown the new clock before
        [counted(1010.0, 1500), counted(1012.0, 1500)],  # neither clock
        [counted(1110.0, 1980), counted(1304.0, 1200)],  # after the next change
    ],
)
def test_clocks_that_are_far_apart_or_contradict_what_was_read_narrow_nothing(
    counted_clocks: list[tuple[int, int, int]],
) -> None:
    clocks = TrueClocks()
    clocks.add_change(change(1000.0))
    clocks.add_change(change(1300.0, clocks_mhz=(1200, 1980)))

    assert clocks.narrowed(counted_clocks) == ()


def test_latencies_are_those_of_the_narrowed_changes_once_these_are_enough() -> None:
    gpus = Gpus()
    gpus.update([GpuIdentity("GPU-0", 0, "H200", (1980, 1200), is_simulated=True)])
    gpu, news = gpus["GPU-0"], []
    for k in range(ENOUGH):
        is_new = gpu.record_clock_change(change(1000.0 * k + 1000))
        is_new |= gpu.record_true_clocks([counted(1000.0 * k + 1018, 1980), counted(1000.0 * k + 1021, 1200)])
        news.append(is_new)

    assert news == [False] * (ENOUGH - 1) + [True]
    assert gpu.switching.latency.basis is LatencyBasis.MEASURED
    assert (gpu.switching.num_seen, len(gpu.switching.switches)) == (ENOUGH, ENOUGH)  # each change once
    assert gpu.switching.latency.typical_s(1980, 1200) == pytest.approx(0.0196, abs=0.001)
