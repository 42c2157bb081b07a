"""Axes for the pictures: round steps, ticks with units, and where a value lies."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape


def round_step(step: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `step` (> 0)."""
    power = 1e-9
    while True:
        for factor in (1.0, 2.0, 5.0):
            if factor * power >= step:
                return factor * power
        power *= 10.0


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from values to picture coordinates, with ticks at round values."""

    low: float
    high: float
    at_low: float
    at_high: float
    text: Callable[[float], str]
    num_ticks: int = 5

    def place(self, value: float) -> float:
        """Return the coordinate of a value."""
        return self.at_low + (value - self.low) / (self.high - self.low) * (self.at_high - self.at_low)

    def ticks(self) -> tuple[float, ...]:
        """Return round values within the axis."""
        step = round_step((self.high - self.low) / self.num_ticks)
        return tuple(n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1))

    def draw_across(self, y: float) -> str:
        """Return the axis as a horizontal line at `y`, ticks below."""
        parts = [f'<line class="axis" x1="{self.at_low:.1f}" x2="{self.at_high:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>']
        for value in self.ticks():
            x = self.place(value)
            anchor = "end" if x > self.at_high - 30 else "middle"
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 5:.1f}"/>')
            parts.append(_label(self.text(value), x=x, y=y + 18, anchor=anchor))
        return "".join(parts)

    def draw_up(self, x: float, right: float) -> str:
        """Return the axis as labels left of `x`, with a faint line to `right` at each."""
        parts = []
        for value in self.ticks():
            y = self.place(value)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_label(self.text(value), x=x - 6, y=y + 4, anchor="end"))
        return "".join(parts)


def _label(text: str, *, x: float, y: float, anchor: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
