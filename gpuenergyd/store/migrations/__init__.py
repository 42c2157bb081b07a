"""Alembic's environment and the revisions of the history's schema."""
