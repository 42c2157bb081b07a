"""Energy against time per iteration: measurements of each plan, the prediction and the lower bound."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from operator import itemgetter
from statistics import median

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.report.formatting import energy_text, time_text
from gpuenergyd.store import IterationRow, PlanRecord
from gpuenergyd_formats.charts.axes import TITLE_ROOM, WIDE, Axis, Frame, energy_step, energy_tick

_TOP, _BOTTOM = 28.0, 298.0
_HEIGHT = _BOTTOM + 30.0 + TITLE_ROOM
_MARGIN = 0.06


def plane_svg(
    iterations: Sequence[IterationRow],
    plan: PlanRecord | None,
    *,
    allowed_time_s: float | None,
    frontier: Sequence[tuple[float, float]] = (),
    frame: Frame = WIDE,
) -> str:
    """Return one point per plan at the medians of its regular iterations, and the prediction of the plan in force.

    `allowed_time_s` is the maximum iteration time. `frontier` has the (time, energy) points from which the policy
    chose; it is drawn over the range of measured and allowed times. A step line joins the Pareto-optimal measurements.
    Empty with fewer than two measured plans.
    """
    measured = _measured(iterations)
    if len(measured) < 2:
        return ""
    predicted = plan.plan.predicted if plan else None
    times_s = [time_s for _, time_s, _, _ in measured]
    energies_j = [energy_j for _, _, energy_j, _ in measured]
    if predicted:
        times_s.append(predicted.iteration_time_s)
        energies_j += [predicted.energy_j, *([predicted.lower_bound_j] if predicted.lower_bound_j else [])]
    in_range = _frontier_in_range(frontier, min(times_s), max([*times_s, allowed_time_s or 0.0]))
    times_s += [time_s for time_s, _ in in_range]
    energies_j += [energy_j for _, energy_j in in_range]
    num_ticks = frame.num_ticks(6)
    across = Axis(*_range(times_s), at_low=frame.left, at_high=frame.right, text=time_text, num_ticks=num_ticks)
    up = Axis(*_range(energies_j), at_low=_BOTTOM, at_high=_TOP, text=energy_tick, num_ticks=6, step=energy_step)
    parts = [up.draw_up(frame.left, frame.right, "energy per iteration"), across.draw_across(_BOTTOM, "iteration time")]
    pareto = _pareto_optimal([(time_s, energy_j) for _, time_s, energy_j, _ in measured])
    stairs = "".join(f"H{across.place(t):.1f}V{up.place(e):.1f}" for t, e in pareto[1:])
    first = f"{across.place(pareto[0][0]):.1f} {up.place(pareto[0][1]):.1f}"
    parts.append(f'<path class="pareto" d="M{first}{stairs}"/>')
    if len(in_range) > 1:
        curve = "L".join(f"{across.place(t):.1f} {up.place(e):.1f}" for t, e in in_range)
        parts.append(
            f'<path class="frontier" d="M{curve}"><title>frontier that targets were chosen from</title></path>'
        )
    if allowed_time_s is not None and across.low <= allowed_time_s <= across.high:
        x = across.place(allowed_time_s)
        parts.append(
            f'<line class="allowed" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}">'
            f"<title>maximum iteration time: {escape(time_text(allowed_time_s))}</title></line>"
        )
    for (plan_id, purpose), time_s, energy_j, count in measured:
        tooltip = f"{plan_id}: {time_text(time_s)}, {energy_text(energy_j)}, median of {count}"
        parts.append(
            f'<circle class="{purpose}" cx="{across.place(time_s):.1f}" cy="{up.place(energy_j):.1f}" r="5">'
            f"<title>{escape(tooltip)}</title></circle>"
        )
    if predicted:
        x = across.place(predicted.iteration_time_s)
        parts.append(_diamond(x, up.place(predicted.energy_j), f"predicted: {energy_text(predicted.energy_j)}"))
        if predicted.lower_bound_j is not None:
            y, text = up.place(predicted.lower_bound_j), energy_text(predicted.lower_bound_j)
            parts.append(
                f'<line class="bound" x1="{x - 14:.1f}" x2="{x + 14:.1f}" y1="{y:.1f}" y2="{y:.1f}">'
                f"<title>lower bound (fitted model): {escape(text)}</title></line>"
            )
    return (
        f'<svg class="plane" viewBox="0 0 {frame.width:.0f} {_HEIGHT:.0f}" role="img" '
        f'aria-label="Iteration time against energy of every plan">{"".join(parts)}</svg>'
    )


def _frontier_in_range(
    frontier: Sequence[tuple[float, float]], low_s: float, high_s: float
) -> list[tuple[float, float]]:
    """Return the points within a range of times, and one more on either side."""
    ordered = sorted(frontier)
    begin = max(0, bisect_left(ordered, low_s, key=itemgetter(0)) - 1)
    return ordered[begin : bisect_right(ordered, high_s, key=itemgetter(0)) + 1]


def _pareto_optimal(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both time and energy, fastest first."""
    found: list[tuple[float, float]] = []
    for time_s, energy_j in sorted(points):
        if not found or energy_j < found[-1][1]:
            found.append((time_s, energy_j))
    return found


def _measured(iterations: Sequence[IterationRow]) -> list[tuple[tuple[str, PlanPurpose], float, float, int]]:
    """Return (plan ID, purpose), median time, median energy and number of iterations of each measured plan."""
    by_plan: dict[tuple[str, PlanPurpose], list[tuple[float, float]]] = defaultdict(list)
    for row in iterations:
        if row.is_regular and row.energy_j is not None and row.plan_id is not None and row.plan_purpose is not None:
            by_plan[row.plan_id, row.plan_purpose].append((row.iteration_time_s, row.energy_j))
    return [
        (key, median(time_s for time_s, _ in pairs), median(energy_j for _, energy_j in pairs), len(pairs))
        for key, pairs in by_plan.items()
    ]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of values with a margin; never empty."""
    low, high = min(values), max(values)
    room = max(high - low, 1e-3 * high) * _MARGIN
    return low - room, high + room


def _diamond(x: float, y: float, tooltip: str) -> str:
    path = f"M{x:.1f} {y - 7:.1f} l7 7 l-7 7 l-7 -7 z"
    return f'<path class="predicted" d="{path}"><title>{escape(tooltip)}</title></path>'
