"""The policy that engines are to sample with, and how far each node is with it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    policy = op.create_table(
        "policy",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("path", sa.Text),
        sa.Column("mode", sa.String(16)),
        sa.Column("holder", sa.String(128)),
        sa.Column("expires_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_policy"),
    )
    op.bulk_insert(policy, [{"id": 1, "step": 0, "version": 0}])
    op.create_table(
        "policy_nodes",
        sa.Column("node", sa.String(128), nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("seen_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("node", name="pk_policy_nodes"),
    )


def downgrade() -> None:
    op.drop_table("policy_nodes")
    op.drop_table("policy")
