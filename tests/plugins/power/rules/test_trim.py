"""The excess of measured over predicted power: learned from peaks of one-second means, within limits."""

import math

from gpuenergyd_power.rules.control import PowerTrim

BUDGET_W = 1000.0


def _measure(trim: PowerTrim, watts: float, begin_s: float = 0.0, swing_w: float = 0.0) -> float:
    now_s = begin_s
    for k in range(60):
        now_s = begin_s + 0.1 * k
        trim.observe(now_s, watts + swing_w * math.sin(2 * math.pi * now_s / 4))
    return now_s


def test_a_model_that_is_wrong_by_a_fifth_is_corrected() -> None:
    trim, now_s = PowerTrim(), 0.0
    for _ in range(12):
        predicted_w = BUDGET_W - trim.excess_w
        now_s = _measure(trim, 1.2 * predicted_w, now_s)
        assert trim.is_measured(now_s, 3.0)
        trim.learn(predicted_w, BUDGET_W)
        assert not trim.is_measured(now_s, 0.0)
    assert math.isclose(1.2 * (BUDGET_W - trim.excess_w), BUDGET_W, rel_tol=0.01)


def test_the_peak_of_a_slow_wave_counts_not_its_mean() -> None:
    trim = PowerTrim()
    for k in range(10):
        _measure(trim, 900.0, 10.0 * k, swing_w=100.0)
        trim.learn(900.0, BUDGET_W)
    assert 70.0 <= trim.excess_w <= 90.0


def test_the_excess_stays_within_its_limits() -> None:
    trim = PowerTrim()
    trim.add(5000.0, BUDGET_W)
    assert trim.excess_w == 500.0
    _measure(trim, 0.0)
    trim.learn(900.0, BUDGET_W)
    assert trim.excess_w == -50.0
