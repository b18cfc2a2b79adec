"""Runs migrations on the connection that `polar.store.migrations` hands over."""

from alembic import context

from polar.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True
)
context.run_migrations()
