"""Timelines in a terminal: the same scale for all iterations, clocks as colours or as characters."""

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.report.observed_iteration import ObservedIteration
from gpuenergyd_sim.demo.timelines import timelines_text
from tests.support.sample_history import MAX_CLOCK_MHZ, SLOW_CLOCK_MHZ, spans

BEFORE = ObservedIteration("before: full speed, iteration 7", 0.4, spans(is_tuned=False))
AFTER = ObservedIteration("after: bubble-aware, iteration 30", 0.4, spans(is_tuned=True))


def rows(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("stage ")]


def test_both_iterations_have_a_row_per_stage_on_the_same_scale() -> None:
    shown = timelines_text([BEFORE, AFTER], width=80, is_coloured=True)

    lines = [line.plain for line in shown]
    assert [line for line in lines if not line.startswith("stage ")] == [
        "before: full speed, iteration 7: 400.0 ms",
        "after: bubble-aware, iteration 30: 400.0 ms",
        "SM clock: 1050 MHz                    1410 MHz; blank: waiting",
    ]
    assert [line[:8] for line in rows(lines)] == [f"stage {rank} " for rank in range(4)] * 2
    assert {len(line) for line in rows(lines)} == {80}
    assert "B0" in rows(lines)[0]


def test_without_colours_clocks_are_characters() -> None:
    shown = [line.plain for line in timelines_text([BEFORE, AFTER], width=80, is_coloured=False)]

    before, after = rows(shown)[:4], rows(shown)[4:]
    assert {character for row in before for character in row[8:]} == {"#", " "}
    assert all("." in row[8:] and "#" not in row[8:] for row in after[:3])
    assert "#" in after[3]
    assert "." not in after[3]
    assert shown[-1] == f"SM clock: .:-=+*# is {SLOW_CLOCK_MHZ} MHz to {MAX_CLOCK_MHZ} MHz; blank: waiting"
    assert max(map(len, shown)) <= 80


def test_a_gpu_that_waits_leaves_its_row_blank() -> None:
    span = ObservedSpan(0, InstructionKind.F, 0, 0, 0.5, 1.0, 1410)

    _, row, _ = timelines_text([ObservedIteration("one", 1.0, (span,))], width=28, is_coloured=False)

    assert row.plain == "stage 0 " + " " * 10 + "#" * 10


def test_iterations_without_a_timeline_are_left_out() -> None:
    assert timelines_text([ObservedIteration("empty", 1.0, ())], width=80, is_coloured=True) == []
