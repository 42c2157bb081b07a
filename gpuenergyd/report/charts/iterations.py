"""Time and energy of every iteration in order, coloured by purpose."""

from collections.abc import Callable, Sequence
from html import escape

from gpuenergyd.report.formatting import energy_text, time_text
from gpuenergyd.store import IterationRow

_WIDTH = 1000.0
_LEFT = 78.0
_TITLE_HEIGHT = 28.0
_PLOT_HEIGHT = 110.0
_PANEL_HEIGHT = _TITLE_HEIGHT + _PLOT_HEIGHT
_PANEL_GAP = 22.0


def series_svg(iterations: Sequence[IterationRow]) -> str:
    """Return the energy panel above the time panel, one point per iteration; empty with fewer than two iterations."""
    if len(iterations) < 2:
        return ""
    panels: list[str] = []
    top = 0.0
    for name, value, text in (
        ("energy per iteration", lambda row: row.energy_j, energy_text),
        ("time per iteration", lambda row: row.iteration_time_s, time_text),
    ):
        panel = _panel(iterations, name=name, value=value, text=text, top=top)
        if panel:
            panels.append(panel)
            top += _PANEL_HEIGHT + _PANEL_GAP
    return (
        f'<svg class="series" viewBox="0 0 {_WIDTH:.0f} {top:.0f}" role="img" '
        f'aria-label="Energy and time of each iteration">{"".join(panels)}</svg>'
    )


def _panel(
    iterations: Sequence[IterationRow],
    *,
    name: str,
    value: Callable[[IterationRow], float | None],
    text: Callable[[float | None], str],
    top: float,
) -> str:
    regular = sorted(v for row in iterations if row.is_regular and (v := value(row)) is not None)
    if not regular:
        return ""
    # The scale starts at zero, so that savings are not exaggerated; outliers are drawn at the upper edge.
    highest = regular[-1] * 1.05
    first, last = iterations[0].iteration_index, iterations[-1].iteration_index
    across = (_WIDTH - _LEFT - 16.0) / max(1, last - first)
    bottom = top + _PANEL_HEIGHT
    parts = [
        f'<text class="title" x="0" y="{top + 12:.1f}">{escape(name)}</text>',
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 8:.0f}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>',
        _tick(bottom - _PLOT_HEIGHT, text(highest)),
        _tick(bottom, "0"),
    ]
    for row in iterations:
        measured = value(row)
        if measured is None:
            continue
        x = _LEFT + 8.0 + (row.iteration_index - first) * across
        y = bottom - min(measured / highest, 1.0) * _PLOT_HEIGHT
        kind = f"{row.plan_purpose or 'mixed'}" if row.is_regular else "disturbed"
        tooltip = f"iteration {row.iteration_index}, {kind}: {text(measured)}"
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(tooltip)}</title></circle>'
        )
    return "".join(parts)


def _tick(y: float, text: str) -> str:
    return f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
