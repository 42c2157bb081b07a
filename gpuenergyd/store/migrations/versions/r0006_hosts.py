"""Add the host of jobs, GPUs and processor energy, for histories shared by many hosts."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_HELD = "bucket_s, started_at, domain, energy_j, measured_s, missing_s"


def upgrade() -> None:
    """Add columns and a table; the host of existing rows stays unknown."""
    op.add_column("jobs", sa.Column("host", sa.String(256)))
    op.create_index("jobs_by_host", "jobs", ["host"])
    op.create_table(
        "gpu_hosts",
        sa.Column("gpu_uuid", sa.String(256), primary_key=True),
        sa.Column("host", sa.String(256), nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    host = sa.Column("host", sa.String(256), nullable=False, server_default="")
    if op.get_bind().dialect.name == "postgresql":
        op.add_column("host_rollups", host)
        op.drop_constraint("host_rollups_pkey", "host_rollups")
        op.create_primary_key("host_rollups_pkey", "host_rollups", ["bucket_s", "started_at", "domain", "host"])
        return
    # SQLite cannot change the primary key of an existing table.
    op.rename_table("host_rollups", "host_rollups_before")
    op.create_table(
        "host_rollups",
        sa.Column("bucket_s", sa.Integer, primary_key=True),
        sa.Column("started_at", sa.BigInteger, primary_key=True),
        sa.Column("domain", sa.String(64), primary_key=True),
        sa.Column("energy_j", sa.Float),
        sa.Column("measured_s", sa.Float, nullable=False),
        sa.Column("missing_s", sa.Float, nullable=False),
        sa.Column("host", sa.String(256), nullable=False, server_default="", primary_key=True),
        sqlite_with_rowid=False,
    )
    op.execute(f"INSERT INTO host_rollups ({_HELD}) SELECT {_HELD} FROM host_rollups_before")  # noqa: S608  constant column names
    op.drop_table("host_rollups_before")
