"""The power budget in the status."""

from typing import Any

from gpuenergyd.report.terminal.power import power_lines

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
