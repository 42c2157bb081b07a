"""Carbon intensity and iteration time target during a job, on one time axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from gpuenergyd.report.formatting import time_text
from gpuenergyd_formats.charts.axes import TITLE_ROOM, WIDE, Axis, Frame, elapsed_axis

_GRID_TOP, _GRID_BOTTOM = 28.0, 118.0
_TARGET_TOP, _TARGET_BOTTOM = 156.0, 226.0
_AXIS_HEIGHT = 30.0 + TITLE_ROOM


@dataclass(frozen=True, slots=True)
class IntensityStep:
    """A carbon intensity in the time from `begin_at` to `end_at`."""

    begin_at: datetime
    end_at: datetime
    intensity: float
    is_measured: bool = True


@dataclass(frozen=True, slots=True)
class TargetStep:
    """An iteration time target and the instant from which it applies; a time of None means full speed."""

    at: datetime
    permitted_time_s: float | None


def intensity_svg(
    grid: Sequence[IntensityStep],
    targets: Sequence[TargetStep],
    *,
    unit: str,
    full_speed_time_s: float | None,
    end_at: datetime,
    frame: Frame = WIDE,
) -> str:
    """Return the intensity panel, with the target panel below if there are targets; empty without any intensity.

    Hours of unknown intensity are gaps; forecast and estimated intensities are dashed.
    """
    if not grid:
        return ""
    begin_at = min(grid[0].begin_at, *(step.at for step in targets)) if targets else grid[0].begin_at
    span_s = max((max(end_at, grid[-1].end_at) - begin_at).total_seconds(), 1.0)
    across = elapsed_axis(span_s, frame)
    highest = max(step.intensity for step in grid) * 1.08 or 1.0
    up = Axis(0.0, highest, at_low=_GRID_BOTTOM, at_high=_GRID_TOP, text=lambda value: f"{value:g}", num_ticks=3)
    parts = [up.draw_up(frame.left, frame.right, unit)]
    for is_measured in (True, False):
        path, last = "", None
        for step in grid:
            if step.is_measured is not is_measured:
                last = None
                continue
            x, y = across.place((step.begin_at - begin_at).total_seconds()), up.place(step.intensity)
            joins = last is not None and last.end_at == step.begin_at
            path += (
                f"{'L' if joins else 'M'}{x:.1f} {y:.1f}H{across.place((step.end_at - begin_at).total_seconds()):.1f}"
            )
            last = step
        if path:
            parts.append(f'<path class="{"line" if is_measured else "line unsure"}" d="{path}"/>')
    parts.append(_target_panel(targets, begin_at, across, full_speed_time_s, span_s))
    bottom = _TARGET_BOTTOM if targets else _GRID_BOTTOM
    parts.append(across.draw_across(bottom, "time since the start"))
    height = bottom + _AXIS_HEIGHT
    return (
        f'<svg class="intensity" viewBox="0 0 {frame.width:.0f} {height:.0f}" role="img" '
        f'aria-label="Carbon intensity and iteration time target over time">{"".join(parts)}</svg>'
    )


def _target_panel(
    targets: Sequence[TargetStep], begin_at: datetime, across: Axis, full_speed_time_s: float | None, span_s: float
) -> str:
    times_s = [step.permitted_time_s or full_speed_time_s for step in targets]
    known = [time_s for time_s in times_s if time_s is not None]
    if not known:
        return ""
    low, high = min([*known, full_speed_time_s or known[0]]), max(known)
    room = max(high - low, 1e-3 * high) * 0.1
    up = Axis(low - room, high + room, at_low=_TARGET_BOTTOM, at_high=_TARGET_TOP, text=time_text, num_ticks=2)
    ends = [*((step.at - begin_at).total_seconds() for step in targets[1:]), span_s]
    path = ""
    for step, time_s, end_s in zip(targets, times_s, ends, strict=True):
        if time_s is not None:
            x = across.place((step.at - begin_at).total_seconds())
            path += f"{'L' if path else 'M'}{x:.1f} {up.place(time_s):.1f}H{across.place(end_s):.1f}"
    axis = up.draw_up(across.at_low, across.at_high, "iteration time target")
    return f'{axis}<path class="line target" d="{path}"/>'
