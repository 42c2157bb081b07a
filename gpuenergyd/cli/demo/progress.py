"""Progress of the demo: a live view on a terminal, a line per change elsewhere."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gpuenergyd.report.formatting import energy_text, ratio_text, time_text
from gpuenergyd.report.terminal.live import Status, status_view


class LiveProgress:
    """Live view of the daemon's status, removed at the end."""

    def __init__(self, console: Console, *, baseline_iterations: int, tuned_iterations: int) -> None:
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._wanted = (baseline_iterations, tuned_iterations)
        self._text = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def announce(self, text: str) -> None:
        """Show the current step."""
        self._text = text
        self._live.update(Text(text, style="bold"), refresh=True)

    def show(self, status: Status) -> None:
        """Show the daemon's status below a line with the phases of the job."""
        steps = Text()
        for name, done, wanted, is_now in _steps(status, *self._wanted):
            steps.append(f"{'>' if is_now else ' '} {name} ", style="bold" if is_now else "dim")
            steps.append(f"{done}/{wanted}   " if wanted else f"{done}   ", style="" if is_now else "dim")
        self._live.update(Group(Text(self._text, style="bold"), steps, status_view(status)), refresh=True)


class LineProgress:
    """Prints a line when the phase changes and every ten iterations, for pipes and logs."""

    _EVERY_ITERATIONS = 10

    def __init__(self, print_line: Callable[[str], None], *, baseline_iterations: int, tuned_iterations: int) -> None:
        self._print = print_line
        self._wanted = (baseline_iterations, tuned_iterations)
        self._last: tuple[str, int] = ("", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def announce(self, text: str) -> None:
        """Print the current step."""
        self._print(text)

    def show(self, status: Status) -> None:
        """Print a line if the phase or the number of iterations has changed."""
        for name, done, wanted, is_now in _steps(status, *self._wanted):
            mark = (name, done // self._EVERY_ITERATIONS)
            if is_now and mark != self._last:
                self._last = mark
                of = f" of {wanted}" if wanted else ""
                self._print(f"{name}: {done}{of} iterations{_figures(status['jobs'][0])}")


Progress = LiveProgress | LineProgress


def _steps(status: Status, baseline: int, tuned: int) -> list[tuple[str, int, int | None, bool]]:
    """Return name, iterations done, iterations requested and whether it is running, for each phase."""
    if not status["jobs"]:
        return []
    job = status["jobs"][0]
    phase = job["phase"]
    counts = {name: job[f"num_{name}_iterations"] or 0 for name in ("baseline", "profile", "tuned")}
    steps = [
        ("baseline", min(counts["baseline"], baseline), baseline, phase in {"joining", "warmup", "baseline"}),
        ("profiling", counts["profile"], None, phase == "profiling"),
        ("planned", min(counts["tuned"], tuned), tuned, phase == "tuned"),
    ]
    if phase == "fallback":
        again = max(0, counts["baseline"] - baseline)
        steps.append((f"full speed again ({job['plan_reason']})", again, None, True))
    return steps


def _figures(job: Mapping[str, Any]) -> str:
    """Return the figures of a job known so far, as the end of a line."""
    if job["saving_ratio"] is not None:
        slower = f"{ratio_text(job['slowdown_ratio'])} time"
        return f", {energy_text(job['energy_j'])} per iteration: saves {ratio_text(job['saving_ratio'])} at {slower}"
    if job["baseline_time_s"] is not None:
        return f", full speed: {time_text(job['baseline_time_s'])} and {energy_text(job['baseline_energy_j'])}"
    return ""
