"""Add the power budget of a fleet: its hosts, leases, grid events and samples."""

from alembic import op

revision = "0011"
down_revision = "0010"

_TABLES = {
    "fleet": "fleet_id INTEGER NOT NULL, budget_w FLOAT NOT NULL, reason VARCHAR(256) NOT NULL,"
    " cycle_us BIGINT NOT NULL, PRIMARY KEY (fleet_id)",
    "fleet_hosts": "host VARCHAR(256) NOT NULL, share_w FLOAT NOT NULL, reported_us BIGINT NOT NULL,"
    " measured_w FLOAT, speed FLOAT, curve TEXT NOT NULL, confirmed BIGINT NOT NULL, PRIMARY KEY (host)",
    "fleet_leases": "host VARCHAR(256) NOT NULL, number BIGINT NOT NULL, power_w FLOAT NOT NULL,"
    " end_us BIGINT NOT NULL, fallback TEXT NOT NULL, PRIMARY KEY (host, number)",
    "grid_events": "grid_event_id VARCHAR(64) NOT NULL, start_us BIGINT NOT NULL, end_us BIGINT NOT NULL,"
    " value FLOAT NOT NULL, unit VARCHAR(16) NOT NULL, reason VARCHAR(256) NOT NULL, cancelled INTEGER NOT NULL,"
    " issued_us BIGINT NOT NULL, source VARCHAR(64) NOT NULL, baseline_w FLOAT, PRIMARY KEY (grid_event_id)",
    "fleet_samples": "at_us BIGINT NOT NULL, limit_w FLOAT NOT NULL, measured_w FLOAT, speed FLOAT,"
    " num_hosts INTEGER NOT NULL, num_silent INTEGER NOT NULL, PRIMARY KEY (at_us)",
}


def upgrade() -> None:
    """Create the tables."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for name, columns in _TABLES.items():
        kind = " WITHOUT ROWID" if is_sqlite and name == "fleet_samples" else ""
        op.execute(f"CREATE TABLE {name} ({columns}){kind}")
