"""Hours of GPUs by use in the history database, one row per hour, GPU and use."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import BigInteger, Column, Float, MetaData, String, Table, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from gpuenergyd.errors import StoreError
from gpuenergyd.store.plugin_tables import open_plugin_tables
from gpuenergyd.store.reader import short_message
from gpuenergyd_idle.rules.saving import IdleSaving
from gpuenergyd_idle.rules.use import GpuUse
from gpuenergyd_idle.totals import UseTotal

_BUSY_TIMEOUT_S = 5.0
_HOUR_US = 3_600_000_000
_METADATA = MetaData()
_USE = Table(
    "gpu_use_hours",
    _METADATA,
    Column("host", String(256), primary_key=True),
    Column("gpu_uuid", String(96), primary_key=True),
    Column("hour_us", BigInteger, primary_key=True, autoincrement=False),
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
                    key = {"host": row.host, "gpu_uuid": row.gpu_uuid, "gpu_use": row.use, "hour_us": _hour_us(row.at)}
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


def stored_use(database: str | Path, since: datetime | None = None) -> tuple[StoredUse, ...]:
    """Return the sums by host, GPU and use of all hours that begin at `since` or later.

    Raises:
        StoreError: the database cannot be read.
    """
    columns = _USE.c
    keys = (columns.host, columns.gpu_uuid, columns.gpu_use)
    watts = (columns.saving_w, columns.saving_low_w, columns.saving_high_w)
    query = select(
        *keys,
        func.max(columns.model_name),
        *(func.sum(columns[name]) for name in _SUMS),
        func.sum(columns.lowered_s * columns.saving_w),
        *(func.sum(columns.could_lower_s * own) for own in watts),
        func.max(columns.saving_basis),
    ).group_by(*keys)
    if since is not None:
        query = query.where(columns.hour_us >= _hour_us(since))
    try:
        engine = open_plugin_tables(database, _METADATA, busy_timeout_s=_BUSY_TIMEOUT_S)
        try:
            with engine.connect() as connection:
                found = connection.execute(query.order_by(*keys)).all()
        finally:
            engine.dispose()
    except SQLAlchemyError as error:
        raise StoreError(short_message(error)) from None
    return tuple(
        StoredUse(
            host,
            uuid,
            model_name,
            GpuUse(use),
            UseTotal(*sums),
            saved_j or 0.0,
            mean_j or 0.0,
            low_j or 0.0,
            high_j or 0.0,
            basis,
        )
        for host, uuid, use, model_name, *sums, saved_j, mean_j, low_j, high_j, basis in map(tuple, found)
    )


def _hour_us(at: datetime) -> int:
    return int(at.astimezone(UTC).timestamp() * 1e6) // _HOUR_US * _HOUR_US


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
