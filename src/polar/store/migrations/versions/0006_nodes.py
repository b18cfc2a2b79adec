"""The nodes that have joined, with their places; what they go back to if no node can load new weights."""

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
    op.add_column("policy", sa.Column("newest", sa.Integer, nullable=False, server_default="0"))
    op.add_column("policy", sa.Column("failure", sa.Text))
    op.add_column("policy", sa.Column("fallback_version", sa.Integer))
    op.add_column("policy", sa.Column("fallback_path", sa.Text))
    op.execute("UPDATE policy SET newest = version")


def downgrade() -> None:
    for column in ("newest", "failure", "fallback_version", "fallback_path"):
        op.drop_column("policy", column)
    op.drop_table("nodes")
