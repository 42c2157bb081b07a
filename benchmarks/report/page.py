"""Renders docs/reference/benchmarks.md from the prose in sections/ and the figures in results/."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.report.results import RESULTS, Result, read_result
from benchmarks.report.runs import RUNS, Run

SECTIONS = Path(__file__).with_name("sections")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "benchmarks.md"
Figure = float | bool
"""A measured value, or its bound."""


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
        states=names_by_state(results_by_name),
        stamp=lambda name: stamp(results_by_name[name]),
        tables=lambda name, *headings: tables(results_by_name[name].figures, headings),
        bounded=bounded,
        goal=goal,
    )
    sections = [environment.get_template(path.name).render().strip() for path in sorted(SECTIONS.glob("*.md.j2"))]
    return "\n\n".join(sections) + "\n"


def names_by_state(results: Mapping[str, Result]) -> Mapping[str, Sequence[str]]:
    """Return the names of the benchmarks by the state of their last run, those with missed targets first."""
    names: dict[str, list[str]] = {"target missed": [], "last attempt failed": [], "target met": [], "no target": []}
    for run in RUNS:
        name = run.name if run.is_usual else f"{run.name}*"
        names.setdefault(_state(run, results[run.name]), []).append(name)
    return {state: chosen for state, chosen in names.items() if chosen}


def _state(run: Run, result: Result) -> str:
    if result.failed is not None:
        return "last attempt failed"
    if result.circumstances is None:
        return "not measured yet"
    if not result.is_met:
        return "target missed"
    return "target met" if run.has_target else "no target"


def stamp(result: Result) -> str:
    """Return a paragraph on when, where and how the figures were measured, and whether the last attempt failed."""
    sentences = []
    if (given := result.circumstances) is not None:
        package = f", gpuenergyd {given.versions['gpuenergyd']}" if "gpuenergyd" in given.versions else ""
        sentences.append(
            f"{given.measured_at}, {given.architecture}, {given.num_cores} cores, load {given.load_before}"
            f" before{package}: `{given.command}`."
        )
        if not result.is_met:
            sentences.append("**A target was missed.**")
    if result.failed is not None:
        shown = "the figures are from the run before" if given else "there are no figures yet"
        sentences.append(f"The attempt at {result.failed.at} failed ({_quoted(result.failed.reason)}); {shown}.")
    elif given is None:
        sentences.append(f"Not measured yet: run `make bench ONLY={result.name}`.")
    return " ".join(sentences)


def goal(
    what: str,
    value: Figure | None,
    *,
    most: float | None = None,
    least: Figure | None = None,
    digits: int = 2,
    scale: float = 100.0,
    unit: str = " %",
) -> str:
    """Return a row of a table of targets: what was measured, the value, and its target."""
    shown = bounded(value, most=most, least=least, digits=digits, scale=scale, unit=unit)
    return f"| {what} | {shown} | {_target(most, least, scale, unit)} |"


def bounded(
    value: Figure | None,
    *,
    most: float | None = None,
    least: Figure | None = None,
    digits: int = 2,
    scale: float = 100.0,
    unit: str = " %",
) -> str:
    """Return a value as text, in bold if it misses its target; an absent value misses any target."""
    if value is None:
        return _bold_unless("none", most is None and least is None)
    is_met = (most is None or value <= most) and (least is None or value >= least)
    if isinstance(value, bool):
        return _bold_unless("yes" if value else "no", is_met)
    return _bold_unless(f"{scale * value:,.{digits}f}{unit}", is_met)


def _target(most: float | None, least: Figure | None, scale: float, unit: str) -> str:
    if isinstance(least, bool):
        return "yes" if least else "no"
    bounds = [f"{scale * bound:,.10g}" for bound in (least, most) if bound is not None]
    if least is not None and most is not None:
        return (bounds[0] if least == most else f"{bounds[0]} to {bounds[1]}") + unit
    if not bounds:
        return ""
    return f"{'at most' if least is None else 'at least'} {bounds[0]}{unit}"


def _bold_unless(text: object, is_met: bool) -> str:  # noqa: FBT001  a filter of the templates
    return str(text) if is_met else f"**{text}**"


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
    "bold_unless": _bold_unless,
}
