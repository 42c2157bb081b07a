"""Alignment of meters with the GPUs, energy between instants, and the level of measurement."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd_prove.proof.measurements import PowerSample, energy_j
from gpuenergyd_prove.proof.outside_meter import alignment, measurement_level
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm, MeterFacts
from tests.plugins.prove.virtual_training import VirtualMeter, VirtualTraining
from tests.support.examples import examples

ARM = Arm(BASELINE_ARM, "full-speed")


@settings(max_examples=examples(15), deadline=None)
@given(st.floats(0.0, 15.0), st.floats(0.8, 1.3), st.floats(0.0, 20.0), st.sampled_from([0.5, 1.0]), st.integers(0, 99))
def test_lag_and_gain_of_a_meter_are_found_within_their_stated_errors(
    lag_s: float, gain: float, noise_w: float, period_s: float, seed: int
) -> None:
    meter = VirtualMeter(lag_s=lag_s, gain=gain, noise_w=noise_w, period_s=period_s)
    training = VirtualTraining(seed=seed, meter=meter)
    blocks = [training.run_block(ARM, num_iterations=60) for _ in range(4)]

    found = alignment([(block.gpu_power, block.meter_power) for block in blocks])

    assert found is not None
    assert found.is_aligned
    assert abs(found.lag_s - lag_s) <= found.lag_error_s < 1.0
    assert abs(found.gain - gain) <= max(found.gain_error, 0.01)


def test_meter_that_measures_something_else_is_not_aligned() -> None:
    gpu = VirtualTraining(seed=1).run_block(ARM, num_iterations=60)
    other = VirtualTraining(seed=2, meter=VirtualMeter(gain=0.0, noise_w=30.0)).run_block(ARM, num_iterations=60)

    found = alignment([(gpu.gpu_power, other.meter_power)])

    assert found is None or not found.is_aligned


def test_too_few_readings_give_no_alignment() -> None:
    few = tuple(PowerSample(float(k), 100.0 + k) for k in range(10))

    assert alignment([(few, few)]) is None


def test_energy_between_instants_is_exact_for_linear_power() -> None:
    samples = [PowerSample(0.0, 100.0), PowerSample(2.0, 200.0), PowerSample(3.0, 200.0)]

    assert energy_j(samples, 1.0, 2.5) == pytest.approx(175.0 + 100.0)
    assert energy_j(samples, -1.0, 1.0) is None
    assert energy_j(samples, 1.0, 4.0) is None
    assert energy_j([], 0.0, 1.0) is None


NODE, RACK, CPU = (
    MeterFacts("redfish", "node"),
    MeterFacts("pdu", "node-and-network"),
    MeterFacts("powercap", "components"),
)


@pytest.mark.parametrize(
    ("meters", "period_s", "covered_s", "level", "missing"),
    [
        ((), None, 0.0, 0, "no meter upstream"),
        ((CPU,), 1.0, 600.0, 0, "no meter upstream"),
        ((NODE,), 5.0, 600.0, 0, "a reading every 5.0 s"),
        ((NODE,), 1.0, 30.0, 0, "readings cover 30 s"),
        ((NODE,), 1.0, 300.0, 1, "level 2 needs the whole run"),
        ((NODE,), 1.0, 600.0, 1, "network and storage"),
        ((RACK,), 0.5, 600.0, 2, "revenue-grade"),
    ],
)
def test_level_says_what_is_missing_for_the_next_one(
    meters: tuple[MeterFacts, ...], period_s: float | None, covered_s: float, level: int, missing: str
) -> None:
    found = measurement_level(meters, period_s=period_s, covered_s=covered_s, run_s=600.0)

    assert found.level == level
    assert missing in found.missing
