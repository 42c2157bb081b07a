"""Trainings as a table in a terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuenergyd.report.formatting import MISSING, cost_text, energy_text, grams_text, time_text
from gpuenergyd.report.terminal.tables import SIMULATED_NOTE, full_width
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
_ONLY_WHERE_KNOWN = frozenset({"estimated_j", "missing_s", "saved_energy_j", "carbon_g", "cost"})


def trainings_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return one row per training and one of idle energy; a saving has its 95 % interval below it."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("training", no_wrap=True)
    shown = [column for column in _AMOUNTS if column[1] not in _ONLY_WHERE_KNOWN or any(r.get(column[1]) for r in rows)]
    for title in (*(title for title, _ in _COUNTS), *(title for title, _, _ in shown)):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        counts = (MISSING if row.get(name) is None else str(row[name]) for _, name in _COUNTS)
        amounts = (text(row.get(name)) for _, name, text in shown)
        table.add_row(Text(row["group"]), *counts, *amounts)
        low_j, high_j = row.get("saved_energy_low_j"), row.get("saved_energy_high_j")
        if low_j is not None and high_j is not None:
            intervals = (
                f"{energy_text(low_j)} to {energy_text(high_j)}" if name == "saved_energy_j" else ""
                for _, name, _ in shown
            )
            table.add_row("", *("" for _ in _COUNTS), *intervals, style="dim")
    table.width = full_width(table)
    notes = []
    if left_out := not_counted_text(sum(row.get("num_not_significant") or 0 for row in rows)):
        notes.append(f"saved: {left_out}")
    if any(row.get("is_simulated") for row in rows):
        notes.append(SIMULATED_NOTE)
    return Group(table, *(Text(note) for note in notes))
