"""Which setting is measured next: for the best setting, and for advice."""

import numpy as np

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.core.policy_api.testing import job_view
from gpuenergyd_policies.setting_curves import FloatArray, LoopAtFullSpeed, possible_curves
from gpuenergyd_policies.setting_measurements import ITERATIONS_PER_SETTING
from gpuenergyd_policies.setting_search import (
    MAX_PROBES,
    MOST_LOST_ITERATIONS,
    SettingSearch,
    most_telling_setting,
)
from gpuenergyd_policies.uniform_settings import Setting

LOOP = Schedule("loop", 1, ((Instruction(0, InstructionKind.F, 0),),))
CLOCKS = tuple(Setting(Lever.CLOCKS, mhz) for mhz in range(1400, 700, -25))
CURVES = possible_curves(CLOCKS, LoopAtFullSpeed(300.0, 400.0, 1.0))


def _small_gain(times: FloatArray, energies: FloatArray) -> FloatArray:
    """Return a cost of which no setting is expected to save a thousandth."""
    return np.asarray(1 + 0.001 * energies + 0.001 * times)


def test_assumed_curves_alone_do_not_complete_measuring() -> None:
    search = SettingSearch(CURVES, _small_gain, longest_ratio=1.05)

    first = search.next_setting(())

    assert first is not None
    assert search.next_setting({first}) is None


def test_nothing_is_measured_that_cannot_cost_less() -> None:
    assert SettingSearch(CURVES, lambda times, _: times).next_setting(()) is None


def test_a_setting_is_measured_for_advice_if_it_loses_little_of_the_time_that_is_left() -> None:
    view = job_view(LOOP, supported_sm_clocks_mhz=[own.value for own in CLOCKS])

    setting = most_telling_setting(view, CURVES, ())

    assert setting is not None
    expected_slowdown = CURVES.times[:, CLOCKS.index(setting)].mean() - 1
    assert 0 < 2 * ITERATIONS_PER_SETTING * expected_slowdown <= MOST_LOST_ITERATIONS / 2
    assert most_telling_setting(view, CURVES, CLOCKS[:MAX_PROBES]) is None
