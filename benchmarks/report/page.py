"""Renders docs/reference/benchmarks.md from the prose in sections/ and the figures in results/."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.report.results import RESULTS, Result, read_result
from benchmarks.report.runs import RUNS

SECTIONS = Path(__file__).with_name("sections")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "benchmarks.md"
SECTION_ORDER = (
    "introduction", "worlds", "planner", "orders", "power-cap", "power-budget", "grid-event", "swing", "reorder",
    "emulation", "profiling",
    "learning", "learning-ablation", "past-jobs", "cost", "advice", "client", "startup", "schedules",
    "restores", "sampling", "run-ahead",
    "captured", "slow-reads", "call-price", "latency-tails", "everything-unkind", "hanging-call", "carbon",
    "store", "fleet", "load", "two-hosts", "layouts", "plain-loops", "stragglers", "large-job", "demo",
    "no-harm", "real-programs", "device-model", "claims", "proofs", "replay-insitu", "real-gpus", "tests",
)  # fmt: skip


def rendered_page(results: Path = RESULTS) -> str:
    """Return the rendered page."""
    results_by_name = {run.name: read_result(run.name, results) for run in RUNS}
    environment = Environment(
        loader=FileSystemLoader(SECTIONS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
        autoescape=False,  # noqa: S701  Markdown
    )
    environment.filters.update(FILTERS)
    environment.globals.update(
        figures={name: result.figures for name, result in results_by_name.items()},
        runs=RUNS,
        kept=results_by_name,
        stamp=lambda name: stamp(results_by_name[name]),
        table=table,
        tables=lambda name, *headings: tables(results_by_name[name].figures, headings),
    )
    sections = [environment.get_template(f"{name}.md.j2").render().strip() for name in SECTION_ORDER]
    return "\n\n".join(sections) + "\n"


def stamp(result: Result) -> str:
    """Return a paragraph on when, where and how the figures were measured, and whether the last attempt failed."""
    sentences = []
    if (given := result.circumstances) is not None:
        versions = ", ".join(f"{name} {number}" for name, number in sorted(given.versions.items()))
        sentences.append(
            f"{given.measured_at}, {given.architecture}, {given.num_cores} cores, load {given.load_before} before"
            f" and {given.load_after} after, {given.duration_s:.0f} s; Python {given.python}, {versions}:"
            f" `{given.command}`."
        )
        if not result.is_met:
            sentences.append("**A target was missed.**")
    if result.failed is not None:
        shown = "the figures are from the run before" if given else "there are no figures yet"
        sentences.append(f"The attempt at {result.failed.at} failed ({_quoted(result.failed.reason)}); {shown}.")
    elif given is None:
        sentences.append(f"Not measured yet: run `make bench ONLY={result.name}`.")
    return " ".join(sentences)


def _quoted(text: str) -> str:
    return text.replace("|", "/").replace("`", "'")


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines).replace("| --- ", "|---")


def tables(figures: Mapping[str, Any], headings: Sequence[str]) -> str:
    """Return the tables that a benchmark printed under these headings, or all of them without headings."""
    chosen = [name for name in figures if not headings or any(name.startswith(h) for h in headings)]
    return "\n\n".join(
        (f"### {name}\n\n" if name else "") + table(figures[name]["columns"], figures[name]["rows"]) for name in chosen
    )


def _fixed(scale: float) -> Callable[..., str]:
    def text(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{scale * value:.{digits}f}"

    return text


def _signed(ratio: float | None, digits: int = 1) -> str:
    return "-" if ratio is None else f"{100 * ratio:+.{digits}f}"


def _count(number: int) -> str:
    return f"{number:,}"


FILTERS: Mapping[str, Callable[..., Any]] = {
    "percent": _fixed(100.0),
    "ms": _fixed(1e3),
    "fixed": _fixed(1.0),
    "signed": _signed,
    "median": median,
    "count": _count,
}
