"""Add the daemon's estimate of what each job's plans save; for earlier jobs, reports compute it from iterations."""

from alembic import op

revision = "0009"
down_revision = "0008"

_OPTIONAL_VALUES = (
    ("baseline_energy_j", "FLOAT"),
    ("iteration_time_s", "FLOAT"),
    ("energy_per_iteration_j", "FLOAT"),
    ("num_compared_baseline_iterations", "INTEGER"),
    ("num_compared_tuned_iterations", "INTEGER"),
    ("saving_ratio", "FLOAT"),
    ("saving_low_ratio", "FLOAT"),
    ("saving_high_ratio", "FLOAT"),
    ("slowdown_ratio", "FLOAT"),
    ("slowdown_low_ratio", "FLOAT"),
    ("slowdown_high_ratio", "FLOAT"),
)


def upgrade() -> None:
    """Add an empty table."""
    op.execute(
        "CREATE TABLE estimates (job_id VARCHAR(64) NOT NULL, since_iteration INTEGER NOT NULL,"
        " baseline_time_s FLOAT NOT NULL,"
        f" {', '.join(' '.join(column) for column in _OPTIONAL_VALUES)}, PRIMARY KEY (job_id))"
        f"{' WITHOUT ROWID' if op.get_bind().dialect.name == 'sqlite' else ''}"
    )
