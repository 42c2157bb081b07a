"""Progress of the demo: a live view on a terminal, else lines at most five seconds apart."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gpuenergyd.core.job.result_text import saving_with_interval, slowdown_text
from gpuenergyd.report.formatting import energy_text, time_text
from gpuenergyd.report.terminal.live import status_view
from gpuenergyd.report.terminal.status_lines import Status

MAX_SILENCE_S = 5.0
"""Longest time without output."""
TICK_S = 0.25
_REPEAT_AFTER_S = 3.5
"""Time without output after which the heartbeat prints a line, with a margin for delays on a busy host."""
_LEAST_PERIOD_S = 2.0
"""Least time between two lines of the same phase."""


class LiveProgress:
    """Live view of the daemon's status, removed at the end."""

    def __init__(self, console: Console, *, baseline_iterations: int, tuned_iterations: int) -> None:
        self._wanted = (baseline_iterations, tuned_iterations)
        self._text, self._since_s = "", time.monotonic()
        self._status: Status | None = None
        # Rich draws the view at once and then twice a second in its own thread, so that the elapsed time advances.
        self._live = Live(console=console, transient=True, refresh_per_second=2, get_renderable=self._view)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the view while something else is printed."""
        self._live.stop()
        yield
        self._live.start()

    def announce(self, text: str) -> None:
        if text != self._text:
            self._text, self._since_s, self._status = text, time.monotonic(), None
            self._live.refresh()

    def show(self, status: Status) -> None:
        """Show the daemon's status below a line with the phases of the job."""
        self._status = status
        self._live.refresh()

    def _view(self) -> RenderableType:
        step = Text(f"{self._text} ({time.monotonic() - self._since_s:.0f} s)", style="bold")
        if self._status is None:
            return step
        steps = Text()
        for name, done, wanted, is_now in _steps(self._status, *self._wanted):
            steps.append(f"{'>' if is_now else ' '} {name} ", style="bold" if is_now else "dim")
            steps.append(f"{done}/{wanted}   " if wanted else f"{done}   ", style="" if is_now else "dim")
        return Group(step, steps, status_view(self._status, self._live.console.width))


class LineProgress:
    """Prints a line when the phase changes, every two seconds while iterations run, and after a silence."""

    def __init__(
        self,
        print_line: Callable[[str], None],
        *,
        baseline_iterations: int,
        tuned_iterations: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._print = print_line
        self._wanted = (baseline_iterations, tuned_iterations)
        self._now = now
        self._lock = threading.Lock()
        self._phase = self._line = self._printed = ""
        self._line_since_s = self._printed_at_s = now()
        self._stop = threading.Event()
        self._heartbeat = threading.Thread(target=self._run_heartbeat, name="demo progress", daemon=True)

    def __enter__(self) -> Self:
        self._heartbeat.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._heartbeat.join()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Print nothing while something else is printed."""
        with self._lock:
            yield

    def announce(self, text: str) -> None:
        self._update(text, text)

    def show(self, status: Status) -> None:
        """Print the job's phase and figures if there is something new."""
        for name, done, wanted, is_now in _steps(status, *self._wanted):
            if is_now:
                of = f" of {wanted}" if wanted else ""
                noun = "iteration" if (wanted or done) == 1 else "iterations"
                self._update(name, f"{name}: {done}{of} {noun}{_figures(status['jobs'][0])}")

    def tick(self) -> None:
        """Print a line after a silence: the news, or how long the current step has taken."""
        with self._lock:
            now_s = self._now()
            if not self._line or now_s - self._printed_at_s < _REPEAT_AFTER_S:
                return
            if self._line != self._printed:
                self._emit(self._line, now_s)
            else:
                self._emit(f"{self._line} ({now_s - self._line_since_s:.0f} s)", now_s)

    def _update(self, phase: str, line: str) -> None:
        with self._lock:
            now_s = self._now()
            is_new_phase, self._phase = phase != self._phase, phase
            if line != self._line:
                self._line, self._line_since_s = line, now_s
            if is_new_phase or (line != self._printed and now_s - self._printed_at_s >= _LEAST_PERIOD_S):
                self._emit(line, now_s)

    def _emit(self, text: str, now_s: float) -> None:
        self._printed, self._printed_at_s = self._line, now_s
        self._print(text)

    def _run_heartbeat(self) -> None:
        with contextlib.suppress(OSError):  # the reader of the output has exited; the main thread finds out, too
            while not self._stop.wait(TICK_S):
                self.tick()


ShownProgress = LiveProgress | LineProgress


def _steps(status: Status, baseline: int, tuned: int) -> list[tuple[str, int, int | None, bool]]:
    """Return, for each phase, its name, iterations done, iterations requested, and whether it is running."""
    if not status["jobs"]:
        return []
    job = status["jobs"][0]
    phase = job["phase"]
    counts = {name: job[f"num_{name}_iterations"] or 0 for name in ("baseline", "trial", "tuned")}
    is_at_full_speed = phase in {"joining", "warmup", "baseline"}
    is_planning = is_at_full_speed and counts["baseline"] >= baseline
    steps: list[tuple[str, int, int | None, bool]] = [
        ("baseline", min(counts["baseline"], baseline), baseline, is_at_full_speed and not is_planning),
        ("trials", counts["trial"], None, phase == "trial"),
        ("tuned", min(counts["tuned"], tuned), tuned, phase == "tuned"),
    ]
    if (target := job.get("target")) and target["num_iterations_left"] is not None:  # follows a grid
        steps[2] = ("tuned", counts["tuned"], counts["tuned"] + target["num_iterations_left"], phase == "tuned")
    if is_planning:
        waited = counts["baseline"] - baseline
        steps.insert(1, (f"planning ({job['policy']})", waited, None, True))
    if phase == "tuned" and job["plan_purpose"] == "tuned" and not job.get("target"):
        # The demo ends after enough iterations of one plan, not counting its first. Each plan improves the next one.
        steps[2] = (f"tuned ({job['plan_id']})", min(max(0, job["num_iterations_of_plan"] - 1), tuned), tuned, True)
    if phase == "fallback":
        steps.append(("full speed again", max(0, counts["baseline"] - baseline), None, True))
    return steps


def _figures(job: Mapping[str, Any]) -> str:
    """Return the end of a line: the job's figures known by now, or why it is back at full speed."""
    if job["phase"] == "fallback":
        return f"; {job['phase_reason']}"
    if job["saving_ratio"] is not None and job["saving_interval"] is not None:
        saving = saving_with_interval(
            job["saving_ratio"], job["saving_interval"], is_significant=job["is_saving_significant"]
        )
        return f": {saving}, {slowdown_text(job['slowdown_ratio'])} so far"
    if job["baseline_time_s"] is not None:
        return f", full speed: {time_text(job['baseline_time_s'])} and {energy_text(job['baseline_energy_j'])}"
    return ""
