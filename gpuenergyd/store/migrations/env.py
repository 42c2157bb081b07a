"""Alembic environment: runs migrations on the connection passed by `store.database.migrate`."""

from alembic import context

from gpuenergyd.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
