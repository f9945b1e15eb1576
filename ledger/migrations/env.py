"""Run migrations on the connection that `tenure.ledger.migrate` hands over."""

from alembic import context

from tenure.ledger.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
