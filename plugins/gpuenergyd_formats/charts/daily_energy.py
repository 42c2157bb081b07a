"""Energy per day as stacked bars: for jobs, idle and estimated, with a mark on days with missing readings."""

from collections.abc import Sequence
from html import escape

from gpuenergyd.report.formatting import energy_text, time_text
from gpuenergyd.report.groups import Group
from gpuenergyd_formats.charts.axes import TITLE_ROOM, WIDE, Axis, Frame, energy_step, energy_tick, title_below

_TOP, _BOTTOM = 28.0, 194.0
_HEIGHT = _BOTTOM + 30.0 + TITLE_ROOM
_MAX_DAYS = 62
_MAX_LABELS, _MAX_LABELS_NARROW = 10, 5
_MAX_BAR_WIDTH = 60.0
_MAX_STEP = 130.0
"""Maximum distance of bars; a few days are drawn at the left."""

_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch-paper" width="6" height="6"/><rect class="hatch-line" width="2" height="6"/></pattern></defs>'
)


def days_svg(days: Sequence[Group], frame: Frame = WIDE) -> str:
    """Return one bar per day, oldest first, limited to the latest days; empty without any energy."""
    shown = days[-_MAX_DAYS:]
    highest_j = max((sum(energy_j for _, energy_j in _parts(day)) for day in shown), default=0.0)
    if highest_j <= 0:
        return ""
    up = Axis(0.0, highest_j * 1.05, at_low=_BOTTOM, at_high=_TOP, text=energy_tick, num_ticks=4, step=energy_step)
    step = min((frame.right - frame.left) / len(shown), _MAX_STEP)
    width = min(_MAX_BAR_WIDTH, step * 0.72)
    every = -(-len(shown) // (_MAX_LABELS_NARROW if frame.is_narrow else _MAX_LABELS))
    parts = [
        _HATCH,
        up.draw_up(frame.left, frame.right, "energy of all GPUs per day"),
        f'<line class="axis" x1="{frame.left}" x2="{frame.right}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>',
        title_below("day (month-day)", frame.left, frame.right, _BOTTOM + 18),
    ]
    for k, day in enumerate(shown):
        middle = frame.left + (k + 0.5) * step
        parts.append(f'<g class="day"><title>{escape(_tooltip(day))}</title>')
        below_j = 0.0
        for name, energy_j in _parts(day):
            top, bottom = up.place(below_j + energy_j), up.place(below_j)
            below_j += energy_j
            parts.append(
                f'<rect class="{name}" x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{bottom - top:.1f}"/>'
            )
        parts.append("</g>")
        if _has_gap(day):
            parts.append(f'<text class="gap" x="{middle:.1f}" y="{up.place(below_j) - 3:.1f}">?</text>')
        if k % every == 0:
            parts.append(
                f'<text class="tick" x="{middle:.1f}" y="{_BOTTOM + 18:.0f}" text-anchor="middle">'
                f"{escape(day.name[5:])}</text>"
            )
    return (
        f'<svg class="days" viewBox="0 0 {frame.width:.0f} {_HEIGHT:.0f}" role="img" '
        f'aria-label="Energy of all GPUs per day, {escape(shown[0].name)} to {escape(shown[-1].name)}">'
        f"{''.join(parts)}</svg>"
    )


def _parts(day: Group) -> list[tuple[str, float]]:
    estimated_j = (day.by_jobs.estimated_j or 0.0) + (day.idle.estimated_j or 0.0)
    drawn = [("for-jobs", day.by_jobs.energy_j), ("idle", day.idle.energy_j), ("estimated", estimated_j)]
    return [(name, energy_j) for name, energy_j in drawn if energy_j]


def _has_gap(day: Group) -> bool:
    """Return whether more than 1 % of the GPU time of a day has no readings."""
    missing_s = day.by_jobs.missing_s + day.idle.missing_s
    known_s = day.by_jobs.measured_s + day.by_jobs.estimated_s + day.idle.measured_s + day.idle.estimated_s
    return missing_s > 0.01 * (missing_s + known_s)


def _tooltip(day: Group) -> str:
    texts = [f"{energy_text(energy_j)} {name.replace('-', ' ')}" for name, energy_j in _parts(day)]
    missing_s = day.by_jobs.missing_s + day.idle.missing_s
    if missing_s:
        texts.append(f"no readings for {time_text(missing_s)} of GPU time")
    return f"{day.name}: {', '.join(texts) or 'nothing measured'}"
