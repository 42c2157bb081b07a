"""Pipeline timelines on one time scale: one row per stage, instructions coloured by SM clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, dependency_graph
from gpuenergyd.core.pipeline.schedules import stage_of_chunk, with_communication
from gpuenergyd.errors import ScheduleError
from gpuenergyd.report.formatting import clock_text, time_text
from gpuenergyd.report.timelines import ClockScale, ObservedIteration, clock_scale
from gpuenergyd_formats.charts.axes import TITLE_ROOM, WIDE, Frame, round_step, title_below

_LEFT = 64.0
_RIGHT_MARGIN = 8.0
_MAX_ROW_HEIGHT = 30.0
_MIN_ROW_HEIGHT = 8.0
_ROWS_HEIGHT = 400.0
"""Height of the rows of one iteration; with many ranks, rows become lower."""
_MIN_LABEL_HEIGHT = 14.0
_TITLE_HEIGHT = 26.0
_AXIS_HEIGHT = 30.0 + TITLE_ROOM
_CHARACTER_WIDTH = 7.8
"""Width of a character in a label 12 pixels high, in the widest common font."""
_KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "C": "gradient communication",
    "O": "optimizer step",
    "D": "wait for data",
}


def timelines_svg(iterations: Sequence[ObservedIteration], frame: Frame = WIDE) -> str:
    """Return the iterations below each other, on the same time scale."""
    drawn = [iteration for iteration in iterations if iteration.spans]
    if not drawn:
        return ""
    longest_s = max(max(it.iteration_time_s, *(span.end_s for span in it.spans)) for it in drawn)
    scene = _Scene(
        frame,
        clock_scale(drawn) or ClockScale(0.0, 0.0),
        (frame.width - _LEFT - _RIGHT_MARGIN) / longest_s,
        _row_height(max(len({span.pp_rank for span in it.spans}) for it in drawn)),
    )
    parts: list[str] = []
    top = 0.0
    for iteration in drawn:
        picture, height = _iteration(iteration, scene, top=top)
        parts.append(picture)
        top += height + 14.0
    parts.append(_axis(longest_s, scene, top=top - 8.0))
    height = top + _AXIS_HEIGHT
    titles = " and ".join(escape(iteration.title) for iteration in drawn)
    return (
        f'<svg class="timeline" viewBox="0 0 {frame.width:.0f} {height:.0f}" role="img" '
        f'aria-label="Pipeline timeline: {titles}">'
        '<defs><pattern id="unknown" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#bbb"/><rect width="2" height="6" fill="#888"/></pattern></defs>'
        + "".join(parts)
        + "</svg>"
    )


@dataclass(frozen=True, slots=True)
class _Scene:
    """Properties shared by all iterations of one chart."""

    frame: Frame
    scale: ClockScale
    per_second: float
    row_height: float

    @property
    def row_gap(self) -> float:
        return self.row_height / 6


def _row_height(num_ranks: int) -> float:
    return min(_MAX_ROW_HEIGHT, max(_MIN_ROW_HEIGHT, _ROWS_HEIGHT / num_ranks))


def _iteration(iteration: ObservedIteration, scene: _Scene, *, top: float) -> tuple[str, float]:
    """Return the rows of one iteration and their height."""
    ranks = sorted({span.pp_rank for span in iteration.spans})
    critical = frozenset(observed_critical_path(iteration.spans, iteration.schedule_name))
    row_height, step = scene.row_height, scene.row_height + scene.row_gap
    row_of = {rank: top + _TITLE_HEIGHT + i * step for i, rank in enumerate(ranks)}
    title = f"{iteration.title}, {time_text(iteration.iteration_time_s)}"
    parts = [f'<text class="title" x="0" y="{top + 16:.1f}">{escape(title)}</text>']
    width = iteration.iteration_time_s * scene.per_second
    named = max(1, round(_MIN_LABEL_HEIGHT / step + 0.49))
    for i, (rank, y) in enumerate(row_of.items()):
        if i % named == 0:
            parts.append(f'<text class="stage" x="0" y="{y + row_height / 2 + 4:.1f}">stage {rank}</text>')
        parts.append(f'<rect class="bubble" x="{_LEFT}" y="{y:.1f}" width="{width:.2f}" height="{row_height:.4g}"/>')
    # Critical instructions are drawn last, so that their outlines are on top.
    for is_critical in (False, True):
        parts.extend(
            _instruction(span, scene, y=row_of[span.pp_rank], is_critical=is_critical)
            for span in iteration.spans
            if (instruction_of(span) in critical) is is_critical
        )
    return "".join(parts), _TITLE_HEIGHT + len(ranks) * step


def _instruction(span: ObservedSpan, scene: _Scene, *, y: float, is_critical: bool) -> str:
    x = _LEFT + span.start_s * scene.per_second
    width = max(0.5, (span.end_s - span.start_s) * scene.per_second)
    label, name = "", f"{span.kind}{span.microbatch_index}"
    if width >= _CHARACTER_WIDTH * len(name) + 2.0 and scene.row_height >= _MIN_LABEL_HEIGHT:
        shade = scene.scale.text_class(span.mean_sm_clock_mhz)
        label = (
            f'<text class="label {shade}" x="{x + width / 2:.2f}" y="{y + scene.row_height / 2 + 4:.1f}">{name}</text>'
        )
    inset = 1.0 if is_critical else 0.25
    return (
        f'<g class="{"instruction critical" if is_critical else "instruction"}">'
        f"{_tooltip(span, scene, is_critical=is_critical)}"
        f'<rect x="{x + inset:.2f}" y="{y + inset:.2f}" width="{max(0.5, width - 2 * inset):.2f}" '
        f'height="{scene.row_height - 2 * inset:.2f}" fill="{scene.scale.fill(span.mean_sm_clock_mhz)}"/>{label}</g>'
    )


def _tooltip(span: ObservedSpan, scene: _Scene, *, is_critical: bool) -> str:
    """Return the tooltip of an instruction; empty in a narrow chart, because phones have no hovering pointer."""
    if scene.frame.is_narrow:
        return ""
    text = (
        f"{_name_of(instruction_of(span))}, stage {span.pp_rank}: "
        f"{time_text(span.end_s - span.start_s)} at {clock_text(span.mean_sm_clock_mhz)}"
        f"{', critical' if is_critical else ''}"
    )
    return f"<title>{escape(text)}</title>"


def _name_of(instruction: Instruction) -> str:
    if instruction.kind is InstructionKind.FB:
        return (
            f"forward of chunk {instruction.forward_chunk_index}, overlapped with the backward of microbatch"
            f" {instruction.microbatch_index}, chunk {instruction.backward_chunk_index}"
        )
    chunk = f", chunk {instruction.chunk_index}" if instruction.chunk_index else ""
    return f"{_KIND_NAMES[instruction.kind]} of microbatch {instruction.microbatch_index}{chunk}"


def _axis(longest_s: float, scene: _Scene, *, top: float) -> str:
    """Return ticks at round times and the title of the axis."""
    step_s, right = round_step(longest_s / scene.frame.num_ticks(6)), scene.frame.width - _RIGHT_MARGIN
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{right:.0f}" y1="{top:.1f}" y2="{top:.1f}"/>']
    ticks = int(longest_s / step_s + 1e-9)
    for i in range(ticks + 1):
        x = _LEFT + i * step_s * scene.per_second
        text = "0" if i == 0 else f"{i * step_s:.6g} s" if step_s >= 0.1 else f"{i * step_s * 1e3:.6g} ms"
        anchor = "start" if i == 0 else "middle" if x < scene.frame.width - 40 else "end"
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{top + 5:.1f}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{top + 19:.1f}" text-anchor="{anchor}">{text}</text>')
    parts.append(title_below("time since the start of the iteration", _LEFT, right, top + 19))
    return "".join(parts)


def instruction_of(span: ObservedSpan) -> Instruction:
    return Instruction(span.pp_rank, span.kind, span.microbatch_index, span.chunk_index)


def observed_critical_path(spans: Sequence[ObservedSpan], schedule_name: str = "") -> tuple[Instruction, ...]:
    """Return the critical path, first to last; empty if the spans are not a complete pipeline.

    The path starts at the span that ended last. Each step goes back to the predecessor that ended last, for which the
    later instruction had to wait. This needs no tolerance for measured times. The schedule name determines the stages
    of a rank's chunks, and which activations are sent late.
    """
    if not spans:
        return ()
    by_rank: dict[int, list[ObservedSpan]] = {}
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        by_rank.setdefault(span.pp_rank, []).append(span)
    if sorted(by_rank) != list(range(len(by_rank))):
        return ()
    schedule = Schedule(
        name=schedule_name,
        num_microbatches=1 + max(span.microbatch_index for span in spans),
        orders=tuple(tuple(instruction_of(span) for span in by_rank[rank]) for rank in sorted(by_rank)),
        num_chunks=1 + max(instruction_of(span).forward_chunk_index for span in spans),
        stage_of_chunk=stage_of_chunk(schedule_name, len(by_rank)),
    )
    try:
        graph = dependency_graph(with_communication(schedule))
    except ScheduleError:
        return ()
    end_s = {instruction_of(span): span.end_s for span in spans}
    node = max(range(len(graph.instructions)), key=lambda v: end_s[graph.instructions[v]])
    path = [node]
    while graph.predecessors[node]:
        node = max((u for u, _ in graph.predecessors[node]), key=lambda u: end_s[graph.instructions[u]])
        path.append(node)
    return tuple(graph.instructions[v] for v in reversed(path))
