"""The power budget and swings in the status."""

from typing import Any

from gpuenergyd.report.terminal.live import power_lines, swing_lines

POWER: dict[str, Any] = {
    "power_budget_w": 1800.0,
    "measured_w": 1780.4,
    "reason": "grid event 17",
    "is_cutting": False,
    "division": "equal speed per watt for all jobs",
}


def test_a_budget_is_one_line_and_none_is_no_line() -> None:
    (line,) = power_lines(POWER)
    assert line.plain == "power: 1780 W of a budget of 1800 W (grid event 17); equal speed per watt for all jobs"
    (cut,) = power_lines({**POWER, "is_cutting": True, "measured_w": None, "reason": ""})
    assert cut.plain == "power: - of a budget of 1800 W; clocks are lowered beyond plans"
    assert power_lines({**POWER, "power_budget_w": None}) == []
    assert power_lines(None) == []


def test_swings_of_the_last_minute_are_one_line_and_unknown_ones_none() -> None:
    swing = {"trough_w": 700.4, "peak_w": 1551.0, "ramp_w_per_s": 320.0, "swing_rms_w": 250.2, "highest_hz": 5.0}
    (line,) = swing_lines(swing)
    assert line.plain == ("last minute: 700 W to 1551 W, ramps of up to 320 W/s, swings by 250 W RMS (0.1 to 5 Hz)")
    assert swing_lines(None) == []
