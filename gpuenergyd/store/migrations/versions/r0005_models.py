"""Add measurements of previous runs, by job signature."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "models",
        sa.Column("signature", sa.String(64), primary_key=True),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("learned_at", sa.BigInteger, nullable=False),
        sa.Column("model", sa.LargeBinary, nullable=False),
    )
