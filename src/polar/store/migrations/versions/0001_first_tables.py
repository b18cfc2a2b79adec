"""The first tables: tasks, sessions, results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "tasks",
        sa.Column("seq", _sequence, nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("spec_digest", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("runtime", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("cancelled_at", sa.Double),
        sa.PrimaryKeyConstraint("seq", name="pk_tasks"),
        sa.UniqueConstraint("id", name="uq_tasks_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "sessions",
        sa.Column("seq", _sequence, nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("task_id", sa.String(128), nullable=False),
        sa.Column("sample", sa.Integer, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("runtime", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("node", sa.String(128)),
        sa.Column("lease_expires_at", sa.Double),
        sa.Column("progress", sa.Text, nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_sessions"),
        sa.UniqueConstraint("id", name="uq_sessions_id"),
        sa.UniqueConstraint("task_id", "sample", name="uq_sessions_task_id_sample"),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name="fk_sessions_task_id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_sessions_queue",
        "sessions",
        ["runtime", sa.text("priority DESC"), "seq"],
        sqlite_where=sa.text("status = 'queued'"),
        postgresql_where=sa.text("status = 'queued'"),
    )
    op.create_index(
        "ix_sessions_lease",
        "sessions",
        ["lease_expires_at"],
        sqlite_where=sa.text("lease_expires_at IS NOT NULL"),
        postgresql_where=sa.text("lease_expires_at IS NOT NULL"),
    )
    op.create_index("ix_sessions_status_seq", "sessions", ["status", "seq"])
    op.create_index("ix_sessions_task_id_status", "sessions", ["task_id", "status"])
    op.create_table(
        "results",
        sa.Column("seq", _sequence, nullable=False),
        sa.Column("session_id", sa.String(128), nullable=False),
        sa.Column("task_id", sa.String(128), nullable=False),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("reward", sa.Double),
        sa.Column("result", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_results"),
        sa.UniqueConstraint("session_id", name="uq_results_session_id"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="fk_results_session_id"),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name="fk_results_task_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_results_task_id_seq", "results", ["task_id", "seq"])


def downgrade() -> None:
    op.drop_table("results")
    op.drop_table("sessions")
    op.drop_table("tasks")
