"""Add the index of a rank in its stage, because a stage of a job may have several ranks, each with its own GPU."""

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add a column to the primary key, 0 for all earlier ranks; SQLite needs a new table for this."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE ranks ADD COLUMN stage_rank INTEGER DEFAULT '0' NOT NULL")
        op.execute("ALTER TABLE ranks DROP CONSTRAINT ranks_pkey")
        op.execute("ALTER TABLE ranks ADD CONSTRAINT ranks_pkey PRIMARY KEY (job_id, pp_rank, stage_rank)")
        return
    op.execute("ALTER TABLE ranks RENAME TO ranks_before")
    op.execute(
        "CREATE TABLE ranks (job_id VARCHAR(64) NOT NULL, pp_rank INTEGER NOT NULL,"
        " gpu_uuid VARCHAR(256) NOT NULL, gpu_model_name VARCHAR(256) NOT NULL, pid INTEGER NOT NULL,"
        " uid INTEGER NOT NULL, joined_at BIGINT NOT NULL, stage_rank INTEGER DEFAULT '0' NOT NULL,"
        " PRIMARY KEY (job_id, pp_rank, stage_rank))"
    )
    op.execute(
        "INSERT INTO ranks (job_id, pp_rank, gpu_uuid, gpu_model_name, pid, uid, joined_at)"
        " SELECT job_id, pp_rank, gpu_uuid, gpu_model_name, pid, uid, joined_at FROM ranks_before"
    )
    op.execute("DROP TABLE ranks_before")
