"""Hours and energy of GPUs by state, as a group of reports: `gpuenergyd report --group-by state`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from gpuenergyd.report.plugin_groups import Column, GroupTable
from gpuenergyd_idle.rules.use import USE_TEXTS, GpuUse
from gpuenergyd_idle.store import StoredUse, stored_use

_J_PER_KWH = 3.6e6


def by_state(database: str, *, since: datetime | None, until: datetime | None) -> GroupTable:
    """Return the sums of all hours from that of `since` on, and before `until`.

    Raises:
        StoreError: the database cannot be read.
    """
    found = stored_use(database, since, until)
    columns = (
        Column("host", "host"),
        Column("GPU", "gpu_uuid"),
        Column("state", "state", lambda use: USE_TEXTS[use]),
        Column("hours", "time_s", _hours, is_number=True),
        Column("kWh", "energy_j", lambda energy_j: f"{energy_j / _J_PER_KWH:.2f}", is_number=True),
        Column("hours lowered", "lowered_s", _hours, is_number=True),
    )
    return GroupTable("GPUs by state", columns, tuple(_row(used) for used in found), tuple(_summary(found)))


def _row(own: StoredUse) -> dict[str, Any]:
    """Return all values by their names in JSON and CSV."""
    row: dict[str, Any] = {}
    for name, value in asdict(own).items():
        row |= value if name == "total" else {"state" if name == "use" else name: value}
    return row


def _hours(time_s: float) -> str:
    return f"{time_s / 3600:.1f}" if time_s else "-"


def _summary(found: Sequence[StoredUse]) -> Iterator[str]:
    total_s = sum(row.total.time_s for row in found)
    if not total_s:
        return
    waiting = [row for row in found if row.use is GpuUse.IDLE_CONTEXT]
    ratio = sum(row.total.time_s for row in waiting) / total_s

    def kwh(energy_of: Callable[[StoredUse], float]) -> float:
        return sum(energy_of(row) for row in waiting) / _J_PER_KWH

    basis = "; ".join(sorted({row.saving_basis for row in waiting if row.saving_basis}))
    yield f"{100 * ratio:.0f} % of GPU hours idle with a context, {kwh(lambda row: row.total.energy_j):.2f} kWh"
    if saved_kwh := kwh(lambda row: row.saved_j):
        yield f"lower clocks have saved about {saved_kwh:.2f} kWh; basis: {basis}"
    if could_kwh := kwh(lambda row: row.could_save_j):
        low_kwh, high_kwh = kwh(lambda row: row.could_save_low_j), kwh(lambda row: row.could_save_high_j)
        yield f"about {could_kwh:.2f} kWh ({low_kwh:.2f} to {high_kwh:.2f}) could have been saved; basis: {basis}"
