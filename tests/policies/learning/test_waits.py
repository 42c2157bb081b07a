"""Phases that wait: as long at every clock until a low one shows otherwise, and cheaper at low clocks as measured."""

import pytest

from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd_policies.learning.job_curves import fit_curves
from gpuenergyd_policies.learning.seen import ClassAtFullSpeed, EnergySeen, TimeSpent, Waiting
from gpuenergyd_policies.learning.shape import GENERIC
from gpuenergyd_policies.learning.waits import LOWEST_WAIT_RATIO, WaitingPhase, waits_seen

C, D, F = InstructionKind.C, InstructionKind.D, InstructionKind.F
CLOCKS = tuple(range(1410, 195, -15))
GPUS = [GpuView("GPU-0", "A100", CLOCKS, 0.02)]


def phases(kind: InstructionKind, *seen: tuple[int, float]) -> WaitingPhase | None:
    """Return what is found from (clock, time) of a phase in successive iterations."""
    observations = [
        IterationObservation(k, None, 1.0, (InstructionSample(0, kind, (ClockShare(mhz, time_s),), 1),), ())
        for k, (mhz, time_s) in enumerate(seen)
    ]
    return waits_seen(observations, GPUS).get(InstructionClass(0, kind))


@pytest.mark.parametrize(("kind", "lowest_ratio"), [(C, LOWEST_WAIT_RATIO), (D, 0.0)])
def test_a_wait_may_use_low_clocks_before_any_was_tried(kind: InstructionKind, lowest_ratio: float) -> None:
    wait = phases(kind, *[(1410, 0.1)] * 8)

    assert wait is not None
    assert wait.time_s == pytest.approx(0.1)
    assert wait.clocks_mhz == tuple(mhz for mhz in CLOCKS if mhz >= lowest_ratio * 1410)


def test_a_phase_that_is_longer_at_low_clocks_computes() -> None:
    assert phases(C, *[(1410, 0.1)] * 8, *[(705, 0.13)] * 4) is None


def test_clocks_from_which_on_a_collective_is_slower_are_left_out() -> None:
    wait = phases(C, *[(1410, 0.1)] * 8, *[(900, 0.1)] * 6, (450, 0.14))

    assert wait is not None
    assert min(wait.clocks_mhz) == 465


def test_waits_are_as_long_as_lately() -> None:
    wait = phases(D, *[(1410, 0.1)] * 20, *[(210, 0.3)] * 16)

    assert wait is None or wait.time_s == pytest.approx(0.3)
    longer = phases(D, *[(1410, 0.1)] * 20, *[(1410, 0.3)] * 16)
    assert longer is not None
    assert longer.time_s == pytest.approx(0.3)


def test_energies_show_how_the_power_of_a_waiting_gpu_falls_with_the_clock() -> None:
    key = InstructionClass(0, F)
    classes = [ClassAtFullSpeed(key, CLOCKS, 0.1, 1410.0)]
    wait = WaitingPhase(InstructionClass(0, D), 0.5, CLOCKS)

    def energy(mhz: int, power_w: float) -> EnergySeen:
        spent = (TimeSpent(key, 1410, 0.5), TimeSpent(None, mhz, 0.5))
        return EnergySeen(0, 300.0 * 0.5 + power_w * 0.5, 0.003, spent)

    assumed = Waiting(100.0, 0.1, 0.5, 0.5, (wait,))
    flat = fit_curves(classes, GENERIC, [], [energy(1410, 100.0), energy(705, 100.0)], assumed)
    steep = fit_curves(classes, GENERIC, [], [energy(1410, 100.0), energy(705, 50.0)], assumed)

    assert flat.waiting_power.at(705) > 90.0
    assert steep.waiting_power.at(705) < 0.95 * 100.0 * 0.5**0.5  # below what was assumed
    assert steep.profile()[wait.key].options[-1].time_s == 0.5
