"""Pipeline timelines in a terminal, on one time scale: one row per stage, clocks as colours or as characters."""

from bisect import bisect_right
from collections.abc import Sequence

from rich.text import Text

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.report.formatting import clock_text, time_text
from gpuenergyd.report.timelines import ClockScale, ObservedIteration, clock_scale

_RAMP = ".:-=+*#"
"""Characters for SM clocks from the lowest to the highest in the picture, for output without colours."""
_UNKNOWN = "?"
_UNKNOWN_COLOUR = "#888888"
_LEAST_COLUMNS = 20


def timelines_text(iterations: Sequence[ObservedIteration], *, width: int, is_coloured: bool) -> list[Text]:
    """Return the iterations below each other, in lines of at most `width` characters; empty without a timeline."""
    drawn = [iteration for iteration in iterations if iteration.spans]
    if not drawn:
        return []
    scale = clock_scale(drawn)
    longest_s = max(max(it.iteration_time_s, *(span.end_s for span in it.spans)) for it in drawn)
    lines = []
    for iteration in drawn:
        lines.append(Text(f"{iteration.title}: {time_text(iteration.iteration_time_s)}", style="bold"))
        for rank in sorted({span.pp_rank for span in iteration.spans}):
            label = f"stage {rank} "
            row = [span for span in iteration.spans if span.pp_rank == rank]
            cells = _cells(row, longest_s, max(_LEAST_COLUMNS, width - len(label)))
            lines.append(Text.assemble(label, _coloured(cells, scale) if is_coloured else _plain(cells, scale)))
    return [*lines, _legend(scale, is_coloured=is_coloured)]


def _cells(row: Sequence[ObservedSpan], longest_s: float, num_columns: int) -> list[ObservedSpan | None]:
    """Return, for each column of a stage's row, the instruction at the column's middle; None while the GPU waits."""
    ordered = sorted(row, key=lambda span: span.start_s)
    starts = [span.start_s for span in ordered]
    cells: list[ObservedSpan | None] = []
    for column in range(num_columns):
        at_s = (column + 0.5) / num_columns * longest_s
        index = bisect_right(starts, at_s) - 1
        cells.append(ordered[index] if index >= 0 and at_s < ordered[index].end_s else None)
    return cells


def _coloured(cells: Sequence[ObservedSpan | None], scale: ClockScale | None) -> Text:
    """Return a row with clocks as background colours, and the names of instructions that are wide enough."""
    text = Text()
    begin = 0
    while begin < len(cells):
        span, end = cells[begin], begin
        while end < len(cells) and cells[end] is span:
            end += 1
        if span is None:
            text.append(" " * (end - begin))
        else:
            name = f"{span.kind}{span.microbatch_index}"
            text.append((name if len(name) < end - begin else "").ljust(end - begin), style=_style(span, scale))
        begin = end
    return text


def _style(span: ObservedSpan, scale: ClockScale | None) -> str:
    if scale is None or span.mean_sm_clock_mhz is None:
        return f"black on {_UNKNOWN_COLOUR}"
    letters = "black" if scale.text_class(span.mean_sm_clock_mhz) == "on-bright" else "white"
    return f"{letters} on {scale.fill(span.mean_sm_clock_mhz)}"


def _plain(cells: Sequence[ObservedSpan | None], scale: ClockScale | None) -> Text:
    return Text("".join(" " if span is None else _character(span.mean_sm_clock_mhz, scale) for span in cells).rstrip())


def _character(sm_clock_mhz: float | None, scale: ClockScale | None) -> str:
    if scale is None or sm_clock_mhz is None:
        return _UNKNOWN
    range_mhz = scale.max_sm_clock_mhz - scale.min_sm_clock_mhz
    place = (sm_clock_mhz - scale.min_sm_clock_mhz) / range_mhz if range_mhz > 0 else 1.0
    return _RAMP[round(place * (len(_RAMP) - 1))]


def _legend(scale: ClockScale | None, *, is_coloured: bool) -> Text:
    if scale is None:
        return Text("SM clocks are not known; blank: waiting")
    lowest, highest = clock_text(scale.min_sm_clock_mhz), clock_text(scale.max_sm_clock_mhz)
    if not is_coloured:
        return Text(f"SM clock: {_RAMP} is {lowest} to {highest}; blank: waiting")
    range_mhz = scale.max_sm_clock_mhz - scale.min_sm_clock_mhz
    swatches = [("  ", f"on {scale.fill(scale.min_sm_clock_mhz + k / 8 * range_mhz)}") for k in range(9)]
    return Text.assemble("SM clock: ", f"{lowest} ", *swatches, f" {highest}; blank: waiting")
