"""The tables of the history. Columns have the same names and units as JSON keys; missing values are NULL."""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
)

from gpuenergyd.store.reader import epoch_us, instant_from_us


class UtcInstant(TypeDecorator[datetime]):
    """A timezone-aware UTC instant, stored as microseconds since 1970: exact, sortable and portable."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        """Return the stored integer."""
        del dialect
        return None if value is None else epoch_us(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:
        del dialect
        return instant_from_us(value)


metadata = MetaData()

jobs = Table(
    "jobs",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("job_name", String(256), nullable=False),
    Column("run_key", String(256), nullable=False),
    Column("dp_rank", Integer, nullable=False),
    Column("policy", String(256), nullable=False),
    Column("schedule_name", String(256), nullable=False),
    Column("framework", String(256), nullable=False),
    Column("is_simulated", Boolean, nullable=False),
    Column("num_ranks", Integer, nullable=False),
    Column("num_microbatches", Integer, nullable=False),
    Column("max_slowdown_ratio", Float, nullable=False),
    Column("uid", Integer, nullable=False),
    Column("started_at", UtcInstant, nullable=False),
    Column("ended_at", UtcInstant),
    Column("end_reason", String(1024)),
    Column("tags", Text),
    Column("host", String(256)),
    Column("outcome", String(32)),
    Column("outcome_reason", String(1024)),
    Column("energy_scope", String(16)),
    Index("jobs_by_start", "started_at"),
    Index("jobs_by_host", "host"),
)

ranks = Table(
    "ranks",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("pp_rank", Integer, primary_key=True),
    Column("gpu_uuid", String(256), nullable=False),
    Column("gpu_model_name", String(256), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("uid", Integer, nullable=False),
    Column("joined_at", UtcInstant, nullable=False),
    Column("stage_rank", Integer, primary_key=True, server_default="0"),
)

iterations = Table(
    "iterations",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("iteration_index", Integer, primary_key=True),
    Column("started_at", UtcInstant, nullable=False),
    Column("iteration_time_s", Float, nullable=False),
    Column("energy_j", Float),
    Column("plan_id", String(256)),
    Column("plan_purpose", String(32)),
    Column("is_regular", Boolean, nullable=False),
    Column("energy_low_j", Float),
    Column("energy_high_j", Float),
    sqlite_with_rowid=False,
)

estimates = Table(
    "estimates",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("since_iteration", Integer, nullable=False),
    Column("baseline_time_s", Float, nullable=False),
    Column("baseline_energy_j", Float),
    Column("iteration_time_s", Float),
    Column("energy_per_iteration_j", Float),
    Column("num_compared_baseline_iterations", Integer),
    Column("num_compared_tuned_iterations", Integer),
    Column("saving_ratio", Float),
    Column("saving_low_ratio", Float),
    Column("saving_high_ratio", Float),
    Column("slowdown_ratio", Float),
    Column("slowdown_low_ratio", Float),
    Column("slowdown_high_ratio", Float),
    Column("cost_s", Float),
    Column("cost_ratio", Float),
    Column("num_experiments", Integer),
    Column("num_tokens", BigInteger),
    Column("tokens_energy_j", Float),
    sqlite_with_rowid=False,
)
"""The daemon's newest estimate of what each job's plans save; absent for jobs of version 0.1."""

iteration_spans = Table(
    "iteration_spans",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("iteration_index", Integer, primary_key=True),
    Column("spans", LargeBinary, nullable=False),
)

plans = Table(
    "plans",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("plan_epoch", Integer, primary_key=True),
    Column("plan_id", String(256), nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("reason", String(1024), nullable=False),
    Column("issued_at", UtcInstant, nullable=False),
    Column("apply_at_iteration", Integer, nullable=False),
    Column("predicted_iteration_time_s", Float),
    Column("predicted_energy_j", Float),
    Column("lower_bound_j", Float),
    Column("clocks", LargeBinary, nullable=False),
    Column("predicted_saving_ratio", Float),
    Column("predicted_saving_low_ratio", Float),
    Column("predicted_saving_high_ratio", Float),
)

control_events = Table(
    "control_events",
    metadata,
    Column("event_id", Integer, primary_key=True, autoincrement=True),
    Column("at", UtcInstant, nullable=False),
    Column("action", String(32), nullable=False),
    Column("actor", String(256), nullable=False),
    Column("job_id", String(64)),
    Column("gpu_uuid", String(256)),
    Column("reason", String(1024), nullable=False),
    Column("before", String(1024), nullable=False),
    Column("after", String(1024), nullable=False),
    Index("control_events_by_time", "at"),
)

gpu_rollups = Table(
    "gpu_rollups",
    metadata,
    Column("bucket_s", Integer, primary_key=True),
    Column("started_at", UtcInstant, primary_key=True),
    Column("gpu_uuid", String(256), primary_key=True),
    Column("job_id", String(64), primary_key=True),
    Column("energy_j", Float),
    Column("mean_power_w", Float),
    Column("max_power_w", Float),
    Column("mean_sm_clock_mhz", Float),
    Column("num_samples", Integer, nullable=False),
    Column("estimated_j", Float),
    Column("measured_s", Float, nullable=False, server_default="0"),
    Column("estimated_s", Float, nullable=False, server_default="0"),
    Column("missing_s", Float, nullable=False, server_default="0"),
    Column("assumed_host_j", Float),
    sqlite_with_rowid=False,
)

job_summaries = Table(
    "job_summaries",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("summary", Text, nullable=False),
)
"""Stored summaries of ended jobs, written by `store.maintenance.stored_summaries`."""

host_rollups = Table(
    "host_rollups",
    metadata,
    Column("bucket_s", Integer, primary_key=True),
    Column("started_at", UtcInstant, primary_key=True),
    Column("domain", String(64), primary_key=True),
    Column("energy_j", Float),
    Column("measured_s", Float, nullable=False),
    Column("missing_s", Float, nullable=False),
    Column("host", String(256), primary_key=True, server_default=""),
    sqlite_with_rowid=False,
)
"""Energy of a host's processors and memory by RAPL domain; never attributed to a job."""

