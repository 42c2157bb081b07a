"""The tables of a fleet, in the history database that all its hosts share."""

from sqlalchemy import BigInteger, Column, Float, Integer, MetaData, String, Table, Text

metadata = MetaData()

fleet = Table(
    "fleet",
    metadata,
    Column("fleet_id", Integer, primary_key=True, autoincrement=False),
    Column("budget_w", Float, nullable=False),
    Column("reason", String(256), nullable=False),
    Column("cycle_us", BigInteger, nullable=False),
)
"""The power budget of all hosts together: one row, which the coordinator locks while it decides."""

fleet_hosts = Table(
    "fleet_hosts",
    metadata,
    Column("host", String(256), primary_key=True),
    Column("share_w", Float, nullable=False),
    Column("reported_us", BigInteger, nullable=False),
    Column("measured_w", Float),
    Column("speed", Float),
    Column("curve", Text, nullable=False),
    Column("confirmed", BigInteger, nullable=False),
)
"""The last report of each host, and the number of the lease that it confirmed."""

fleet_leases = Table(
    "fleet_leases",
    metadata,
    Column("host", String(256), primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("power_w", Float, nullable=False),
    Column("end_us", BigInteger, nullable=False),
    Column("fallback", Text, nullable=False),
)
"""Power leases that hosts may follow: the confirmed one and those handed out since."""

grid_events = Table(
    "grid_events",
    metadata,
    Column("grid_event_id", String(64), primary_key=True),
    Column("start_us", BigInteger, nullable=False),
    Column("end_us", BigInteger, nullable=False),
    Column("value", Float, nullable=False),
    Column("unit", String(16), nullable=False),
    Column("reason", String(256), nullable=False),
    Column("cancelled", Integer, nullable=False),
    Column("issued_us", BigInteger, nullable=False),
    Column("source", String(64), nullable=False),
    Column("baseline_w", Float),
)
"""Load targets of a grid operator."""

fleet_samples = Table(
    "fleet_samples",
    metadata,
    Column("at_us", BigInteger, primary_key=True, autoincrement=False),
    Column("limit_w", Float, nullable=False),
    Column("measured_w", Float),
    Column("speed", Float),
    Column("num_hosts", Integer, nullable=False),
    Column("num_silent", Integer, nullable=False),
    sqlite_with_rowid=False,
)
"""Power of the whole fleet, one row per cycle of the coordinator, kept for a week."""
