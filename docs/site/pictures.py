"""Pictures of the documents: the example pipeline as planned by the real planner, drawn with the charts of the report.

Every picture is a file of its own with its own style, readable on a light and on a dark page.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import Instruction, Schedule, dependency_graph
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.policy_api.policy import OfflinePlan
from gpuenergyd.report.formatting import energy_text, time_text
from gpuenergyd.report.timelines import ClockScale, ObservedIteration
from gpuenergyd_formats.charts.axes import NARROW, Axis
from gpuenergyd_formats.charts.timeline import timelines_svg
from gpuenergyd_plan.inputs import PlanInput, load_planner, plan_input
from gpuenergyd_plan.tables import PlanOptions

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pipeline.csv"
_POLICY = "bubble-aware"
_MICROBATCHES = 6
BLOCKING_POWER_W = 83.64
"""Power of an A100 that waits, from the Perseus artifact."""
_WIDTH, _HEIGHT = 1000.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 78.0, 984.0, 14.0, 300.0


_FRONTIER_LEGEND = (
    '<text x="78" y="10">iteration time, against energy per iteration</text>'
    '<line class="frontier plain" x1="500" x2="540" y1="6" y2="6"/><text x="548" y="10">1F1B</text>'
    '<line class="frontier ahead" x1="620" x2="660" y1="6" y2="6"/>'
    '<text x="668" y="10">with extra microbatches in flight</text>'
)
_STYLE = """
text { font: 15px system-ui, sans-serif; fill: #1f2328; }
text.title { font-size: 16px; font-weight: 600; }
text.stage, text.tick, text.axis-title { fill: #59636e; }
text.label { text-anchor: middle; font-size: 14px; }
text.on-bright { fill: #000; }
text.on-dark { fill: #fff; }
.bubble, .waiting { fill: #e3e7eb; }
.axis, .grid { stroke: #818b98; stroke-width: 1; }
.grid { opacity: 0.35; }
.critical rect { stroke: #d4442c; stroke-width: 2; }
.frontier { fill: none; stroke-width: 2.5; }
.frontier.plain { stroke: #2a788e; }
.frontier.ahead { stroke: #22a884; stroke-dasharray: 7 4; }
.full-speed { fill: #d4442c; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  text.stage, text.tick, text.axis-title { fill: #9198a1; }
  .bubble, .waiting { fill: #2a313c; }
  .axis, .grid { stroke: #656c76; }
}
"""

_NARROW_STYLE = """text { font-size: 13px; }
text.title { font-size: 14px; }
text.label { font-size: 12px; }
"""
"""Narrow pictures are not scaled down; wide ones are, to the column of a page."""


def _standalone(svg: str, legend: str = "", legend_height: float = 0.0) -> str:
    """Return an SVG element as a file of its own, with a style and a legend below."""
    found = re.match(r'<svg class="[^"]*" viewBox="0 0 (\S+) (\S+)"(.*)</svg>$', svg, re.DOTALL)
    assert found is not None, svg[:200]
    width, height = float(found[1]), float(found[2])
    total = height + legend_height
    placed = f'<g transform="translate(0 {height:.0f})">{legend}</g>' if legend else ""
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{total:.0f}"'
        f' viewBox="0 0 {width:.0f} {total:.0f}"{found[3]}{placed}</svg>'
    )
    head, _, body = text.partition(">")
    style = _STYLE + _NARROW_STYLE * (width == NARROW.width)
    return f"{head}>\n<style>{style}</style>\n{body}\n".replace("><g", ">\n<g").replace("><text", ">\n<text")


def _legend(scale: ClockScale) -> str:
    """Return the clock scale, the colour of waiting and the outline of the critical path."""
    steps, left, width = 40, 64.0, 160.0
    low, high = scale.min_sm_clock_mhz, scale.max_sm_clock_mhz
    parts = [
        f'<rect x="{left + width * i / steps:.1f}" y="4" width="{width / steps + 0.3:.1f}" height="14"'
        f' fill="{scale.fill(low + (high - low) * (i + 0.5) / steps)}"/>'
        for i in range(steps)
    ]
    parts += [
        f'<text x="{left + width + 10:.0f}" y="16">SM clock, {low:.0f} to {high:.0f} MHz</text>',
        '<rect class="waiting" x="470" y="4" width="26" height="14"/><text x="504" y="16">waiting</text>',
        '<g class="critical"><rect x="600" y="4" width="26" height="14" fill="none"/></g>',
        '<text x="636" y="16">critical path: must not become slower</text>',
    ]
    return "".join(parts)


def _narrow_legend(scale: ClockScale) -> str:
    """Return the same legend in two rows, for a picture as wide as a phone."""
    steps, width = 40, 120.0
    low, high = scale.min_sm_clock_mhz, scale.max_sm_clock_mhz
    parts = [
        f'<rect x="{width * i / steps:.1f}" y="4" width="{width / steps + 0.3:.1f}" height="14"'
        f' fill="{scale.fill(low + (high - low) * (i + 0.5) / steps)}"/>'
        for i in range(steps)
    ]
    parts += [
        f'<text x="{width + 8:.0f}" y="16">SM clock, {low:.0f} to {high:.0f} MHz</text>',
        '<rect class="waiting" x="0" y="28" width="26" height="14"/><text x="34" y="40">waiting</text>',
        '<g class="critical"><rect x="102" y="28" width="26" height="14" fill="none"/></g>',
        '<text x="136" y="40">critical path, stays fast</text>',
    ]
    return "".join(parts)


@cache
def example_plan(extra_inflight: str | None = None) -> tuple[PlanInput, OfflinePlan]:
    """Return the example pipeline and its plan."""
    options = PlanOptions(
        schedule="1f1b",
        microbatches=_MICROBATCHES,
        extra_inflight=extra_inflight,
        blocking_power_w=BLOCKING_POWER_W,
        want_frontier=True,
    )
    given = plan_input(EXAMPLE, options)
    return given, load_planner(_POLICY)(given.request)


def planned_iterations(
    name: str = "1f1b", extra_inflight: str | None = None
) -> tuple[ObservedIteration, ObservedIteration, OfflinePlan]:
    """Return an iteration of the example pipeline at full speed and as planned, and the plan."""
    given, plan = example_plan(extra_inflight)
    fastest = {
        i: given.request.profile.classes[i.instruction_class].options[0].sm_clock_mhz for i in plan.sm_clocks_mhz
    }
    planned = Schedule(name, given.schedule.num_microbatches, plan.orders)
    before = f"before, all at full speed: {energy_text(plan.baseline_energy_j)} per iteration"
    after = f"after, as planned: {energy_text(plan.energy_j)} per iteration"
    return (
        _iteration(before, given, given.schedule, fastest),
        _iteration(after, given, planned, dict(plan.sm_clocks_mhz)),
        plan,
    )


def _before_and_after(name: str, extra_inflight: str | None) -> str:
    before, after, plan = planned_iterations(name, extra_inflight)
    saving = 1 - plan.energy_j / plan.baseline_energy_j
    drawn = timelines_svg((before, replace(after, title=f"{after.title}, {100 * saving:.1f} % less")))
    clocks_mhz = [s.mean_sm_clock_mhz for each in (before, after) for s in each.spans if s.mean_sm_clock_mhz]
    return _standalone(drawn, _legend(ClockScale(min(clocks_mhz), max(clocks_mhz))), 28.0)


def _before_and_after_on_a_phone() -> str:
    before, after, plan = planned_iterations()
    baseline_j, energy_j = plan.baseline_energy_j, plan.energy_j
    before = replace(before, title=f"before: {energy_text(baseline_j)}")
    after = replace(after, title=f"after: {energy_text(energy_j)}, {100 * (1 - energy_j / baseline_j):.1f} % less")
    drawn = timelines_svg((before, after), NARROW)
    clocks_mhz = [s.mean_sm_clock_mhz for each in (before, after) for s in each.spans if s.mean_sm_clock_mhz]
    return _standalone(drawn, _narrow_legend(ClockScale(min(clocks_mhz), max(clocks_mhz))), 52.0)


def _iteration(
    title: str, given: PlanInput, schedule: Schedule, sm_clocks_mhz: dict[Instruction, int]
) -> ObservedIteration:
    graph = dependency_graph(schedule)
    profile = given.request.profile
    durations_s = [
        next(o.time_s for o in profile.classes[i.instruction_class].options if o.sm_clock_mhz == sm_clocks_mhz[i])
        for i in graph.instructions
    ]
    drawn = timeline(graph, durations_s)
    spans = tuple(
        ObservedSpan(
            span.instruction.pp_rank,
            span.instruction.kind,
            span.instruction.microbatch_index,
            span.instruction.chunk_index,
            span.start_s,
            span.end_s,
            float(sm_clocks_mhz[span.instruction]),
        )
        for span in drawn.spans
    )
    return ObservedIteration(title, drawn.iteration_time_s, spans)


def _frontier_picture() -> str:
    return _standalone(_frontier(), _FRONTIER_LEGEND, 20.0)


def _frontier() -> str:
    """Return time against energy of all frontier plans, plain and with extra microbatches, and of full speed."""
    curves = [(kind, example_plan(extra)[1]) for kind, extra in (("plain", None), ("ahead", "auto"))]
    points = [(point.iteration_time_s, point.energy_j) for _, plan in curves for point in plan.frontier]
    full_speed = (curves[0][1].baseline_time_s, curves[0][1].baseline_energy_j)
    times_s, energies_j = zip(*points, full_speed, strict=True)
    across = Axis(0.99 * min(times_s), 1.01 * max(times_s), at_low=_LEFT, at_high=_RIGHT, text=time_text, num_ticks=7)
    up = Axis(
        0.98 * min(energies_j), 1.02 * max(energies_j), at_low=_BOTTOM, at_high=_TOP, text=energy_text, num_ticks=5
    )
    parts = [up.draw_up(_LEFT, _RIGHT), across.draw_across(_BOTTOM)]
    for kind, plan in curves:
        path = " ".join(f"{across.place(p.iteration_time_s):.1f},{up.place(p.energy_j):.1f}" for p in plan.frontier)
        parts.append(f'<polyline class="frontier {kind}" points="{path}"/>')
    x, y = across.place(full_speed[0]), up.place(full_speed[1])
    parts.append(f'<circle class="full-speed" cx="{x:.1f}" cy="{y:.1f}" r="6"/>')
    parts.append(f'<text x="{x + 12:.1f}" y="{y + 5:.1f}">full speed</text>')
    return (
        f'<svg class="plane" viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" '
        f'aria-label="Iteration time against energy: full speed, and the frontier">{"".join(parts)}</svg>'
    )


PICTURES: Mapping[str, Callable[[], str]] = {
    "pipeline.svg": partial(_before_and_after, "1f1b", None),
    "pipeline-narrow.svg": _before_and_after_on_a_phone,
    "inflight.svg": partial(_before_and_after, "1f1b", "auto"),
    "frontier.svg": _frontier_picture,
}
"""Functions that draw the pictures, as complete SVG files, by file name."""
