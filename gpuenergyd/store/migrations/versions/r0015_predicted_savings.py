"""Add the saving that a plan predicts against its own full speed, with its interval."""

from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Add the columns; NULL for plans recorded by earlier versions."""
    for name in ("predicted_saving_ratio", "predicted_saving_low_ratio", "predicted_saving_high_ratio"):
        op.execute(f"ALTER TABLE plans ADD COLUMN {name} FLOAT")
