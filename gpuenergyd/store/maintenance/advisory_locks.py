"""PostgreSQL advisory locks between hosts that share a history; an SQLite file has a single writer anyway.

Each lock is released at the end of the open transaction.
"""

from sqlalchemy import Connection, text

_SCHEMA_LOCK, _CLEANUP_LOCK = 0x6745_6E01, 0x6745_6E02
"""Arbitrary keys, chosen to be unused by other applications of the database."""


def lock_schema(connection: Connection) -> None:
    """Wait until no other host checks or creates the tables."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _SCHEMA_LOCK})


def try_lock_cleanup(connection: Connection) -> bool:
    """Return whether this host may delete expired rows; False while another host deletes."""
    if connection.dialect.name != "postgresql":
        return True
    locked = connection.execute(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": _CLEANUP_LOCK}).scalar()
    return bool(locked)
