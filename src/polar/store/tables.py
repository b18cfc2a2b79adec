"""The tables: tasks, their sessions, what happened to each, and the results of those that ended."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    literal,
    text,
)
from sqlalchemy.engine import Dialect

from polar.models.session import SessionStatus

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Words(TypeDecorator[str]):
    """What a program said. PostgreSQL's text holds no NUL, and nothing is refused because of one."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else value.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _partial_index(name: str, condition: str, *columns: ColumnElement[Any]) -> None:
    """An index of the rows that meet the condition."""
    where = text(condition)
    Index(name, *columns, sqlite_where=where, postgresql_where=where)


# SQLite counts rows only in a column declared exactly INTEGER.
Sequence = BigInteger().with_variant(Integer, "sqlite")

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("url", String(2048), nullable=False, unique=True),
    # Up to where the feed of results was delivered to it.
    Column("cursor", BigInteger, nullable=False),
    # Failed attempts in a row.
    Column("failures", Integer, nullable=False, server_default="0"),
    # When it may be tried; a server that tries it moves this on, so that no other does meanwhile.
    Column("due_at", Double, nullable=False, server_default="0"),
    Column("error", Words),
    Column("delivered_at", Double),
    sqlite_autoincrement=True,
)

runs = Table(
    "runs",
    metadata,
    Column("id", Sequence, primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    sqlite_autoincrement=True,
)

# What trainers report of their steps.
run_steps = Table(
    "run_steps",
    metadata,
    Column("run_id", Sequence, ForeignKey("runs.id"), primary_key=True),
    Column("step", BigInteger, primary_key=True, autoincrement=False),
    # By name, as JSON.
    Column("numbers", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)

tasks = Table(
    "tasks",
    metadata,
    Column("seq", Sequence, primary_key=True),
    Column("id", String(128), nullable=False, unique=True),
    Column("spec", Text, nullable=False),
    Column("spec_digest", String(64), nullable=False),
    Column("run_id", Sequence, ForeignKey("runs.id"), nullable=False),
    # The step of its run that learned from it.
    Column("step", BigInteger),
    Column("priority", Integer, nullable=False),
    Column("runtime", String(64), nullable=False),
    # These two are copied from the task, so that a result need not read the whole of it.
    Column("early_stop", Integer),
    Column("branching", Text),
    # Copied from the task, so that a list need not read the whole of it.
    Column("harness", String(64)),
    # Where its results are sent, if anywhere, and on which events.
    Column("webhook_id", Sequence, ForeignKey("webhooks.id")),
    Column("webhook_events", String(64)),
    Column("created_at", Double, nullable=False),
    Column("cancelled_at", Double),
    sqlite_autoincrement=True,
)

Index("ix_tasks_run_id_step", tasks.c.run_id, tasks.c.step)

sessions = Table(
    "sessions",
    metadata,
    Column("seq", Sequence, primary_key=True),
    Column("id", String(128), nullable=False, unique=True),
    Column("task_id", String(128), ForeignKey("tasks.id"), nullable=False),
    Column("sample", Integer, nullable=False),
    # Whose recorded answers it begins with, as JSON; None: nobody's.
    Column("origin", Text),
    # Copied from the origin, so that it is found by an index.
    Column("origin_id", String(128), ForeignKey("sessions.id")),
    # The request that added it to its task, as the client named it: the same again adds nothing.
    Column("request_id", String(128)),
    # These two are copied from the task, so that lists are filtered without it.
    Column("run_id", Sequence, nullable=False),
    Column("harness", String(64)),
    # Copied from the task, so that the queue's order is one index.
    Column("priority", Integer, nullable=False),
    Column("runtime", String(64), nullable=False),
    # Whose turn it is among tasks of the same priority; see store/tasks.py.
    Column("turn", BigInteger, nullable=False, server_default="0"),
    Column("status", String(16), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("fencing_token", BigInteger, nullable=False),
    # SHA-256 of the secret of its last lease; None: it was never leased.
    Column("lease_digest", String(64)),
    Column("node", String(128)),
    # Set exactly while a node holds the session.
    Column("lease_expires_at", Double),
    # Set while it waits for its next attempt after a failure; it is leased no sooner.
    Column("not_before", Double),
    Column("progress", Text, nullable=False),
    # Whether `captures` has something of it.
    Column("has_capture", Boolean, nullable=False, server_default=false()),
    # These are copied from the result, so that lists are filtered without it; a reward if it completed.
    Column("reward", Double),
    Column("model", Words),
    Column("version_min", BigInteger),
    Column("version_max", BigInteger),
    # Spent in all stages.
    Column("seconds", Double),
    Column("cancel_requested", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    UniqueConstraint("task_id", "sample"),
    sqlite_autoincrement=True,
)

# Only waiting sessions are in this index, in the order in which they are leased: a claim reads as
# many entries as it takes, however many wait and however many have ended.
_partial_index(
    "ix_sessions_queue",
    "status = 'queued'",
    sessions.c.runtime,
    sessions.c.priority.desc(),
    sessions.c.turn,
    sessions.c.seq,
)
_partial_index("ix_sessions_lease", "lease_expires_at IS NOT NULL", sessions.c.lease_expires_at)
_partial_index("ix_sessions_origin_id", "origin_id IS NOT NULL", sessions.c.origin_id)
Index("ix_sessions_status_seq", sessions.c.status, sessions.c.seq)
# Holds all that a list of runs sums up.
Index("ix_sessions_run_id_status", sessions.c.run_id, sessions.c.status, sessions.c.reward)
Index("ix_sessions_run_id_seq", sessions.c.run_id, sessions.c.seq)
Index("ix_sessions_task_id_status", sessions.c.task_id, sessions.c.status)

# A bound parameter would keep the planner from seeing that the partial index applies.
IS_QUEUED = sessions.c.status == literal(SessionStatus.QUEUED.value, literal_execute=True)

# What the attempts at a session that has not ended have captured, as it grew: the next one begins with it.
captures = Table(
    "captures",
    metadata,
    Column("session_id", String(128), ForeignKey("sessions.id"), primary_key=True),
    # Of the lease under which it was captured.
    Column("fencing_token", BigInteger, primary_key=True, autoincrement=False),
    # How many bytes this lease has sent with these, the last ones.
    Column("length", BigInteger, primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),
)

results = Table(
    "results",
    metadata,
    # The feed's cursor. SQLite has one writer at a time, so rows become visible in this order and no
    # gap is ever filled later. PostgreSQL hands numbers out before commit: there, storing a result
    # must take a lock, or the feed must stop below the oldest open transaction.
    Column("seq", Sequence, primary_key=True),
    Column("session_id", String(128), ForeignKey("sessions.id"), nullable=False, unique=True),
    Column("task_id", String(128), ForeignKey("tasks.id"), nullable=False),
    # Copied from the session, so that a run's rewards are read from an index.
    Column("run_id", Sequence, nullable=False),
    # Of the lease under which it was stored; names the recording that belongs to it.
    Column("fencing_token", BigInteger, nullable=False),
    # Only of completed sessions, so that a task's mean is one aggregate.
    Column("reward", Double),
    Column("usable", Boolean, nullable=False, server_default=false()),
    Column("sampled_tokens", BigInteger, nullable=False, server_default="0"),
    Column("trainable_tokens", BigInteger, nullable=False, server_default="0"),
    Column("result", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    # Copied from the task, so that a webhook finds its own results among all others by an index.
    Column("webhook_id", Sequence),
    sqlite_autoincrement=True,
)

Index("ix_results_task_id_seq", results.c.task_id, results.c.seq)
_partial_index("ix_results_webhook_id_seq", "webhook_id IS NOT NULL", results.c.webhook_id, results.c.seq)
# Holds all that the overview sums up, so that an hour's results are counted without reading them.
Index(
    "ix_results_created_at",
    results.c.created_at,
    results.c.usable,
    results.c.sampled_tokens,
    results.c.trainable_tokens,
    results.c.reward,
)

Index("ix_results_run_id_created_at", results.c.run_id, results.c.created_at, results.c.reward)

events = Table(
    "events",
    metadata,
    # The feed's cursor; see `results.seq`.
    Column("seq", Sequence, primary_key=True),
    Column("session_id", String(128), ForeignKey("sessions.id"), nullable=False),
    Column("task_id", String(128), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("at", Double, nullable=False),
    Column("node", String(128)),
    Column("detail", Words),
    sqlite_autoincrement=True,
)

Index("ix_events_session_id_seq", events.c.session_id, events.c.seq)

policy = Table(
    "policy",
    metadata,
    # One row, made with the table.
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("step", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    Column("path", Text),
    # The highest version ever asked for, also where no node could load it.
    Column("newest", Integer, nullable=False, server_default="0"),
    # Why it is not the version, where no node could load it.
    Column("failure", Words),
    # What nodes go back to if none of them can load these weights; set until one has.
    Column("fallback_version", Integer),
    Column("fallback_path", Text),
    # These three are set exactly while there is a pause.
    Column("mode", String(16)),
    Column("holder", String(128)),
    Column("expires_at", Double),
)

policy_nodes = Table(
    "policy_nodes",
    metadata,
    Column("node", String(128), primary_key=True),
    Column("step", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    Column("error", Words),
    Column("seen_at", Double, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", String(128), primary_key=True),
    # How many sessions each of its stages takes, as JSON.
    Column("places", Text, nullable=False, server_default="{}"),
    # Which runtimes it allows tasks to name, as JSON.
    Column("runtimes", Text, nullable=False, server_default="[]"),
    # Set while it is leased nothing.
    Column("drained_at", Double),
    # Why it takes no more sessions, by its own account.
    Column("trouble", Words),
)

tokens = Table(
    "tokens",
    metadata,
    Column("seq", Sequence, primary_key=True),
    # The part of a token that may be shown.
    Column("id", String(16), nullable=False, unique=True),
    # At most one token of a name is live.
    Column("name", String(128), nullable=False),
    Column("role", String(16), nullable=False),
    # SHA-256 of the whole token: 256 random bits need no salt and no slow hash.
    Column("digest", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    sqlite_autoincrement=True,
)

Index("ix_tokens_name", tokens.c.name)
