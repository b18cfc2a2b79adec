"""The nodes that have joined, with their places, and whether they are drained."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "nodes",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("places", sa.Text, nullable=False, server_default="{}"),
        sa.Column("runtimes", sa.Text, nullable=False, server_default="[]"),
        sa.Column("drained_at", sa.Double),
        sa.PrimaryKeyConstraint("name", name="pk_nodes"),
    )
    # Nodes at work joined before there was this table, and do so but once.
    op.execute("INSERT INTO nodes (name) SELECT node FROM policy_nodes")


def downgrade() -> None:
    op.drop_table("nodes")
