"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _create_webhooks_and_tasks()
    _create_sessions()
    _create_results_and_events()
    _create_policy()
    _create_nodes_and_tokens()


def _create_webhooks_and_tasks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", _sequence, primary_key=True),
        sa.Column("url", sa.String(2048), nullable=False, unique=True),
        sa.Column("cursor", sa.BigInteger, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
        sa.Column("due_at", sa.Double, nullable=False, server_default="0"),
        sa.Column("error", sa.Text),
        sa.Column("delivered_at", sa.Double),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "tasks",
        sa.Column("seq", _sequence, primary_key=True),
        sa.Column("id", sa.String(128), nullable=False, unique=True),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("spec_digest", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("runtime", sa.String(64), nullable=False),
        sa.Column("early_stop", sa.Integer),
        sa.Column("harness", sa.String(64)),
        sa.Column("webhook_id", _sequence, sa.ForeignKey("webhooks.id")),
        sa.Column("webhook_events", sa.String(64)),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("cancelled_at", sa.Double),
        sqlite_autoincrement=True,
    )


def _create_sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("seq", _sequence, primary_key=True),
        sa.Column("id", sa.String(128), nullable=False, unique=True),
        sa.Column("task_id", sa.String(128), sa.ForeignKey("tasks.id"), nullable=False),
        sa.Column("sample", sa.Integer, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("runtime", sa.String(64), nullable=False),
        sa.Column("turn", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("lease_digest", sa.String(64)),
        sa.Column("node", sa.String(128)),
        sa.Column("lease_expires_at", sa.Double),
        sa.Column("not_before", sa.Double),
        sa.Column("progress", sa.Text, nullable=False),
        sa.Column("reward", sa.Double),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.UniqueConstraint("task_id", "sample"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_sessions_queue",
        "sessions",
        ["runtime", sa.text("priority DESC"), "turn", "seq"],
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


def _create_results_and_events() -> None:
    op.create_table(
        "results",
        sa.Column("seq", _sequence, primary_key=True),
        sa.Column("session_id", sa.String(128), sa.ForeignKey("sessions.id"), nullable=False, unique=True),
        sa.Column("task_id", sa.String(128), sa.ForeignKey("tasks.id"), nullable=False),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("reward", sa.Double),
        sa.Column("usable", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("sampled_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("trainable_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("result", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_results_task_id_seq", "results", ["task_id", "seq"])
    op.create_index(
        "ix_results_created_at",
        "results",
        ["created_at", "usable", "sampled_tokens", "trainable_tokens", "reward"],
    )
    op.create_table(
        "events",
        sa.Column("seq", _sequence, primary_key=True),
        sa.Column("session_id", sa.String(128), sa.ForeignKey("sessions.id"), nullable=False),
        sa.Column("task_id", sa.String(128), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("node", sa.String(128)),
        sa.Column("detail", sa.Text),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_session_id_seq", "events", ["session_id", "seq"])


def _create_policy() -> None:
    policy = op.create_table(
        "policy",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("path", sa.Text),
        sa.Column("newest", sa.Integer, nullable=False, server_default="0"),
        sa.Column("failure", sa.Text),
        sa.Column("fallback_version", sa.Integer),
        sa.Column("fallback_path", sa.Text),
        sa.Column("mode", sa.String(16)),
        sa.Column("holder", sa.String(128)),
        sa.Column("expires_at", sa.Double),
    )
    op.bulk_insert(policy, [{"id": 1, "step": 0, "version": 0}])
    op.create_table(
        "policy_nodes",
        sa.Column("node", sa.String(128), primary_key=True),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("seen_at", sa.Double, nullable=False),
    )


def _create_nodes_and_tokens() -> None:
    op.create_table(
        "nodes",
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("places", sa.Text, nullable=False, server_default="{}"),
        sa.Column("runtimes", sa.Text, nullable=False, server_default="[]"),
        sa.Column("drained_at", sa.Double),
        sa.Column("trouble", sa.Text),
    )
    op.create_table(
        "tokens",
        sa.Column("seq", _sequence, primary_key=True),
        sa.Column("id", sa.String(16), nullable=False, unique=True),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tokens_name", "tokens", ["name"])


def downgrade() -> None:
    tables = "tokens nodes policy_nodes policy events results sessions tasks webhooks"
    for table in tables.split():
        op.drop_table(table)
