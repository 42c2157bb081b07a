"""Database access for queries: SQLite without SQLAlchemy, other databases through it.

reader      the interface, `SELECT` statements and value conversion
sqlalchemy  databases that SQLAlchemy supports
sqlite      SQLite files, with the standard library only
"""
