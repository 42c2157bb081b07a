"""Sizes of charts, and linear axes with round ticks and a title."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from gpuenergyd.report.formatting import JOULES_PER_KWH


def round_step(step: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `step` (> 0)."""
    power = 1e-9
    while True:
        for factor in (1.0, 2.0, 5.0):
            if factor * power >= step:
                return factor * power
        power *= 10.0


_ELAPSED_STEPS_S = (*(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800), *(3600, 7200, 10_800, 21_600, 43_200, 86_400))


def elapsed_step(step_s: float) -> float:
    """Return the smallest step of whole seconds, minutes, hours or days that is at least `step_s` (> 0)."""
    if step_s <= 0.5:
        return round_step(step_s)
    day_s = _ELAPSED_STEPS_S[-1]
    return next((float(s) for s in _ELAPSED_STEPS_S if s >= step_s), day_s * round_step(step_s / day_s))


def elapsed_text(time_s: float) -> str:
    """Return an elapsed time for a tick: 0, 250 ms, 45 s, 1 min 30 s, 6 h, 3 d."""
    if time_s < 1.0:
        return f"{time_s * 1e3:.6g} ms" if time_s > 0 else "0"
    if time_s < 60:
        return f"{time_s:.6g} s"
    whole_s = round(time_s)
    parts = [(whole_s // 86_400, "d"), (whole_s // 3600 % 24, "h"), (whole_s // 60 % 60, "min"), (whole_s % 60, "s")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def energy_step(step_j: float) -> float:
    """Return the smallest step of at least `step_j` (> 0) that is round in the unit of its ticks."""
    return round_step(step_j) if step_j < JOULES_PER_KWH else round_step(step_j / JOULES_PER_KWH) * JOULES_PER_KWH


def energy_tick(energy_j: float) -> str:
    """Return an energy for a tick: 0, 95 J, 2.2 kJ, 10 kWh."""
    if energy_j == 0:
        return "0"
    if energy_j < 10_000:
        return f"{energy_j:.6g} J"
    return f"{energy_j / 1e3:.6g} kJ" if energy_j < JOULES_PER_KWH else f"{energy_j / JOULES_PER_KWH:.4g} kWh"


@dataclass(frozen=True, slots=True)
class Frame:
    """Width of a chart in SVG units (about one pixel), and the margin to the left of its plot."""

    width: float
    left: float
    is_narrow: bool = False

    @property
    def right(self) -> float:
        """The right edge of the plot."""
        return self.width - (8.0 if self.is_narrow else 16.0)

    def num_ticks(self, num_wide: int) -> int:
        """Return the number of ticks on a horizontal axis, given that of a wide chart."""
        return max(2, num_wide // 2) if self.is_narrow else num_wide


WIDE = Frame(1000.0, 78.0)
NARROW = Frame(340.0, 60.0, is_narrow=True)
"""Fits a phone of 390 pixels without scrolling."""
TITLE_ROOM = 18.0
"""Height of an axis title above a plot or below its ticks."""


def title_above(text: str, top: float) -> str:
    """Return the title of a vertical axis, above a plot that begins at `top`."""
    return f'<text class="axis-title" x="0" y="{top - 10:.1f}">{escape(text)}</text>'


def title_below(text: str, left: float, right: float, labels_y: float) -> str:
    """Return the title of a horizontal axis, below tick labels at `labels_y`."""
    middle, y = (left + right) / 2, labels_y + TITLE_ROOM
    return f'<text class="axis-title" x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale from values to SVG coordinates, with ticks at round values."""

    low: float
    high: float
    at_low: float
    at_high: float
    text: Callable[[float], str]
    num_ticks: int = 5
    step: Callable[[float], float] = round_step

    def place(self, value: float) -> float:
        return self.at_low + (value - self.low) / (self.high - self.low) * (self.at_high - self.at_low)

    def ticks(self) -> tuple[float, ...]:
        """Return round values within the axis."""
        step = self.step((self.high - self.low) / self.num_ticks)
        return tuple(n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1))

    def draw_across(self, y: float, title: str = "") -> str:
        """Return the axis as a horizontal line at `y` with ticks and a title below it."""
        parts = [f'<line class="axis" x1="{self.at_low:.1f}" x2="{self.at_high:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>']
        for value in self.ticks():
            x = self.place(value)
            anchor = "end" if x > self.at_high - 30 else "middle"
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 5:.1f}"/>')
            parts.append(_label(self.text(value), x=x, y=y + 18, anchor=anchor))
        if title:
            parts.append(title_below(title, self.at_low, self.at_high, y + 18))
        return "".join(parts)

    def draw_up(self, x: float, right: float, title: str = "") -> str:
        """Return the axis as labels to the left of `x`, each with a grid line to `right`, and a title above."""
        parts = [title_above(title, self.at_high)] if title else []
        for value in self.ticks():
            y = self.place(value)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_label(self.text(value), x=x - 6, y=y + 4, anchor="end"))
        return "".join(parts)


def _label(text: str, *, x: float, y: float, anchor: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def elapsed_axis(span_s: float, frame: Frame) -> Axis:
    """Return the horizontal axis for the time since the start."""
    return Axis(
        0.0,
        span_s,
        at_low=frame.left,
        at_high=frame.right,
        text=elapsed_text,
        num_ticks=frame.num_ticks(7),
        step=elapsed_step,
    )
