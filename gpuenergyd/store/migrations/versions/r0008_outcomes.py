"""Add the outcome of a job and its reason; they are unknown for jobs that ended before."""

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add two columns; no row is copied."""
    op.execute("ALTER TABLE jobs ADD COLUMN outcome VARCHAR(32)")
    op.execute("ALTER TABLE jobs ADD COLUMN outcome_reason VARCHAR(1024)")
