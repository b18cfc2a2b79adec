"""Fair turns between tasks, early stop, and an event for every change of a session's status."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("tasks", sa.Column("early_stop", sa.Integer))
    op.add_column("sessions", sa.Column("turn", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("results", sa.Column("usable", sa.Boolean, nullable=False, server_default=sa.false()))
    op.drop_index("ix_sessions_queue", "sessions")
    op.create_index(
        "ix_sessions_queue",
        "sessions",
        ["runtime", sa.text("priority DESC"), "turn", "seq"],
        sqlite_where=sa.text("status = 'queued'"),
        postgresql_where=sa.text("status = 'queued'"),
    )
    op.create_table(
        "events",
        sa.Column("seq", _sequence, nullable=False),
        sa.Column("session_id", sa.String(128), nullable=False),
        sa.Column("task_id", sa.String(128), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("node", sa.String(128)),
        sa.Column("detail", sa.Text),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_events_session_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_session_id_seq", "events", ["session_id", "seq"])


def downgrade() -> None:
    op.drop_table("events")
    op.drop_index("ix_sessions_queue", "sessions")
    op.create_index(
        "ix_sessions_queue",
        "sessions",
        ["runtime", sa.text("priority DESC"), "seq"],
        sqlite_where=sa.text("status = 'queued'"),
        postgresql_where=sa.text("status = 'queued'"),
    )
    op.drop_column("results", "usable")
    op.drop_column("sessions", "turn")
    op.drop_column("tasks", "early_stop")
