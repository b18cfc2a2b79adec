"""Tokens with roles, the audit log, and callbacks that follow the feed of results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("tasks", sa.Column("callback", sa.Text))
    _make_tokens()
    _make_audit()
    _make_callbacks()


def _make_tokens() -> None:
    op.create_table(
        "tokens",
        sa.Column("seq", _sequence, nullable=False),
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.PrimaryKeyConstraint("seq", name="pk_tokens"),
        sa.UniqueConstraint("id", name="uq_tokens_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tokens_name", "tokens", ["name"])


def _make_audit() -> None:
    op.create_table(
        "audit",
        sa.Column("seq", _sequence, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("actor", sa.String(128)),
        sa.Column("role", sa.String(16)),
        sa.Column("address", sa.String(64)),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("object", sa.String(256)),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("detail", sa.Text),
        sa.PrimaryKeyConstraint("seq", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_at", "audit", ["at"])


def _make_callbacks() -> None:
    op.create_table(
        "callbacks",
        sa.Column("seq", _sequence, nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("task_id", sa.String(128), nullable=False),
        sa.Column("session_id", sa.String(128)),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_at", sa.Double, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name="fk_callbacks_task_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_callbacks"),
        sa.UniqueConstraint("id", name="uq_callbacks_id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_callbacks_due",
        "callbacks",
        ["due_at"],
        sqlite_where=sa.text("status = 'waiting'"),
        postgresql_where=sa.text("status = 'waiting'"),
    )
    op.create_index("ix_callbacks_status_seq", "callbacks", ["status", "seq"])
    op.create_index("ix_callbacks_task_id", "callbacks", ["task_id"])
    cursor = op.create_table(
        "callback_cursor",
        sa.Column("id", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("results_seq", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_callback_cursor"),
    )
    # No task that was stored before has a callback: begin where the feed has come to.
    last = op.get_bind().execute(sa.text("SELECT COALESCE(MAX(seq), 0) FROM results")).scalar_one()
    op.bulk_insert(cursor, [{"id": 1, "results_seq": last}])


def downgrade() -> None:
    for table in ("callback_cursor", "callbacks", "audit", "tokens"):
        op.drop_table(table)
    op.drop_column("tasks", "callback")
