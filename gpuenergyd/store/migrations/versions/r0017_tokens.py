"""Add the tokens of a job's measured iterations, and their energy."""

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Add the columns; NULL for jobs recorded by earlier versions."""
    for name, kind in (("num_tokens", "BIGINT"), ("tokens_energy_j", "FLOAT")):
        op.execute(f"ALTER TABLE estimates ADD COLUMN {name} {kind}")
