"""Database access for queries: SQLite without SQLAlchemy, other databases through it."""
