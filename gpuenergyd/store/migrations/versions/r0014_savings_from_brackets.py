"""Delete savings that earlier versions estimated by regression; they are computed again from the iterations."""

from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Delete the estimates, and the stored summaries that contain them."""
    op.execute("DELETE FROM estimates")
    op.execute("DELETE FROM job_summaries")
