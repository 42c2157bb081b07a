"""Plots a forecast: bars for the terminal, a curve with its prediction interval as SVG."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuenergyd.core.carbon.intensity import CarbonForecast, HourlySeries
from gpuenergyd.errors import CarbonDataError

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR_WIDTH = 40
_SHOWN_HISTORY_HOURS = 48


def bar(value: float, largest: float, width: int = _BAR_WIDTH) -> str:
    """Return a horizontal bar with a resolution of one eighth of a character."""
    if not (math.isfinite(value) and largest > 0):
        return ""
    eighths = round(max(0.0, min(1.0, value / largest)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def forecast_lines(forecast: CarbonForecast) -> Sequence[str]:
    """Return one line per hour: time, bar, value and 95 % prediction interval."""
    largest = max((hour.carbon_intensity_g_per_kwh for hour in forecast.hours), default=0.0)
    lines = []
    for hour in forecast.hours:
        value = hour.carbon_intensity_g_per_kwh
        bar_text = bar(value, largest).ljust(_BAR_WIDTH)
        lines.append(
            f"{hour.target_at:%a %H:%M} {bar_text} {value:6.0f}  {hour.low_g_per_kwh:.0f}..{hour.high_g_per_kwh:.0f}"
        )
    return lines


def write_forecast_svg(path: Path, forecast: CarbonForecast, history: HourlySeries | None = None) -> None:
    """Write the last two days of the history and the forecast with its 95 % prediction interval as SVG.

    Raises:
        CarbonDataError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import, rarely used

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots()
    if history is not None:
        values = history.values[-_SHOWN_HISTORY_HOURS:]
        step = (history.end_at - history.first_hour_at) / len(history.values)
        stamps: Any = [history.end_at - (len(values) - k) * step for k in range(len(values))]
        axes.step(stamps, values, where="post", color="0.35", label="history")
    ahead: Any = [hour.target_at for hour in forecast.hours]
    low = [hour.low_g_per_kwh for hour in forecast.hours]
    high = [hour.high_g_per_kwh for hour in forecast.hours]
    expected = [hour.carbon_intensity_g_per_kwh for hour in forecast.hours]
    axes.fill_between(
        ahead, low, high, step="post", color="C0", alpha=0.2, linewidth=0.0, label="95 % prediction interval"
    )
    axes.step(ahead, expected, where="post", color="C0", label=f"forecast ({forecast.model})")
    axes.set_ylabel(forecast.unit)
    axes.set_ylim(bottom=0.0)
    axes.set_title(f"{forecast.zone}, issued {forecast.issued_at:%Y-%m-%d %H:%M} UTC", loc="left")
    axes.legend(frameon=False, loc="upper left", ncols=3)
    try:
        figure.savefig(path, format="svg")
    except OSError as error:
        raise CarbonDataError(f"{path}: {error.strerror}") from None
