"""The swing of a wave: against numpy's FFT, known waves, and sampled ones."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.power_swing import (
    PowerWave,
    band_energy_w2,
    harmonics_in_band,
    steepest_ramp_w_per_s,
    swing_of,
)


@st.composite
def waves(draw: st.DrawFn) -> PowerWave:
    """Return any step function over a period."""
    steps = draw(st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 3000.0)), min_size=1, max_size=12))
    times_s = np.cumsum([0.0, *(length_s for length_s, _ in steps)]).tolist()
    return PowerWave(tuple(times_s), tuple(power_w for _, power_w in steps))


def _sampled(wave: PowerWave, num_samples: int) -> np.ndarray:
    at_s = (np.arange(num_samples) + 0.5) / num_samples * wave.iteration_time_s
    return np.asarray(wave.powers_w)[np.searchsorted(wave.times_s, at_s, side="right") - 1]


@given(waves())
def test_all_harmonics_together_are_the_variance_and_a_band_is_a_part_of_it(wave: PowerWave) -> None:
    powers_w, lengths_s = np.asarray(wave.powers_w), np.diff(wave.times_s)
    variance_w2 = float(np.sum(lengths_s * (powers_w - wave.mean_w) ** 2) / wave.iteration_time_s)
    everything_w2 = band_energy_w2(wave, 0.0, 200.0 / wave.iteration_time_s)
    assert everything_w2 <= variance_w2 * (1 + 1e-9) + 1e-6
    assert band_energy_w2(wave) <= variance_w2 * (1 + 1e-9) + 1e-6
    split_hz = 3.5 / wave.iteration_time_s
    parts_w2 = band_energy_w2(wave, 0.0, split_hz) + band_energy_w2(wave, split_hz, 200.0 / wave.iteration_time_s)
    assert parts_w2 == pytest.approx(everything_w2, rel=1e-9, abs=1e-6)


@given(waves())
def test_the_band_energy_is_that_of_numpys_fft(wave: PowerWave) -> None:
    coefficients = np.fft.rfft(_sampled(wave, 1 << 12)) / (1 << 12)
    numbers = harmonics_in_band(wave.iteration_time_s)
    expected_w2 = 2 * float(np.sum(np.abs(coefficients[numbers.start : numbers.stop]) ** 2))
    assert band_energy_w2(wave) == pytest.approx(expected_w2, rel=0.03, abs=0.003 * max(wave.powers_w) ** 2)


def test_a_square_wave_has_the_known_harmonics() -> None:
    wave = PowerWave((0.0, 0.5, 1.0), (300.0, 100.0))
    expected_w2 = sum(2 * (200 / (math.pi * k)) ** 2 for k in range(1, 21, 2))
    assert band_energy_w2(wave) == pytest.approx(expected_w2)
    assert band_energy_w2(wave) < 100.0**2
    figures = swing_of(wave)
    assert (figures.peak_w, figures.trough_w, figures.mean_w) == (300.0, 100.0, 200.0)
    assert figures.band_rms_w == pytest.approx(math.sqrt(expected_w2))


def test_a_wave_without_harmonics_in_the_band_has_no_energy_there() -> None:
    fast = PowerWave((0.0, 0.02, 0.04), (300.0, 100.0))
    assert not harmonics_in_band(0.04)
    assert band_energy_w2(fast) == 0.0
    assert harmonics_in_band(30.0) == range(3, 601), "slower harmonics of a long iteration do not count"
    assert band_energy_w2(PowerWave((0.0,), ())) == steepest_ramp_w_per_s(PowerWave((0.0,), ()), 1.0) == 0.0
    assert swing_of(PowerWave((0.0, 2.0), (500.0,))).band_energy_w2 == pytest.approx(0.0)


def test_a_shift_of_the_wave_changes_nothing() -> None:
    wave = PowerWave((0.0, 1.0, 1.5, 4.0), (300.0, 100.0, 200.0))
    shifted = PowerWave((0.0, 0.5, 3.0, 4.0), (100.0, 200.0, 300.0))
    assert swing_of(shifted).band_energy_w2 == pytest.approx(swing_of(wave).band_energy_w2)
    assert swing_of(shifted).ramp_w_per_s == pytest.approx(swing_of(wave).ramp_w_per_s)


def test_the_ramp_is_between_the_means_of_successive_windows() -> None:
    wave = PowerWave((0.0, 4.0, 8.0), (300.0, 100.0))
    assert steepest_ramp_w_per_s(wave, 1.0) == pytest.approx(200.0)
    assert steepest_ramp_w_per_s(wave, 2.0) == pytest.approx(100.0)
    assert steepest_ramp_w_per_s(wave, 8.0) == pytest.approx(0.0), "a window of a whole iteration sees its mean only"


@given(waves(), st.floats(0.05, 3.0))
def test_no_instant_has_a_steeper_ramp(wave: PowerWave, window_s: float) -> None:
    count = 500
    at_s = np.arange(3 * count) / count * wave.iteration_time_s
    until_j = np.concatenate([[0.0], np.cumsum(np.tile(_sampled(wave, count), 3))]) * wave.iteration_time_s / count
    times_s = np.append(at_s, 3 * wave.iteration_time_s)
    here_s = at_s[(at_s >= window_s) & (at_s <= 3 * wave.iteration_time_s - window_s)]
    ramps = np.abs(
        np.interp(here_s + window_s, times_s, until_j)
        - 2 * np.interp(here_s, times_s, until_j)
        + np.interp(here_s - window_s, times_s, until_j)
    )
    highest_w = max(wave.powers_w)
    allowed = 4 * highest_w * wave.iteration_time_s / count * (len(wave.powers_w) + 2) / window_s**2
    if len(here_s):
        assert float(ramps.max()) / window_s**2 <= steepest_ramp_w_per_s(wave, window_s) + allowed + 1e-6
