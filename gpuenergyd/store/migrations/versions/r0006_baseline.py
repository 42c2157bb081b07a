"""The schema of version 0.1.0, the oldest that can be upgraded.

Empty databases never run revisions: `store.database.create_tables` creates the tables of `store.schema`.
"""

revision = "0006"
down_revision = None


def upgrade() -> None:
    """Change nothing: a database at this revision has the tables of 0.1.0."""
