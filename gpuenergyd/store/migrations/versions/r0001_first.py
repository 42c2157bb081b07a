"""Initial schema: jobs, ranks, iterations, plans, control events and rollups."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("job_name", sa.String(256), nullable=False),
        sa.Column("run_key", sa.String(256), nullable=False),
        sa.Column("dp_rank", sa.Integer, nullable=False),
        sa.Column("policy", sa.String(256), nullable=False),
        sa.Column("schedule_name", sa.String(256), nullable=False),
        sa.Column("framework", sa.String(256), nullable=False),
        sa.Column("is_simulated", sa.Boolean, nullable=False),
        sa.Column("num_ranks", sa.Integer, nullable=False),
        sa.Column("num_microbatches", sa.Integer, nullable=False),
        sa.Column("max_slowdown_ratio", sa.Float, nullable=False),
        sa.Column("uid", sa.Integer, nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger),
        sa.Column("end_reason", sa.String(1024)),
    )
    op.create_index("jobs_by_start", "jobs", ["started_at"])
    op.create_table(
        "ranks",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("pp_rank", sa.Integer, primary_key=True),
        sa.Column("gpu_uuid", sa.String(256), nullable=False),
        sa.Column("gpu_model_name", sa.String(256), nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("uid", sa.Integer, nullable=False),
        sa.Column("joined_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "iterations",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("iteration_index", sa.Integer, primary_key=True),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("iteration_time_s", sa.Float, nullable=False),
        sa.Column("energy_j", sa.Float),
        sa.Column("plan_id", sa.String(256)),
        sa.Column("plan_purpose", sa.String(32)),
        sa.Column("is_regular", sa.Boolean, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "iteration_spans",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("iteration_index", sa.Integer, primary_key=True),
        sa.Column("spans", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "plans",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("plan_epoch", sa.Integer, primary_key=True),
        sa.Column("plan_id", sa.String(256), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("reason", sa.String(1024), nullable=False),
        sa.Column("issued_at", sa.BigInteger, nullable=False),
        sa.Column("apply_at_iteration", sa.Integer, nullable=False),
        sa.Column("predicted_iteration_time_s", sa.Float),
        sa.Column("predicted_energy_j", sa.Float),
        sa.Column("lower_bound_j", sa.Float),
        sa.Column("clocks", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "control_events",
        sa.Column("event_id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("actor", sa.String(256), nullable=False),
        sa.Column("job_id", sa.String(64)),
        sa.Column("gpu_uuid", sa.String(256)),
        sa.Column("reason", sa.String(1024), nullable=False),
        sa.Column("before", sa.String(1024), nullable=False),
        sa.Column("after", sa.String(1024), nullable=False),
    )
    op.create_index("control_events_by_time", "control_events", ["at"])
    op.create_table(
        "gpu_rollups",
        sa.Column("bucket_s", sa.Integer, primary_key=True),
        sa.Column("started_at", sa.BigInteger, primary_key=True),
        sa.Column("gpu_uuid", sa.String(256), primary_key=True),
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("energy_j", sa.Float),
        sa.Column("mean_power_w", sa.Float),
        sa.Column("max_power_w", sa.Float),
        sa.Column("mean_sm_clock_mhz", sa.Float),
        sa.Column("num_samples", sa.Integer, nullable=False),
        sqlite_with_rowid=False,
    )
