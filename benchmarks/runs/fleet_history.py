"""Generates the history of a fleet inside the PostgreSQL server: in a minute instead of days.

It has the same rows as if daemons had written it: jobs of twelve hours one after another on every host, each host
with another offset; single iterations and blocks; hours of every GPU, and minutes of the hour in which a report of
whole days starts. Packed samples and seconds are left out because reports do not read them.
"""

from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import Any

from fleet_hosts import DOMAINS, ITERATION_S, NUM_GPUS
from sqlalchemy import Connection, text

from gpuenergyd.store.encoding.compressed_json import encode_clocks
from gpuenergyd.store.maintenance.stored_summaries import store_summaries
from gpuenergyd.store.reader import epoch_us
from gpuenergyd.store.reading.stored_summaries import SUMMARY_VERSION

JOB_S = 12 * 3600
_SINGLE_AT_EACH_END = 64
_NEW_ITERATIONS = 300
"""The single iterations of a running job since the last compaction."""
_UUID = "'GPU-' || lpad(to_hex(h), 8, '0') || '-0000-4000-8000-' || lpad(g::text, 12, '0')"
_HOST = "'host-' || lpad(h::text, 4, '0')"
_POWER_W = "(150 + 200 * random())"
_DONE = f"least({JOB_S}, (:now - started_at) / 1000000) / {ITERATION_S}"
"""The number of iterations of a job so far, as SQL."""


def make_history(connection: Connection, *, num_hosts: int, days: int) -> dict[str, Any]:
    """Fill the tables; return the time to compute the stored summary of an ended job."""
    now = datetime.now(tz=UTC)
    begin = now - timedelta(days=days)
    values = {
        "now": epoch_us(now),
        "begin": epoch_us(begin),
        "hosts": num_hosts,
        "jobs": 2 * days,
        "clocks": encode_clocks(()),
        "first_hour": int(begin.timestamp()) // 3600 - 1,
        "last_hour": int(now.timestamp()) // 3600,
    }

    def run(sql: str) -> None:
        connection.execute(text(sql), {name: value for name, value in values.items() if f":{name}" in sql})

    # The first job of a host spans the begin of the time range, the last one is still running.
    start = f"(:begin - (h * {JOB_S}::bigint * 1000000 / :hosts) + k * {JOB_S}::bigint * 1000000)"
    run(f"""INSERT INTO jobs (job_id, job_name, run_key, dp_rank, policy, schedule_name, framework, is_simulated,
            num_ranks, num_microbatches, max_slowdown_ratio, uid, started_at, ended_at, end_reason, host)
        SELECT 'job-' || h || CASE WHEN k = :jobs THEN '' ELSE '-' || k END, 'gpt', 'run', 0, 'bubble-aware', '1f1b',
            'torch', true, {NUM_GPUS}, 32, 0, 1000 + h % 50, {start},
            CASE WHEN k < :jobs THEN {start} + {JOB_S}::bigint * 1000000 END,
            CASE WHEN k < :jobs THEN 'released' END, {_HOST}
        FROM generate_series(0, :hosts - 1) h, generate_series(0, :jobs) k""")
    run(f"""INSERT INTO ranks (job_id, pp_rank, gpu_uuid, gpu_model_name, pid, uid, joined_at)
        SELECT job_id, g, {_UUID}, 'simulated', 1000 + g, uid, started_at
        FROM (SELECT *, split_part(job_id, '-', 2)::int AS h FROM jobs) j, generate_series(0, {NUM_GPUS - 1}) g""")
    run("""INSERT INTO plans SELECT job_id, 1, 'tuned-1', 'tuned', 'slack', started_at, 20, 1.7, 8500, 8450, :clocks
        FROM jobs""")
    run(f"""INSERT INTO gpu_hosts SELECT {_UUID}, {_HOST}, :now
        FROM generate_series(0, :hosts - 1) h, generate_series(0, {NUM_GPUS - 1}) g""")
    _make_iterations(run)
    _make_rollups(run)
    took_s = _store_summaries(connection, now)
    connection.execute(text("ANALYZE"))
    return {"figures_of_a_job_s": took_s}


