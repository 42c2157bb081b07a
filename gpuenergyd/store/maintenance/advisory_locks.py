"""One at a time where many hosts share a history: who makes its tables, and who forgets what is old.

A PostgreSQL advisory lock, let go with the transaction that is open; an SQLite file has one writer anyway.
"""

from sqlalchemy import Connection, text

_TABLES, _TIDYING = 0x6745_6E01, 0x6745_6E02
"""What the locks are called: any numbers that nobody else in the database takes."""


def await_turn(connection: Connection) -> None:
    """Wait until no other host looks at the tables or makes them."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _TABLES})


def takes_turn(connection: Connection) -> bool:
    """Return whether no other host forgets what is old right now; who comes too late leaves it to that one."""
    if connection.dialect.name != "postgresql":
        return True
    return bool(connection.execute(text("SELECT pg_try_advisory_xact_lock(:lock)"), {"lock": _TIDYING}).scalar())
