"""A history on SQLite, and one on PostgreSQL."""

from tests.store.conftest import place, postgresql

__all__ = ["place", "postgresql"]
