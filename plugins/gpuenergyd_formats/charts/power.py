"""Measured power of a job's GPUs over time, and the power that its plans predicted."""

from collections import defaultdict
from collections.abc import Sequence

from gpuenergyd.count_text import count_text
from gpuenergyd.report.formatting import power_text
from gpuenergyd.store import PlanRecord
from gpuenergyd.store.records import RollupRecord
from gpuenergyd_formats.charts.axes import TITLE_ROOM, WIDE, Axis, Frame, elapsed_axis

_TOP, _BOTTOM = 28.0, 216.0
_HEIGHT = _BOTTOM + 30.0 + TITLE_ROOM
_MAX_POINTS = 480


def power_svg(
    rollups: Sequence[RollupRecord],
    *,
    num_gpus: int,
    plans: Sequence[PlanRecord] = (),
    baseline_power_w: float | None = None,
    frame: Frame = WIDE,
) -> str:
    """Return the total power per time bucket; buckets in which a GPU was not measured are gaps.

    A second line shows the mean power predicted by the plan in force, a third line the mean power of the baseline.
    Empty with fewer than two buckets.
    """
    by_bucket: dict[float, list[float]] = defaultdict(list)
    for rollup in rollups:
        if rollup.mean_power_w is not None:
            by_bucket[rollup.started_at.timestamp()].append(rollup.mean_power_w)
    points = sorted((at, sum(powers_w)) for at, powers_w in by_bucket.items() if len(powers_w) == num_gpus)
    if len(points) < 2:
        return ""
    begin = points[0][0]
    points, width_s = _thinned(points, rollups[0].bucket_s)
    span_s = points[-1][0] - begin + width_s
    across = elapsed_axis(span_s, frame)
    predicted = _predicted(plans, begin, begin + span_s)
    highest_w = max([w for _, w in points] + [w for _, _, w in predicted] + [baseline_power_w or 0.0])
    up = Axis(0.0, highest_w * 1.08, at_low=_BOTTOM, at_high=_TOP, text=power_text, num_ticks=5)
    path, area, last_at = "", "", None
    for at, power_w in points:
        is_gap = last_at is None or at - last_at > 1.5 * width_s
        x, y = across.place(at - begin), up.place(power_w)
        right = across.place(at - begin + width_s)
        path += f"{'M' if is_gap else 'L'}{x:.1f} {y:.1f}H{right:.1f}"
        area += f"M{x:.1f} {_BOTTOM}V{y:.1f}H{right:.1f}V{_BOTTOM}"
        last_at = at
    gpus = count_text(num_gpus, "GPU")
    axes = up.draw_up(frame.left, frame.right, f"power of all {gpus}" if num_gpus > 1 else "GPU power")
    reference = ""
    if baseline_power_w is not None:
        y = up.place(baseline_power_w)
        reference = f'<path class="reference" d="M{frame.left} {y:.1f}H{frame.right:.1f}"/>'
    return (
        f'<svg class="power" viewBox="0 0 {frame.width:.0f} {_HEIGHT:.0f}" role="img" '
        f'aria-label="Power of {gpus} over time">{axes}{across.draw_across(_BOTTOM, "time since the start")}'
        f'<path class="area" d="{area}"/><path class="line" d="{path}"/>{reference}'
        f"{_drawn_plans(predicted, begin, across, up)}</svg>"
    )


def _predicted(plans: Sequence[PlanRecord], begin: float, end: float) -> list[tuple[float, float, float]]:
    """Return start, end and predicted mean power of each plan; a plan is in force until the next one is issued."""
    found = []
    for k, row in enumerate(plans):
        predicted = row.plan.predicted
        since = max(begin, row.issued_at.timestamp())
        until = min(end, plans[k + 1].issued_at.timestamp() if k + 1 < len(plans) else end)
        if predicted is not None and predicted.iteration_time_s > 0 and since < until:
            found.append((since, until, predicted.energy_j / predicted.iteration_time_s))
    return found


def _drawn_plans(predicted: Sequence[tuple[float, float, float]], begin: float, across: Axis, up: Axis) -> str:
    if not predicted:
        return ""
    path = "".join(
        f"M{across.place(since - begin):.1f} {up.place(w):.1f}H{across.place(until - begin):.1f}"
        for since, until, w in predicted
    )
    return f'<path class="line planned" d="{path}"><title>predicted by the plan in force</title></path>'


def _thinned(points: list[tuple[float, float]], width_s: float) -> tuple[list[tuple[float, float]], float]:
    """Return means over neighbouring buckets, such that at most `_MAX_POINTS` remain, and the new bucket width."""
    together = -(-len(points) // _MAX_POINTS)
    if together == 1:
        return points, width_s
    begin, wide_s = points[0][0], width_s * together
    merged: dict[int, list[float]] = defaultdict(list)
    for at, power_w in points:
        merged[int((at - begin) // wide_s)].append(power_w)
    return [(begin + index * wide_s, sum(w) / len(w)) for index, w in sorted(merged.items())], wide_s
