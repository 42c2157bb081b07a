"""Energy and time of every iteration in order, in percent of the baseline, coloured by purpose."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from gpuenergyd.report.formatting import energy_text, time_text
from gpuenergyd.store import IterationRow
from gpuenergyd_formats.charts.axes import TITLE_ROOM, WIDE, Axis, Frame, round_step

_TITLE_HEIGHT = 28.0
_PLOT_HEIGHT = 120.0
_PANEL_GAP = 14.0
_AXIS_HEIGHT = 30.0 + TITLE_ROOM
_MARGIN = 0.08
_MIN_ROOM_PERCENT = 2.0
_MAX_NARROW_POINTS = 240
"""On a phone only every n-th iteration of a longer job is shown."""
_MANY_POINTS = 300


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A measured value of iterations, and its baseline."""

    name: str
    value: Callable[[IterationRow], float | None]
    text: Callable[[float | None], str]
    baseline: float

    def percent(self, row: IterationRow) -> float | None:
        """Return the value of an iteration in percent of the baseline; None if it was not measured."""
        value = self.value(row)
        return None if value is None else 100.0 * value / self.baseline


def series_svg(
    iterations: Sequence[IterationRow],
    *,
    baseline_time_s: float | None,
    baseline_energy_j: float | None,
    frame: Frame = WIDE,
) -> str:
    """Return the energy panel above the time panel, with one scale; empty without a baseline or a second iteration.

    Disturbed iterations outside the scale are drawn at its edge.
    """
    quantities = [
        _Quantity(name, value, text, baseline)
        for name, value, text, baseline in (
            ("energy per iteration, % of baseline", lambda row: row.energy_j, energy_text, baseline_energy_j),
            ("time per iteration, % of baseline", lambda row: row.iteration_time_s, time_text, baseline_time_s),
        )
        if baseline
    ]
    if len(iterations) < 2 or not quantities:
        return ""
    regular = [row for row in iterations if row.is_regular]
    percents = [p for quantity in quantities for row in regular if (p := quantity.percent(row)) is not None]
    low, high = min([*percents, 100.0]), max([*percents, 100.0])
    room = max(_MARGIN * (high - low), _MIN_ROOM_PERCENT)
    first, last = iterations[0].iteration_index, iterations[-1].iteration_index
    across = Axis(
        float(first), float(max(last, first + 1)), at_low=frame.left + 6.0, at_high=frame.right - 6.0,
        text=lambda index: f"{index:.0f}", num_ticks=frame.num_ticks(8), step=lambda step: max(1.0, round_step(step)),
    )  # fmt: skip
    every = math.ceil(len(iterations) / _MAX_NARROW_POINTS) if frame.is_narrow else 1
    parts, top = [], 0.0
    for quantity in quantities:
        top += _TITLE_HEIGHT
        up = Axis(
            max(0.0, low - room), high + room, at_low=top + _PLOT_HEIGHT, at_high=top,
            text=lambda percent: f"{percent:.4g} %", num_ticks=4,
        )  # fmt: skip
        parts.append(_panel(iterations[::every], quantity, across, up, frame))
        top += _PLOT_HEIGHT + _PANEL_GAP
    bottom = top - _PANEL_GAP
    parts.append(across.draw_across(bottom, "iteration"))
    return (
        f'<svg class="series" viewBox="0 0 {frame.width:.0f} {bottom + _AXIS_HEIGHT:.0f}" role="img" '
        f'aria-label="Energy and time of each iteration in per cent of the baseline">{"".join(parts)}</svg>'
    )


def _panel(iterations: Sequence[IterationRow], quantity: _Quantity, across: Axis, up: Axis, frame: Frame) -> str:
    radius = 3.0 if frame.is_narrow or len(iterations) > _MANY_POINTS else 4.0
    at_baseline = up.place(100.0)
    parts = [
        up.draw_up(frame.left, frame.right, quantity.name),
        f'<path class="reference" d="M{frame.left} {at_baseline:.1f}H{frame.right:.1f}"/>',
    ]
    for row in iterations:
        percent = quantity.percent(row)
        if percent is None:
            continue
        x, y = across.place(row.iteration_index), up.place(min(max(percent, up.low), up.high))
        kind = f"{row.plan_purpose or 'mixed'}" if row.is_regular else "disturbed"
        tooltip = ""
        if not frame.is_narrow:
            text = f"iteration {row.iteration_index}, {kind}: {quantity.text(quantity.value(row))}, {percent:.1f} %"
            tooltip = f"<title>{escape(text)}</title>"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{tooltip}</circle>')
    return "".join(parts)
