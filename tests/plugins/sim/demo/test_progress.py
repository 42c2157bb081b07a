"""The demo's progress lines: something new whenever there is something, and never five seconds of silence."""

import io
import threading
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.report.timelines import ObservedIteration
from gpuenergyd_sim.demo.progress import MAX_SILENCE_S, TICK_S, LineProgress, LiveProgress
from gpuenergyd_sim.demo.timelines import timelines_text
from tests.support.sample_history import MAX_CLOCK_MHZ, SLOW_CLOCK_MHZ, spans

BEFORE = ObservedIteration("before: full speed, iteration 7", 0.4, spans(is_tuned=False))
AFTER = ObservedIteration("after: bubble-aware, iteration 30", 0.4, spans(is_tuned=True))


class VirtualClock:
    """A clock that moves only when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Recorder:
    """Progress lines with the virtual times at which they were printed."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.lines: list[tuple[float, str]] = []
        self.has_two_lines = threading.Event()
        self.progress = LineProgress(self._record, baseline_iterations=10, tuned_iterations=12, now=self.clock)

    def pass_time(self, duration_s: float) -> None:
        """Let time pass as the heartbeat does: one tick after the other."""
        for _ in range(round(duration_s / TICK_S)):
            self.clock.now_s += TICK_S
            self.progress.tick()

    def longest_silence_s(self) -> float:
        """Return the longest time between two lines, and since the last one."""
        times = [at for at, _ in self.lines] + [self.clock.now_s]
        return max(after - before for before, after in pairwise(times))

    def texts(self) -> list[str]:
        return [text for _, text in self.lines]

    def _record(self, text: str) -> None:
        self.lines.append((self.clock.now_s, text))
        if len(self.lines) == 2:
            self.has_two_lines.set()


def status(phase: str, **figures: Any) -> dict[str, Any]:
    job = {
        "phase": phase,
        "phase_reason": "all ranks joined",
        "policy": "bubble-aware",
        "num_baseline_iterations": 0,
        "num_trial_iterations": 0,
        "num_tuned_iterations": 0,
        "num_iterations_of_plan": 0,
        "plan_purpose": "baseline",
        "saving_ratio": None,
        "saving_interval": None,
        "slowdown_ratio": None,
        "baseline_time_s": None,
        "baseline_energy_j": None,
        "target": None,
    }
    return {"jobs": [job | figures]}


@pytest.mark.parametrize("duration_s", [4.0, 11.0, 120.0])
def test_a_step_of_any_duration_is_never_silent_for_five_seconds(duration_s: float) -> None:
    recorder = Recorder()

    recorder.progress.announce("importing torch")
    recorder.pass_time(duration_s)

    assert recorder.longest_silence_s() < MAX_SILENCE_S - 1.0  # a late thread has a second left
    assert len(set(recorder.texts())) == len(recorder.texts())
    assert recorder.texts()[:2] == ["importing torch", "importing torch (4 s)"]


def test_a_run_with_slow_iterations_and_a_daemon_that_answers_late_is_never_silent_for_five_seconds() -> None:
    recorder = Recorder()

    recorder.progress.announce("starting a private daemon")
    recorder.pass_time(7.0)
    for k in range(12):
        recorder.progress.show(status("baseline", num_baseline_iterations=k))
        recorder.pass_time(1.7)
    for k in range(5):
        recorder.progress.show(status("trial", num_baseline_iterations=12, num_trial_iterations=k))
        recorder.pass_time(6.0)
    recorder.progress.announce("writing the report")
    recorder.pass_time(9.0)

    assert recorder.longest_silence_s() < MAX_SILENCE_S - 1.0
    assert len(set(recorder.texts())) == len(recorder.texts())


def test_each_phase_names_its_iterations_and_the_saving_so_far() -> None:
    recorder = Recorder()
    measured = {"baseline_time_s": 1.75, "baseline_energy_j": 5000.0}
    plan = {"plan_id": "tuned-7", "plan_purpose": "tuned", "num_iterations_of_plan": 6, "num_tuned_iterations": 20}
    saved = {
        "saving_ratio": 0.123, "saving_interval": [0.118, 0.129], "slowdown_ratio": 0.001, "is_saving_significant": True
    }  # fmt: skip

    for view in (
        status("warmup"),
        status("baseline", num_baseline_iterations=3, **measured),
        status("baseline", num_baseline_iterations=11, **measured),
        status("trial", num_baseline_iterations=11, num_trial_iterations=4, **measured),
        status("tuned", num_baseline_iterations=11, num_trial_iterations=9, **plan, **measured, **saved),
        status("fallback", num_baseline_iterations=12, phase_reason="the plan is too slow", **measured),
    ):
        recorder.progress.show(view)
        recorder.clock.now_s += 3.0

    assert recorder.texts() == [
        "baseline: 0 of 10 iterations",
        "baseline: 3 of 10 iterations, full speed: 1.750 s and 5000.0 J",
        "planning (bubble-aware): 1 iteration, full speed: 1.750 s and 5000.0 J",
        "trials: 4 iterations, full speed: 1.750 s and 5000.0 J",
        "tuned (tuned-7): 5 of 12 iterations: 12.3 % less energy (95 %: 11.8 % to 12.9 % less), 0.1 % slower so far",
        "full speed again: 2 iterations; the plan is too slow",
    ]


def test_the_heartbeat_prints_by_itself_and_ends_with_the_block() -> None:
    recorder = Recorder()

    with recorder.progress as progress:
        progress.announce("importing torch")
        recorder.clock.now_s += MAX_SILENCE_S
        assert recorder.has_two_lines.wait(60)  # the thread ticks in real time

    assert recorder.texts()[1] == "importing torch (5 s)"


def test_a_terminal_shows_the_step_with_its_duration_and_nothing_is_left_at_the_end() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)

    with LiveProgress(console, baseline_iterations=10, tuned_iterations=12) as progress:
        progress.announce("importing torch")
        shown = output.getvalue()

    assert "importing torch (0 s)" in shown
    assert output.getvalue().endswith("\x1b[2K")  # the line is erased


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
