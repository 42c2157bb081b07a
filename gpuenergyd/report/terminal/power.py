"""The host's power budget in the status."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from gpuenergyd.report.formatting import power_text


def power_lines(power: Mapping[str, Any] | None) -> list[Text]:
    """Return the power budget with what the host draws; nothing without a budget."""
    if power is None or power["power_budget_w"] is None:
        return []
    reason = f" ({power['reason']})" if power["reason"] else ""
    text = f"power: {power_text(power['measured_w'])} of a budget of {power_text(power['power_budget_w'])}{reason}"
    if power["is_cutting"]:
        text += "; clocks are lowered beyond plans"
    elif power["division"]:
        text += f"; {power['division']}"
    return [Text(text)]
