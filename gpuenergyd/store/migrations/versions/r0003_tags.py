"""Add tags and stored summaries of jobs, host energy, and hourly rollups for the time before they were stored."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_HOUR_US = 3_600_000_000


def upgrade() -> None:
    """Add a column and tables; sum minutes to the hours that reports read."""
    op.add_column("jobs", sa.Column("tags", sa.Text))
    op.create_table(
        "host_rollups",
        sa.Column("bucket_s", sa.Integer, primary_key=True),
        sa.Column("started_at", sa.BigInteger, primary_key=True),
        sa.Column("domain", sa.String(64), primary_key=True),
        sa.Column("energy_j", sa.Float),
        sa.Column("measured_s", sa.Float, nullable=False),
        sa.Column("missing_s", sa.Float, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "job_figures",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("figures", sa.Text, nullable=False),
    )
    # The first stored hour may be incomplete: an earlier version wrote the rest of it as minutes only.
    first = op.get_bind().execute(sa.text("SELECT min(started_at) FROM gpu_rollups WHERE bucket_s = 3600")).scalar()
    until = "" if first is None else f" AND started_at < {int(first) + _HOUR_US}"
    hour = f"started_at - started_at % {_HOUR_US}"
    has_minutes = op.get_bind().execute(
        sa.text(f"SELECT count(*) FROM gpu_rollups WHERE bucket_s = 60{until}")  # noqa: S608  integers
    )
    if not has_minutes.scalar():
        return
    op.execute(f"DELETE FROM gpu_rollups WHERE bucket_s = 3600{until}")  # noqa: S608  as above
    mean = "sum({0} * num_samples) / nullif(sum(CASE WHEN {0} IS NULL THEN 0 ELSE num_samples END), 0)"
    op.execute(
        "INSERT INTO gpu_rollups (bucket_s, started_at, gpu_uuid, job_id, energy_j, mean_power_w, max_power_w,"  # noqa: S608  as above
        " mean_sm_clock_mhz, num_samples, estimated_j, measured_s, estimated_s, missing_s)"
        f" SELECT 3600, {hour}, gpu_uuid, job_id, sum(energy_j), {mean.format('mean_power_w')}, max(max_power_w),"
        f" {mean.format('mean_sm_clock_mhz')}, sum(num_samples), sum(estimated_j), sum(measured_s), sum(estimated_s),"
        f" sum(missing_s) FROM gpu_rollups WHERE bucket_s = 60{until} GROUP BY {hour}, gpu_uuid, job_id"
    )
