"""Trainings as tables in a terminal; for a single training also its parts, by replica, stage and host."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuenergyd.report.formatting import MISSING, cost_text, energy_text, grams_text, pricing_text, time_text
from gpuenergyd.report.terminal.tables import SIMULATED_NOTE, column_title, full_width
from gpuenergyd.report.totals import not_counted_text

_COUNTS = (("hosts", "num_hosts"), ("replicas", "num_replicas"), ("stages", "num_stages"), ("GPUs", "num_gpus"))
_AMOUNTS: Sequence[tuple[str, str, Callable[[float | None], str]]] = (
    ("energy", "energy_j", energy_text),
    ("estimated", "estimated_j", energy_text),
    ("missing", "missing_s", time_text),
    ("saved", "saved_energy_j", energy_text),
    ("emissions", "carbon_g", grams_text),
    ("cost", "cost", cost_text),
)
_PARTS = (("replica", "by_replica", "dp_rank"), ("stage", "by_stage", "pp_rank"), ("host", "by_host", "host"))
_ONLY_WHERE_KNOWN = frozenset({"estimated_j", "missing_s", "saved_energy_j", "carbon_g", "cost"})


def trainings_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return one row per training and one for idle energy, followed by tables of their parts, if given.

    A saving has its 95 % interval below it.
    """
    cost = column_title("cost", rows)
    tables = [_table("training", "group", rows, _COUNTS, cost)]
    for row in rows:
        tables += [
            _table(title, name, row[parts], _COUNTS[-1:], cost) for title, parts, name in _PARTS if row.get(parts)
        ]
    notes = []
    if left_out := not_counted_text(sum(row.get("num_not_significant") or 0 for row in rows)):
        notes.append(f"saved: {left_out}")
    if pricing := pricing_text(rows):
        notes.append(pricing)
    if any(row.get("is_simulated") for row in rows):
        notes.append(SIMULATED_NOTE)
    return Group(*tables, *(Text(note) for note in notes))


def _table(
    title: str, key: str, rows: Sequence[Mapping[str, Any]], counted: Sequence[tuple[str, str]], cost: str
) -> RenderableType:
    """Return one row per mapping, named by its value `key`, with these counts and the known amounts."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(title, no_wrap=True)
    shown = [column for column in _AMOUNTS if column[1] not in _ONLY_WHERE_KNOWN or any(r.get(column[1]) for r in rows)]
    for name in (*(name for name, _ in counted), *(cost if name == "cost" else name for name, _, _ in shown)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = (MISSING if row.get(name) is None else str(row[name]) for _, name in counted)
        amounts = (text(row.get(name)) for _, name, text in shown)
        table.add_row(Text(MISSING if row[key] is None else str(row[key])), *counts, *amounts)
        low_j, high_j = row.get("saved_energy_low_j"), row.get("saved_energy_high_j")
        if low_j is not None and high_j is not None:
            intervals = (
                f"{energy_text(low_j)} to {energy_text(high_j)}" if name == "saved_energy_j" else ""
                for _, name, _ in shown
            )
            table.add_row("", *("" for _ in counted), *intervals, style="dim")
    table.width = full_width(table)
    return table
