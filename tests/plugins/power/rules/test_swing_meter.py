"""The swing meter: known waves, readings that come late or twice, and gaps."""

import math
import random

import numpy as np
import pytest

from gpuenergyd_power.rules.swing_meter import WINDOW_S, SwingMeter, swing_of_samples


def _run(meter: SwingMeter, seconds: float, *, begin_s: float = 0.0, jitter_s: float = 0.0, hz: float = 0.7) -> float:
    source, at_s = random.Random(1), begin_s
    while at_s < begin_s + seconds:
        read_s = at_s + source.uniform(0, jitter_s)
        meter.observe(read_s, 1000 + 100 * math.sin(2 * math.pi * hz * read_s))
        at_s += meter.period_s
    return at_s


@pytest.mark.parametrize("jitter_s", [0.0, 0.06])
def test_a_sine_has_its_mean_square(jitter_s: float) -> None:
    meter = SwingMeter(0.1)
    _run(meter, 70.0, jitter_s=jitter_s)
    figures = meter.figures()
    assert figures is not None
    assert figures.band_energy_w2 == pytest.approx(5000, rel=0.06)
    assert (figures.peak_w, figures.trough_w) == pytest.approx((1100, 900), rel=0.01)
    assert figures.mean_w == pytest.approx(1000, rel=0.01)


def test_slow_changes_are_outside_the_band() -> None:
    meter = SwingMeter(0.1)
    _run(meter, 61.0, hz=1 / 60)
    figures = meter.figures()
    assert figures is not None
    assert figures.band_energy_w2 < 50


def test_fast_readings_are_averaged_to_the_band() -> None:
    meter = SwingMeter(0.005)
    _run(meter, 21.0, hz=100.0)
    figures = meter.figures()
    assert figures is not None
    assert (meter.bin_s, meter.highest_hz) == (0.025, 20.0)
    assert figures.band_energy_w2 < 100
    assert SwingMeter(0.1).highest_hz == 5.0


def test_the_minute_begins_anew_after_an_unknown_reading_or_a_gap() -> None:
    meter = SwingMeter(0.1)
    assert meter.figures() is None
    end_s = _run(meter, 30.0)
    assert meter.figures() is not None
    meter.observe(end_s, None)
    assert meter.figures() is None
    end_s = _run(meter, 25.0, begin_s=end_s)
    assert meter.figures() is not None
    _run(meter, 5.0, begin_s=end_s + 10)
    assert meter.figures() is None, "readings before and after a gap are no wave"
    meter.observe(0.0, 100.0)
    assert meter.figures() is None, "time that runs backwards begins anew"


def test_rare_readings_have_no_swing_and_memory_is_bounded() -> None:
    rare = SwingMeter(5.0)
    _run(rare, 300.0)
    assert rare.figures() is None
    meter = SwingMeter(0.1)
    _run(meter, 200.0)
    assert len(meter._bins_w) * meter.bin_s <= WINDOW_S + meter.bin_s
    for _ in range(1000):
        meter.observe(200.0, 500.0)
    assert meter.figures() is not None


def test_samples_of_a_wave_have_its_swing() -> None:
    at_s = np.arange(600) * 0.1
    slow_w, swing_w = 5.0 * at_s, 200 * np.sin(2 * math.pi * 0.6 * at_s)
    drifting_w = 80 * np.sin(2 * math.pi * at_s / 60)

    figures = swing_of_samples((1000 + slow_w + swing_w + drifting_w).tolist(), 0.1)

    assert figures is not None
    assert figures.band_energy_w2 == pytest.approx(200**2 / 2, rel=0.05)
    assert figures.mean_w == pytest.approx(1000 + 150, rel=0.01)
    assert figures.peak_w - figures.trough_w > 400
    assert 200 < figures.ramp_w_per_s < 600


def test_too_few_samples_have_no_swing() -> None:
    assert swing_of_samples([], 0.1) is None
    assert swing_of_samples([100.0] * 199, 0.1) is None
    known = swing_of_samples([100.0] * 200, 0.1)
    assert known is not None
    assert (known.band_energy_w2, known.ramp_w_per_s) == (0.0, 0.0)
