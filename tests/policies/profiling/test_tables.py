"""Profiling tested on published measurements of real GPUs; skipped without the data."""

from statistics import mean

import numpy as np
import pytest

from gpuenergyd.core.pipeline.graph import InstructionClass
from tests.support.measured_tables import (
    B,
    F,
    a100_fp32_errors,
    chosen_clocks,
    fit_from,
    held_out_errors,
    losses_of,
    path_of,
    v100_errors,
)

pytestmark = pytest.mark.skipif(
    not path_of("profiles/gpt3-175b_a40.csv").exists() or not path_of("gpu").exists(),
    reason=f"no measured tables below {path_of('')}",
)


@pytest.mark.parametrize("gpu", ["a100-sxm", "a40"])
def test_plans_from_five_measured_clocks_are_close_to_plans_from_all(gpu: str) -> None:
    losses = losses_of(gpu, fit_from(gpu, chosen_clocks(gpu, 5)).profile)

    assert mean(loss.energy_ratio for loss in losses) <= 0.007, losses
    assert max(loss.late_ratio for loss in losses) <= 0.005, losses


def test_unmeasured_clocks_of_the_a100_are_predicted() -> None:
    errors = held_out_errors("a100-sxm", chosen_clocks("a100-sxm", 5))

    assert np.quantile(np.abs(errors.time_errors), 0.95) <= 0.005
    assert np.sqrt(np.mean(np.square(errors.power_errors))) <= 0.015


def test_unmeasured_clocks_of_a_v100_and_an_a100_kernel_are_predicted() -> None:
    for errors in (v100_errors(), a100_fp32_errors()):
        assert np.mean(np.abs(errors.time_errors)) <= 0.005
        assert np.mean(np.abs(errors.power_errors)) <= 0.015


def test_the_step_in_the_a40_table_is_detected_and_clocks_inside_it_are_excluded() -> None:
    """Its backward takes 324 ms at 1005 MHz and 305 ms at 960 MHz; its forward has no step."""
    clocks = chosen_clocks("a40", 5)
    fitted = fit_from("a40", clocks)
    lowest, second = sorted(clocks)[:2]

    backward = {o.sm_clock_mhz for o in fitted.profile[InstructionClass(0, B)].options}
    forward = {o.sm_clock_mhz for o in fitted.profile[InstructionClass(0, F)].options}
    assert {lowest, second} <= backward
    assert not any(lowest < clock < second for clock in backward)
    assert any(lowest < clock < second for clock in forward)
    assert not fitted.doubtful
