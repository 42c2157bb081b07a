"""The host's power budget and power swing in the status."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from gpuenergyd.report.formatting import power_text


def power_lines(power: Mapping[str, Any] | None) -> list[Text]:
    """Return the power budget and the host's present power; empty without a budget."""
    if power is None or power["power_budget_w"] is None:
        return []
    reason = f" ({power['reason']})" if power["reason"] else ""
    text = f"power: {power_text(power['measured_w'])} of a budget of {power_text(power['power_budget_w'])}{reason}"
    if power["is_cutting"]:
        text += "; clocks are lowered beyond plans"
    elif power["division"]:
        text += f"; {power['division']}"
    return [Text(text)]


def swing_lines(swing: Mapping[str, Any] | None) -> list[Text]:
    """Return the power swing of all GPUs in the last minute; empty while unknown."""
    if swing is None:
        return []
    return [
        Text(
            f"last minute: {power_text(swing['trough_w'])} to {power_text(swing['peak_w'])}, ramps of up to"
            f" {power_text(swing['ramp_w_per_s'])}/s, swings by {power_text(swing['swing_rms_w'])} RMS (0.1 to"
            f" {swing['highest_hz']:g} Hz)"
        )
    ]
