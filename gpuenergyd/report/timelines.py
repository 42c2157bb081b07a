"""Measured timelines of iterations, with SM clocks as colours.

Dark is slow, bright is fast, also in greyscale and for colour-blind readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuenergyd.core.measurement.telemetry import ObservedSpan

# Eleven stops of viridis (van der Walt and Smith, 2015; matplotlib's default map), equally spaced from 0 to 1.
_VIRIDIS = (
    (68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140),
    (34, 168, 132), (66, 190, 113), (122, 209, 81), (189, 223, 38), (253, 231, 37),
)  # fmt: skip
UNKNOWN_FILL = "url(#unknown)"
"""Fill pattern of an instruction with unknown clock."""


@dataclass(frozen=True, slots=True)
class ObservedIteration:
    """The measured timeline of one iteration, with a title for charts."""

    title: str
    iteration_time_s: float
    spans: tuple[ObservedSpan, ...]
    schedule_name: str = ""
    """Name of the schedule, which determines the stages of a rank's chunks."""


@dataclass(frozen=True, slots=True)
class ClockScale:
    """The range of SM clocks in a chart."""

    min_sm_clock_mhz: float
    max_sm_clock_mhz: float

    def fill(self, sm_clock_mhz: float | None) -> str:
        return UNKNOWN_FILL if sm_clock_mhz is None else _hex(self._position(sm_clock_mhz))

    def text_class(self, sm_clock_mhz: float | None) -> str:
        """Return the CSS class of text on a clock's colour, for sufficient contrast."""
        return "on-bright" if sm_clock_mhz is None or self._position(sm_clock_mhz) > 0.55 else "on-dark"

    def gradient(self) -> str:
        """Return the scale as a CSS gradient from slow to fast."""
        stops = ", ".join(_hex(i / (len(_VIRIDIS) - 1)) for i in range(len(_VIRIDIS)))
        return f"linear-gradient(to right, {stops})"

    def _position(self, sm_clock_mhz: float) -> float:
        span = self.max_sm_clock_mhz - self.min_sm_clock_mhz
        if span <= 0:
            return 1.0
        return min(1.0, max(0.0, (sm_clock_mhz - self.min_sm_clock_mhz) / span))


def clock_scale(iterations: Sequence[ObservedIteration]) -> ClockScale | None:
    """Return the range of SM clocks in all iterations; None if no clock is known."""
    clocks = [s.mean_sm_clock_mhz for it in iterations for s in it.spans if s.mean_sm_clock_mhz is not None]
    return ClockScale(min(clocks), max(clocks)) if clocks else None


def _hex(position: float) -> str:
    place = position * (len(_VIRIDIS) - 1)
    left = min(int(place), len(_VIRIDIS) - 2)
    share = place - left
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(_VIRIDIS[left], _VIRIDIS[left + 1], strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"
