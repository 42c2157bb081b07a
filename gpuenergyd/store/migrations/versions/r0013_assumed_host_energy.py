"""Add each GPU's share of the energy that is assumed for the rest of its host."""

from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add the column; NULL for energy recorded by earlier versions."""
    op.execute("ALTER TABLE gpu_rollups ADD COLUMN assumed_host_j FLOAT")
