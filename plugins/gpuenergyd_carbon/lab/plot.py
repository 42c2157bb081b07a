"""Plots a forecast: bars for the terminal, a curve with its prediction interval as SVG."""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from html import escape

from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, HourlySeries
from gpuenergyd_formats.charts.axes import TITLE_ROOM, WIDE, Axis, elapsed_step

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_BAR_WIDTH = 40
_SHOWN_HISTORY_HOURS = 48
_MARGIN = 12.0
_TOP, _BOTTOM = 62.0, 302.0
_HEIGHT = _BOTTOM + 30.0 + TITLE_ROOM
_LEGEND_WIDTH = 230.0
_STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1b1d21}.tick,.axis-title{fill:#5d636e}.paper{fill:#fff}"
    ".axis{stroke:#5d636e}.grid{stroke:#d9dbe0}.line{fill:none;stroke-width:2}.history{stroke:#5d636e}"
    ".expected{stroke:#1f6fb4}.band{fill:#1f6fb4;fill-opacity:.2}.line.band{stroke:#1f6fb4;stroke-width:12;"
    "stroke-opacity:.2}"
)


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


def forecast_svg(forecast: CarbonForecast, history: HourlySeries | None = None) -> str:
    """Return the last two days of the history and the forecast with its 95 % prediction interval as SVG."""
    known = () if history is None else _steps(history.end_at, history.values[-_SHOWN_HISTORY_HOURS:])
    ahead = [(hour.target_at, hour.carbon_intensity_g_per_kwh) for hour in forecast.hours]
    highs = [(hour.target_at, hour.high_g_per_kwh) for hour in forecast.hours]
    lows = [(hour.target_at, hour.low_g_per_kwh) for hour in forecast.hours]
    values = [value for _, value in (*known, *highs, *lows) if math.isfinite(value)]
    starts = [at for at, _ in (*known, *ahead)] or [forecast.issued_at]
    midnight = min(starts).replace(hour=0, minute=0, second=0, microsecond=0)
    across = Axis(
        (min(starts) - midnight).total_seconds(),
        (max(starts) + HOUR - midnight).total_seconds(),
        at_low=WIDE.left,
        at_high=WIDE.right,
        text=lambda elapsed_s: f"{midnight + timedelta(seconds=elapsed_s):%a %H:%M}",
        num_ticks=9,
        step=elapsed_step,
    )
    highest = max((0.0, *values)) * 1.08 or 1.0
    up = Axis(min((0.0, *values)), highest, at_low=_BOTTOM, at_high=_TOP, text=lambda value: f"{value:g}")

    def path(steps: Iterable[tuple[datetime, float]], *, is_backward: bool = False) -> str:
        """Return a line with a step at each hour; unknown hours are gaps."""
        commands, pen = [], "M"
        for at, value in steps:
            if not math.isfinite(value):
                pen = "M"
                continue
            begin, end = ((at + shift - midnight).total_seconds() for shift in (timedelta(), HOUR))
            begin, end = (end, begin) if is_backward else (begin, end)
            commands.append(f"{pen}{across.place(begin):.1f} {up.place(value):.1f}H{across.place(end):.1f}")
            pen = "L"
        return "".join(commands)

    legend = (
        ("history", "history"),
        ("expected", f"forecast ({forecast.model})"),
        ("band", "95 % prediction interval"),
    )
    shown = legend if known else legend[1:]
    outline = path(highs) + path(reversed(lows), is_backward=True).replace("M", "L", 1)
    parts = [
        up.draw_up(WIDE.left, WIDE.right, forecast.unit),
        across.draw_across(_BOTTOM, "time (UTC)"),
        f'<path class="band" d="{outline}Z"/>' if outline else "",
        f'<path class="line history" d="{path(known)}"/><path class="line expected" d="{path(ahead)}"/>',
        f'<text x="0" y="24">{escape(forecast.zone)}, issued {forecast.issued_at:%Y-%m-%d %H:%M} UTC</text>',
    ]
    for number, (name, text) in enumerate(shown):
        x = WIDE.right - _LEGEND_WIDTH * (len(shown) - number)
        parts.append(
            f'<path class="line {name}" d="M{x:.0f} 20h18"/><text x="{x + 24:.0f}" y="24">{escape(text)}</text>'
        )
    width = WIDE.width + 2 * _MARGIN
    return (
        f'<?xml version="1.0" encoding="utf-8"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}"'
        f' height="{_HEIGHT:.0f}" viewBox="{-_MARGIN:.0f} 0 {width:.0f} {_HEIGHT:.0f}"><style>{_STYLE}</style>'
        f'<rect class="paper" x="{-_MARGIN:.0f}" width="100%" height="100%"/>{"".join(parts)}</svg>\n'
    )


def _steps(end_at: datetime, values: Sequence[float]) -> tuple[tuple[datetime, float], ...]:
    return tuple((end_at - (len(values) - k) * HOUR, value) for k, value in enumerate(values))
