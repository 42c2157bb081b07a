"""Add intervals of estimated energies of iterations, their number in blocks, and what a job's energy covers."""

from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Add the columns; NULL, or 0, for what earlier versions recorded."""
    for name in ("energy_low_j", "energy_high_j"):
        op.execute(f"ALTER TABLE iterations ADD COLUMN {name} FLOAT")
    op.execute("ALTER TABLE iteration_blocks ADD COLUMN num_estimated INTEGER DEFAULT '0' NOT NULL")
    op.execute("ALTER TABLE jobs ADD COLUMN energy_scope VARCHAR(16)")
