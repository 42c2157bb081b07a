"""Hours of GPUs by use in the history database, one row per hour, GPU and use."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Column, Float, MetaData, String, Table, insert, update
from sqlalchemy.exc import SQLAlchemyError

from gpuenergyd.errors import StoreError
from gpuenergyd.store.database import reading_engine, reading_server
from gpuenergyd.store.plugin_tables import open_plugin_tables
from gpuenergyd.store.reader import short_message
from gpuenergyd.store.schema import UtcInstant
from gpuenergyd_idle.rules.saving import IdleSaving
from gpuenergyd_idle.rules.use import GpuUse
from gpuenergyd_idle.totals import UseTotal

_BUSY_TIMEOUT_S = 5.0
_METADATA = MetaData()
_USE = Table(
    "gpu_use_hours",
    _METADATA,
    Column("host", String(256), primary_key=True),
    Column("gpu_uuid", String(96), primary_key=True),
    Column("started_at", UtcInstant, primary_key=True),
    Column("gpu_use", String(16), primary_key=True),
    Column("model_name", String(128), nullable=False),
    Column("time_s", Float, nullable=False),
    Column("energy_j", Float, nullable=False),
    Column("lowered_s", Float, nullable=False),
    Column("could_lower_s", Float, nullable=False),
    Column("saving_w", Float),
    Column("saving_low_w", Float),
    Column("saving_high_w", Float),
    Column("saving_basis", String(128)),
)
_SUMS = ("time_s", "energy_j", "lowered_s", "could_lower_s")
_SAVED = (
    "coalesce(sum(lowered_s * saving_w), 0)",
    *(f"coalesce(sum(could_lower_s * {name}), 0)" for name in ("saving_w", "saving_low_w", "saving_high_w")),
    "max(saving_basis)",
)


@dataclass(frozen=True, slots=True)
class UseRow:
    """Time of one GPU in one use, to be added to that of its hour."""

    host: str
    gpu_uuid: str
    model_name: str
    at: datetime
    use: GpuUse
    total: UseTotal
    saving: IdleSaving | None


@dataclass(frozen=True, slots=True)
class StoredUse:
    """Time and energy of one GPU in one use, with what lower clocks have saved or could have."""

    host: str
    gpu_uuid: str
    model_name: str
    use: GpuUse
    total: UseTotal
    saved_j: float
    could_save_j: float
    could_save_low_j: float
    could_save_high_j: float
    saving_basis: str | None


def add_use(database: str, rows: Sequence[UseRow]) -> None:
    """Add times to those of their hours.

    Raises:
        StoreError: the database cannot be written.
    """
    try:
        engine = open_plugin_tables(database, _METADATA, busy_timeout_s=_BUSY_TIMEOUT_S)
        try:
            with engine.begin() as connection:
                for row in rows:
                    key = {"host": row.host, "gpu_uuid": row.gpu_uuid, "gpu_use": row.use, "started_at": _hour(row.at)}
                    added = {name: getattr(row.total, name) for name in _SUMS}
                    values = {"model_name": row.model_name[:128], **_saving(row)}
                    changed = update(_USE).where(*(_USE.c[name] == value for name, value in key.items()))
                    sums = {name: _USE.c[name] + value for name, value in added.items()}
                    if connection.execute(changed.values(**values, **sums)).rowcount == 0:
                        connection.execute(insert(_USE).values(**key, **values, **added))
        finally:
            engine.dispose()
    except SQLAlchemyError as error:
        raise StoreError(short_message(error)) from None


def stored_use(
    database: str | Path, since: datetime | None = None, until: datetime | None = None
) -> tuple[StoredUse, ...]:
    """Return the sums by host, GPU and use of all hours from that of `since` on, and begun before `until`.

    Raises:
        StoreError: the database cannot be read.
    """
    columns = ("host", "gpu_uuid", "gpu_use", "max(model_name)", *(f"sum({name})" for name in _SUMS), *_SAVED)
    with reading_server(reading_engine(database)) as reader:
        if _USE.name not in reader.tables():
            return ()
        where = {"started_at >= ?": since and _hour(since), "started_at < ?": until}
        keys = "host, gpu_uuid, gpu_use"
        found = reader.values(", ".join(columns), _USE.name, where, group_by=keys, order_by=keys)
    return tuple(
        StoredUse(host, uuid, model_name, GpuUse(use), UseTotal(*sums), saved_j, mean_j, low_j, high_j, basis)
        for host, uuid, use, model_name, *sums, saved_j, mean_j, low_j, high_j, basis in found
    )


def _hour(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def _saving(row: UseRow) -> dict[str, float | str]:
    """Return the newest estimate of what a lower clock saves, for the use in which it saves it."""
    if row.saving is None or row.use is not GpuUse.IDLE_CONTEXT:
        return {}
    own = row.saving
    return {
        "saving_w": own.mean_w,
        "saving_low_w": own.low_w,
        "saving_high_w": own.high_w,
        "saving_basis": own.basis[:128],
    }
