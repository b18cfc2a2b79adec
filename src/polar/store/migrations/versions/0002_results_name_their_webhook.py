"""A result names the webhook that it is sent to."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Copy the webhook of each task to its results, and index those that have one."""
    column = sa.Column("webhook_id", sa.BigInteger().with_variant(sa.Integer, "sqlite"))
    op.add_column("results", column)
    # No others: a row that is set to nothing is written anew as well, and a feed may be gigabytes.
    op.execute(
        "UPDATE results SET webhook_id = (SELECT webhook_id FROM tasks WHERE tasks.id = results.task_id)"
        " WHERE task_id IN (SELECT id FROM tasks WHERE webhook_id IS NOT NULL)"
    )
    has_one = sa.text("webhook_id IS NOT NULL")
    op.create_index(
        "ix_results_webhook_id_seq",
        "results",
        ["webhook_id", "seq"],
        sqlite_where=has_one,
        postgresql_where=has_one,
    )