gpu_hosts = Table(
    "gpu_hosts",
    metadata,
    Column("gpu_uuid", String(256), primary_key=True),
    Column("host", String(256), nullable=False),
    Column("seen_at", UtcInstant, nullable=False),
    sqlite_with_rowid=False,
)
"""The host of each GPU, recorded when its daemon starts, because many hosts may share one history."""

gpu_series = Table(
    "gpu_series",
    metadata,
    Column("tier", Integer, primary_key=True),
    Column("started_at", UtcInstant, primary_key=True),
    Column("gpu_uuid", String(256), primary_key=True),
    Column("job_id", String(64), primary_key=True),
    Column("num_points", Integer, nullable=False),
    Column("points", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
"""One minute of one GPU, packed by `store.encoding.series`: raw samples (tier 0) or seconds per job (tier 1)."""

iteration_blocks = Table(
    "iteration_blocks",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("first_iteration_index", Integer, primary_key=True),
    Column("started_at", UtcInstant, nullable=False),
    Column("plan_id", String(256)),
    Column("plan_purpose", String(32)),
    Column("is_regular", Boolean, nullable=False),
    Column("num_iterations", Integer, nullable=False),
    Column("sum_time_s", Float, nullable=False),
    Column("median_time_s", Float, nullable=False),
    Column("num_measured", Integer, nullable=False),
    Column("sum_energy_j", Float),
    Column("median_energy_j", Float),
    Column("num_estimated", Integer, nullable=False, server_default="0"),
    sqlite_with_rowid=False,
)
"""Merged iterations of long jobs with the same plan and regularity: sums and medians."""

intensities = Table(
    "intensities",
    metadata,
    Column("zone", String(64), primary_key=True),
    Column("source", String(64), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("factor", String(16), primary_key=True),
    Column("valid_from", UtcInstant, primary_key=True),
    Column("status", String(16), primary_key=True),
    Column("valid_to", UtcInstant, nullable=False),
    Column("grid_from", UtcInstant, nullable=False),
    Column("carbon_intensity_g_per_kwh", Float, nullable=False),
    Column("fetched_at", UtcInstant, nullable=False),
    Index("intensities_by_time", "valid_from"),
    sqlite_with_rowid=False,
)

forecasts = Table(
    "forecasts",
    metadata,
    Column("zone", String(64), primary_key=True),
    Column("model", String(64), primary_key=True),
    Column("issued_at", UtcInstant, primary_key=True),
    Column("unit", String(64), nullable=False),
    Column("hours", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

targets = Table(
    "targets",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("decided_at", UtcInstant, primary_key=True),
    Column("policy", String(256), nullable=False),
    Column("permitted_time_s", Float),
    Column("reason", String(1024), nullable=False),
    Column("basis", String(32), nullable=False),
    Column("intensity", Float),
    Column("unit", String(64), nullable=False),
    Column("slowdown_so_far_ratio", Float),
    Column("budget_ratio", Float, nullable=False),
    Column("host_power_w", Float, nullable=False),
    Column("frontier", LargeBinary),
    sqlite_with_rowid=False,
)

models = Table(
    "models",
    metadata,
    Column("signature", String(64), primary_key=True),
    Column("job_id", String(64), nullable=False),
    Column("learned_at", UtcInstant, nullable=False),
    Column("model", LargeBinary, nullable=False),
)
"""Data that jobs leave for later jobs; `daemon.jobs.past_jobs` encodes `model`. Versions up to 0.3.0 also stored
measurements of whole runs, which are no longer read and expire."""
