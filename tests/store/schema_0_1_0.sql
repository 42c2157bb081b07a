-- The tables of version 0.1.0 as SQLite makes them.
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO alembic_version VALUES('0006');
CREATE TABLE control_events (
    event_id INTEGER NOT NULL,
    at BIGINT NOT NULL,
    action VARCHAR(32) NOT NULL,
    actor VARCHAR(256) NOT NULL,
    job_id VARCHAR(64),
    gpu_uuid VARCHAR(256),
    reason VARCHAR(1024) NOT NULL,
    "before" VARCHAR(1024) NOT NULL,
    "after" VARCHAR(1024) NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE TABLE forecasts (
    zone VARCHAR(64) NOT NULL,
    model VARCHAR(64) NOT NULL,
    issued_at BIGINT NOT NULL,
    unit VARCHAR(64) NOT NULL,
    hours BLOB NOT NULL,
    PRIMARY KEY (zone, model, issued_at)
) WITHOUT ROWID;
CREATE TABLE gpu_hosts (
    gpu_uuid VARCHAR(256) NOT NULL,
    host VARCHAR(256) NOT NULL,
    seen_at BIGINT NOT NULL,
    PRIMARY KEY (gpu_uuid)
) WITHOUT ROWID;
CREATE TABLE gpu_rollups (
    bucket_s INTEGER NOT NULL,
    started_at BIGINT NOT NULL,
    gpu_uuid VARCHAR(256) NOT NULL,
    job_id VARCHAR(64) NOT NULL,
    energy_j FLOAT,
    mean_power_w FLOAT,
    max_power_w FLOAT,
    mean_sm_clock_mhz FLOAT,
    num_samples INTEGER NOT NULL,
    estimated_j FLOAT,
    measured_s FLOAT DEFAULT '0' NOT NULL,
    estimated_s FLOAT DEFAULT '0' NOT NULL,
    missing_s FLOAT DEFAULT '0' NOT NULL,
    PRIMARY KEY (bucket_s, started_at, gpu_uuid, job_id)
) WITHOUT ROWID;
CREATE TABLE gpu_series (
    tier INTEGER NOT NULL,
    started_at BIGINT NOT NULL,
    gpu_uuid VARCHAR(256) NOT NULL,
    job_id VARCHAR(64) NOT NULL,
    num_points INTEGER NOT NULL,
    points BLOB NOT NULL,
    PRIMARY KEY (tier, started_at, gpu_uuid, job_id)
) WITHOUT ROWID;
CREATE TABLE host_rollups (
    bucket_s INTEGER NOT NULL,
    started_at BIGINT NOT NULL,
    domain VARCHAR(64) NOT NULL,
    energy_j FLOAT,
    measured_s FLOAT NOT NULL,
    missing_s FLOAT NOT NULL,
    host VARCHAR(256) DEFAULT '' NOT NULL,
    PRIMARY KEY (bucket_s, started_at, domain, host)
) WITHOUT ROWID;
CREATE TABLE intensities (
    zone VARCHAR(64) NOT NULL,
    source VARCHAR(64) NOT NULL,
    kind VARCHAR(16) NOT NULL,
    factor VARCHAR(16) NOT NULL,
    valid_from BIGINT NOT NULL,
    status VARCHAR(16) NOT NULL,
    valid_to BIGINT NOT NULL,
    grid_from BIGINT NOT NULL,
    carbon_intensity_g_per_kwh FLOAT NOT NULL,
    fetched_at BIGINT NOT NULL,
    PRIMARY KEY (zone, source, kind, factor, valid_from, status)
) WITHOUT ROWID;
CREATE TABLE iteration_blocks (
    job_id VARCHAR(64) NOT NULL,
    first_iteration_index INTEGER NOT NULL,
    started_at BIGINT NOT NULL,
    plan_id VARCHAR(256),
    plan_purpose VARCHAR(32),
    is_regular BOOLEAN NOT NULL,
    num_iterations INTEGER NOT NULL,
    sum_time_s FLOAT NOT NULL,
    median_time_s FLOAT NOT NULL,
    num_measured INTEGER NOT NULL,
    sum_energy_j FLOAT,
    median_energy_j FLOAT,
    PRIMARY KEY (job_id, first_iteration_index)
) WITHOUT ROWID;
CREATE TABLE iteration_spans (
    job_id VARCHAR(64) NOT NULL,
    iteration_index INTEGER NOT NULL,
    spans BLOB NOT NULL,
    PRIMARY KEY (job_id, iteration_index)
);
CREATE TABLE iterations (
    job_id VARCHAR(64) NOT NULL,
    iteration_index INTEGER NOT NULL,
    started_at BIGINT NOT NULL,
    iteration_time_s FLOAT NOT NULL,
    energy_j FLOAT,
    plan_id VARCHAR(256),
    plan_purpose VARCHAR(32),
    is_regular BOOLEAN NOT NULL,
    PRIMARY KEY (job_id, iteration_index)
) WITHOUT ROWID;
CREATE TABLE job_figures (
    job_id VARCHAR(64) NOT NULL,
    version INTEGER NOT NULL,
    figures TEXT NOT NULL,
    PRIMARY KEY (job_id)
);
CREATE TABLE jobs (
    job_id VARCHAR(64) NOT NULL,
    job_name VARCHAR(256) NOT NULL,
    run_key VARCHAR(256) NOT NULL,
    dp_rank INTEGER NOT NULL,
    policy VARCHAR(256) NOT NULL,
    schedule_name VARCHAR(256) NOT NULL,
    framework VARCHAR(256) NOT NULL,
    is_simulated BOOLEAN NOT NULL,
    num_ranks INTEGER NOT NULL,
    num_microbatches INTEGER NOT NULL,
    max_slowdown_ratio FLOAT NOT NULL,
    uid INTEGER NOT NULL,
    started_at BIGINT NOT NULL,
    ended_at BIGINT,
    end_reason VARCHAR(1024),
    tags TEXT,
    host VARCHAR(256),
    PRIMARY KEY (job_id)
);
CREATE TABLE models (
    signature VARCHAR(64) NOT NULL,
    job_id VARCHAR(64) NOT NULL,
    learned_at BIGINT NOT NULL,
    model BLOB NOT NULL,
    PRIMARY KEY (signature)
);
CREATE TABLE plans (
    job_id VARCHAR(64) NOT NULL,
    plan_epoch INTEGER NOT NULL,
    plan_id VARCHAR(256) NOT NULL,
    purpose VARCHAR(32) NOT NULL,
    reason VARCHAR(1024) NOT NULL,
    issued_at BIGINT NOT NULL,
    apply_at_iteration INTEGER NOT NULL,
    predicted_iteration_time_s FLOAT,
    predicted_energy_j FLOAT,
    lower_bound_j FLOAT,
    clocks BLOB NOT NULL,
    PRIMARY KEY (job_id, plan_epoch)
);
CREATE TABLE ranks (
    job_id VARCHAR(64) NOT NULL,
    pp_rank INTEGER NOT NULL,
    gpu_uuid VARCHAR(256) NOT NULL,
    gpu_model_name VARCHAR(256) NOT NULL,
    pid INTEGER NOT NULL,
    uid INTEGER NOT NULL,
    joined_at BIGINT NOT NULL,
    PRIMARY KEY (job_id, pp_rank)
);
CREATE TABLE targets (
    job_id VARCHAR(64) NOT NULL,
    decided_at BIGINT NOT NULL,
    policy VARCHAR(256) NOT NULL,
    permitted_time_s FLOAT,
    reason VARCHAR(1024) NOT NULL,
    rung VARCHAR(32) NOT NULL,
    intensity FLOAT,
    unit VARCHAR(64) NOT NULL,
    slowdown_so_far_ratio FLOAT,
    budget_ratio FLOAT NOT NULL,
    host_power_w FLOAT NOT NULL,
    frontier BLOB,
    PRIMARY KEY (job_id, decided_at)
) WITHOUT ROWID;
CREATE INDEX jobs_by_host ON jobs (host);
CREATE INDEX jobs_by_start ON jobs (started_at);
CREATE INDEX control_events_by_time ON control_events (at);
CREATE INDEX intensities_by_time ON intensities (valid_from);
