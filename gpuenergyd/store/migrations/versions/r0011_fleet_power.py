"""Empty revision: the tables of a fleet's power are now created by the plugin `gpuenergyd_fleet`."""

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Change nothing."""
