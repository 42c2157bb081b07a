"""Learning from plans beside other ways to find a plan, from the result of the benchmark `learning`."""

from collections.abc import Mapping
from typing import Any

from benchmarks.report.results import read_result
from docs.site.markdown import table

_METHODS = {
    "ours": "plans as experiments (`bubble-aware`)",
    "envpipe": "EnvPipe's procedure",
    "full_sweep": "a sweep of all clocks, as Perseus makes it",
}


def learning_rivals() -> str:
    """Return the table of all methods; a sentence before the benchmark has a result."""
    figures = read_result("learning").figures
    if figures is None:
        return "Not measured yet."
    return table(
        ("way to a plan", "iterations to it, p95", "regret by plan, mean, %", "slowdown p99, %", "iterations lost"),
        [_row(name, figures[method]) for method, name in _METHODS.items()],
    )


def _row(name: str, own: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    regrets = ", ".join(f"{100 * ratio:.2f}" for ratio in own["regret_mean_ratio_by_plan"])
    slowdown, lost = 100 * own["slowdown_p99_ratio"], own["time_lost_iterations"]
    return name, f"{own['iterations_to_plan_p95']}", regrets, f"{slowdown:.2f}", f"{lost:.2f}"
