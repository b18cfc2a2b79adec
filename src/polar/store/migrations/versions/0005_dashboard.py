"""What lists and the overview show of a session, in columns of their own and an index over time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_COUNTS = ("sampled_tokens", "trainable_tokens")


def upgrade() -> None:
    op.add_column("tasks", sa.Column("harness", sa.String(64)))
    op.add_column("sessions", sa.Column("reward", sa.Double))
    for name in _COUNTS:
        op.add_column("results", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    op.execute(
        "UPDATE sessions SET reward ="
        " (SELECT results.reward FROM results WHERE results.session_id = sessions.id)"
    )
    op.execute(f"UPDATE tasks SET harness = {_field('spec', 'harness', 'name')}")
    for name in _COUNTS:
        value = _field("result", "stats", name)
        op.execute(f"UPDATE results SET {name} = CAST(COALESCE({value}, '0') AS BIGINT)")
    op.create_index(
        "ix_results_created_at",
        "results",
        ["created_at", "usable", *_COUNTS, "reward"],
    )


def downgrade() -> None:
    op.drop_index("ix_results_created_at", "results")
    for name in _COUNTS:
        op.drop_column("results", name)
    op.drop_column("sessions", "reward")
    op.drop_column("tasks", "harness")


def _field(column: str, *path: str) -> str:
    """SQL for a field of a JSON document that is stored as text."""
    if op.get_bind().dialect.name == "postgresql":
        return f"CAST({column} AS json) #>> '{{{','.join(path)}}}'"
    return f"json_extract({column}, '$.{'.'.join(path)}')"
