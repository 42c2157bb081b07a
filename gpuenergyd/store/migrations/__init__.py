"""Alembic environment and schema revisions of the history."""
