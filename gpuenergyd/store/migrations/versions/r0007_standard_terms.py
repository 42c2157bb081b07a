"""Rename a plan purpose, a column of targets and the table of stored summaries to the terms of the glossary."""

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Rename in place; no row is copied."""
    op.execute("ALTER TABLE targets RENAME COLUMN rung TO basis")
    op.execute("ALTER TABLE job_figures RENAME COLUMN figures TO summary")
    op.execute("ALTER TABLE job_figures RENAME TO job_summaries")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER INDEX job_figures_pkey RENAME TO job_summaries_pkey")
    # Plans with this purpose are never applied, so no iteration refers to it.
    op.execute("UPDATE plans SET purpose = 'predicted' WHERE purpose = 'would_be'")
