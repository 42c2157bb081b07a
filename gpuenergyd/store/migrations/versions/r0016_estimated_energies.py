"""Add intervals of estimated iteration energies, the number of such iterations in blocks, and the energy scope."""

from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Add the columns, NULL or 0 in rows of earlier versions."""
    for name in ("energy_low_j", "energy_high_j"):
        op.execute(f"ALTER TABLE iterations ADD COLUMN {name} FLOAT")
    op.execute("ALTER TABLE iteration_blocks ADD COLUMN num_estimated INTEGER DEFAULT '0' NOT NULL")
    op.execute("ALTER TABLE jobs ADD COLUMN energy_scope VARCHAR(16)")
