"""Pictures of the site: the example pipeline as planned by the real planner, drawn with the charts of the report."""

from functools import cache
from pathlib import Path

from gpuenergyd.cli.plan.inputs import PlanInput, PlanOptions, load_planner, plan_input
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import Instruction, Schedule, dependency_graph
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.policy_api.policy import OfflinePlan
from gpuenergyd.report.charts.axes import Axis
from gpuenergyd.report.charts.timeline import timelines_svg
from gpuenergyd.report.formatting import energy_text, time_text
from gpuenergyd.report.observed_iteration import ObservedIteration

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pipeline.csv"
_POLICY = "bubble-aware"
_MICROBATCHES = 6
_BLOCKING_POWER_W = 83.64
"""Power of an A100 that waits, from the Perseus artifact."""
_WIDTH, _HEIGHT = 1000.0, 340.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 78.0, 984.0, 14.0, 300.0


def pictures() -> dict[str, str]:
    """Return all pictures by file name, as SVG to embed in a page."""
    return {
        "clocks.svg": _before_and_after("1f1b", None),
        "inflight.svg": _before_and_after("1f1b", "auto"),
        "frontier.svg": _frontier(),
    }


@cache
def example_plan(extra_inflight: str | None = None) -> tuple[PlanInput, OfflinePlan]:
    """Return the example pipeline and its plan."""
    options = PlanOptions(
        schedule="1f1b",
        microbatches=_MICROBATCHES,
        extra_inflight=extra_inflight,
        blocking_power_w=_BLOCKING_POWER_W,
        want_frontier=True,
    )
    given = plan_input(EXAMPLE, options)
    return given, load_planner(_POLICY)(given.request)


def _before_and_after(name: str, extra_inflight: str | None) -> str:
    given, plan = example_plan(extra_inflight)
    fastest = {
        i: given.request.profile.classes[i.instruction_class].options[0].sm_clock_mhz for i in plan.sm_clocks_mhz
    }
    planned = Schedule(name, given.schedule.num_microbatches, plan.orders)
    return timelines_svg(
        (
            _iteration("at full speed", given, given.schedule, fastest),
            _iteration("as planned", given, planned, dict(plan.sm_clocks_mhz)),
        )
    )


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
