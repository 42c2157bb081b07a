"""Add packed minutes of samples and seconds, blocks of iterations and the measured time of rollups."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add tables and columns; delete one-second rollups that were rows, their minutes stay."""
    op.create_table(
        "gpu_series",
        sa.Column("tier", sa.Integer, primary_key=True),
        sa.Column("started_at", sa.BigInteger, primary_key=True),
        sa.Column("gpu_uuid", sa.String(256), primary_key=True),
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("num_points", sa.Integer, nullable=False),
        sa.Column("points", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "iteration_blocks",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("first_iteration_index", sa.Integer, primary_key=True),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("plan_id", sa.String(256)),
        sa.Column("plan_purpose", sa.String(32)),
        sa.Column("is_regular", sa.Boolean, nullable=False),
        sa.Column("num_iterations", sa.Integer, nullable=False),
        sa.Column("sum_time_s", sa.Float, nullable=False),
        sa.Column("median_time_s", sa.Float, nullable=False),
        sa.Column("num_measured", sa.Integer, nullable=False),
        sa.Column("sum_energy_j", sa.Float),
        sa.Column("median_energy_j", sa.Float),
        sqlite_with_rowid=False,
    )
    op.add_column("gpu_rollups", sa.Column("estimated_j", sa.Float))
    for name in ("measured_s", "estimated_s", "missing_s"):
        op.add_column("gpu_rollups", sa.Column(name, sa.Float, nullable=False, server_default="0"))
    # Earlier versions recorded only whether a bucket was measured, not for how long.
    op.execute("UPDATE gpu_rollups SET measured_s = bucket_s WHERE energy_j IS NOT NULL")
    op.execute("UPDATE gpu_rollups SET missing_s = bucket_s WHERE energy_j IS NULL")
    op.execute("DELETE FROM gpu_rollups WHERE bucket_s = 1")
