"""Add carbon intensities, forecasts and iteration time targets."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the three tables."""
    op.create_table(
        "intensities",
        sa.Column("zone", sa.String(64), primary_key=True),
        sa.Column("source", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("factor", sa.String(16), primary_key=True),
        sa.Column("valid_from", sa.BigInteger, primary_key=True),
        sa.Column("status", sa.String(16), primary_key=True),
        sa.Column("valid_to", sa.BigInteger, nullable=False),
        sa.Column("grid_from", sa.BigInteger, nullable=False),
        sa.Column("carbon_intensity_g_per_kwh", sa.Float, nullable=False),
        sa.Column("fetched_at", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("intensities_by_time", "intensities", ["valid_from"])
    op.create_table(
        "forecasts",
        sa.Column("zone", sa.String(64), primary_key=True),
        sa.Column("model", sa.String(64), primary_key=True),
        sa.Column("issued_at", sa.BigInteger, primary_key=True),
        sa.Column("unit", sa.String(64), nullable=False),
        sa.Column("hours", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "targets",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("decided_at", sa.BigInteger, primary_key=True),
        sa.Column("policy", sa.String(256), nullable=False),
        sa.Column("permitted_time_s", sa.Float),
        sa.Column("reason", sa.String(1024), nullable=False),
        sa.Column("rung", sa.String(32), nullable=False),
        sa.Column("intensity", sa.Float),
        sa.Column("unit", sa.String(64), nullable=False),
        sa.Column("slowdown_so_far_ratio", sa.Float),
        sa.Column("budget_ratio", sa.Float, nullable=False),
        sa.Column("host_power_w", sa.Float, nullable=False),
        sa.Column("frontier", sa.LargeBinary),
        sqlite_with_rowid=False,
    )
