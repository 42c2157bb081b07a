"""Add what the daemon has cost a job: the time, its share of the job's time, and the number of experiments."""

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the columns; NULL for jobs recorded by earlier versions."""
    for name, kind in (("cost_s", "FLOAT"), ("cost_ratio", "FLOAT"), ("num_experiments", "INTEGER")):
        op.execute(f"ALTER TABLE estimates ADD COLUMN {name} {kind}")