def _make_iterations(run: Any) -> None:
    energy = "(CASE WHEN purpose = 'baseline' THEN 10000 ELSE 8500 END) * (1 + 0.01 * (random() - 0.5))"
    run(f"""INSERT INTO iteration_blocks SELECT job_id, i, started_at + (i * {ITERATION_S} * 1000000)::bigint,
            purpose || '-1', purpose, true, n, n * {ITERATION_S}, {ITERATION_S} * (1 + 0.002 * (random() - 0.5)), n,
            n * {energy}, {energy}
        FROM (SELECT job_id, started_at, 500 * g + first AS i, n, purpose, {_DONE} AS done,
                CASE WHEN ended_at IS NULL THEN {_NEW_ITERATIONS} ELSE 0 END AS new
            FROM jobs, generate_series(0, 50) g,
                (VALUES (0, 4, 'baseline'), (4, 200, 'tuned'), (204, 200, 'tuned'), (404, 96, 'tuned'))
                AS block (first, n, purpose)) b
        WHERE i >= {_SINGLE_AT_EACH_END} AND i + n < done - {_SINGLE_AT_EACH_END} - new""")
    run(f"""INSERT INTO iterations SELECT job_id, i, started_at + (i * {ITERATION_S} * 1000000)::bigint,
            {ITERATION_S} * (1 + 0.002 * (random() - 0.5)), {energy}, purpose || '-1', purpose, true
        FROM (SELECT job_id, started_at, i,
                CASE WHEN i < 12 OR i % 500 < 4 THEN 'baseline' ELSE 'tuned' END AS purpose
            FROM (SELECT job_id, started_at, ended_at, ({_DONE})::int AS done FROM jobs) j,
                LATERAL (SELECT g AS i FROM generate_series(0, {_SINGLE_AT_EACH_END - 1}) g WHERE g < done
                    UNION SELECT g FROM generate_series(
                        done - {_SINGLE_AT_EACH_END} - CASE WHEN ended_at IS NULL THEN {_NEW_ITERATIONS} ELSE 0 END,
                        done - 1) g WHERE g >= 0) own) s""")


def _make_rollups(run: Any) -> None:
    job = f"""'job-' || h || CASE WHEN nth >= :jobs THEN '' ELSE '-' || greatest(nth, 0) END
        FROM (SELECT h, g, t, floor((t::bigint * 1000000 - :begin + h * {JOB_S}::bigint * 1000000 / :hosts)
            / ({JOB_S}::bigint * 1000000))::int AS nth"""
    for bucket_s, times in (
        (3600, "SELECT 3600 * hour AS t FROM generate_series(:first_hour, :last_hour) hour"),
        (60, "SELECT 3600 * :first_hour + 60 * m AS t FROM generate_series(0, 179) m"),
    ):
        run(f"""INSERT INTO gpu_rollups (bucket_s, started_at, gpu_uuid, energy_j, mean_power_w, max_power_w,
                mean_sm_clock_mhz, num_samples, measured_s, estimated_s, missing_s, job_id)
            SELECT {bucket_s}, t::bigint * 1000000, {_UUID}, {bucket_s} * {_POWER_W}, {_POWER_W}, 350,
                1100 + 300 * random(), {10 * bucket_s}, {bucket_s}, 0, 0, {job}
                FROM ({times}) times, generate_series(0, :hosts - 1) h, generate_series(0, {NUM_GPUS - 1}) g) r
            ORDER BY t, 3""")
    domains = ", ".join(f"('{name}')" for name in DOMAINS)
    run(f"""INSERT INTO host_rollups (bucket_s, started_at, domain, energy_j, measured_s, missing_s, host)
        SELECT 3600, 3600 * hour::bigint * 1000000, domain, 3600 * (50 + 100 * random()), 3600, 0, {_HOST}
        FROM generate_series(:first_hour, :last_hour) hour, generate_series(0, :hosts - 1) h,
            (VALUES {domains}) AS d (domain)""")


def _store_summaries(connection: Connection, now: datetime) -> float:
    """Store the summaries of some ended jobs as each host does for its own, and copy them to the other jobs."""
    begin = perf_counter()
    for _ in range(4):
        store_summaries(connection, now)
    num_kept: int = connection.execute(text("SELECT count(*) FROM job_summaries")).scalar_one()
    took_s = (perf_counter() - begin) / num_kept
    connection.execute(
        text("""INSERT INTO job_summaries
            SELECT job_id, :version, (SELECT summary FROM job_summaries ORDER BY job_id LIMIT 1)
            FROM jobs WHERE ended_at IS NOT NULL ON CONFLICT DO NOTHING"""),
        {"version": SUMMARY_VERSION},
    )
    return took_s
