"""What it means that a session is leased, for all who must respect it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select, update

from polar.errors import Conflict
from polar.models.session import FailureReason, LeaseKey, Progress, SessionResult, SessionStatus, StageEntry
from polar.store.events import Entry, record
from polar.store.sessions import HELD
from polar.store.tables import sessions

_STAGES = tuple(SessionStatus)
"""In the order in which a session enters them."""

BATCH = 500
"""Rows handled by one statement: well below every database's limit on parameters."""


LONGEST_PAUSE_SECONDS = 300.0
"""However often a session has failed, it is not kept back for longer."""


@dataclass(frozen=True, slots=True)
class Retries:
    """When a session is run again whose infrastructure failed."""

    max_attempts: int = 3
    """How often it is begun in all."""
    seconds: float = 5.0
    """How long it waits after its first attempt; twice as long after each further one."""

    def allows(self, result: SessionResult, attempt: int) -> bool:
        """Whether another attempt follows the one that came to this result."""
        return result.failure is FailureReason.INFRASTRUCTURE and attempt < self.max_attempts

    def pause(self, attempt: int) -> float:
        """The backoff after an attempt, counted from 1."""
        return float(min(self.seconds * 2.0 ** (attempt - 1), LONGEST_PAUSE_SECONDS))


def rows_of(connection: Connection, ids: Sequence[str]) -> list[Row[Any]]:
    """The sessions of these ids that there are, locked."""
    rows: list[Row[Any]] = []
    for start in range(0, len(ids), BATCH):
        # Everyone locks in the same order, so that no two wait for each other.
        query = select(sessions).where(sessions.c.id.in_(ids[start : start + BATCH])).order_by(sessions.c.seq)
        rows += connection.execute(query.with_for_update(key_share=True)).all()
    return rows


def digest(secret: str) -> str:
    """What is stored of a lease's secret: whoever reads the database or a back-up cannot use it."""
    return hashlib.sha256(secret.encode()).hexdigest()


def is_newest(row: Any, key: LeaseKey) -> bool:
    """Whether this is the key of the last lease that the session was given, held or not."""
    if row.fencing_token != key.fencing_token or row.lease_digest is None:
        return False
    return hmac.compare_digest(row.lease_digest, digest(key.secret))


def is_held(row: Any, key: LeaseKey) -> bool:
    """Whether the lease with this key is the session's own."""
    return SessionStatus(row.status) in HELD and is_newest(row, key)


def fenced_off(session_id: str) -> Conflict:
    return Conflict(f"session {session_id!r} is not leased under this key")


def entries(row: Row[Any], entered: Sequence[StageEntry], now: float) -> list[Entry]:
    """The events of the stages that a node says its session has entered, without those it said before."""
    return [
        Entry(row.id, row.task_id, row.attempt, entry.status, now - entry.seconds_ago, row.node)
        for entry in entered
        if _STAGES.index(entry.status) > _STAGES.index(SessionStatus(row.status))
    ]


def requeue(
    connection: Connection,
    rows: Sequence[Row[Any]],
    now: float,
    why: str,
    *,
    pause: float = 0.0,
    attempts_given_back: int = 0,
) -> None:
    """Put sessions back into the queue, to be leased once the pause is over."""
    if not rows:
        return
    connection.execute(
        update(sessions)
        .where(sessions.c.seq.in_([row.seq for row in rows]))
        .values(
            status=SessionStatus.QUEUED.value,
            attempt=sessions.c.attempt - attempts_given_back,
            node=None,
            lease_expires_at=None,
            not_before=now + pause if pause else None,
            progress=Progress().model_dump_json(),
            updated_at=now,
        )
    )
    queued = SessionStatus.QUEUED
    record(connection, [Entry(row.id, row.task_id, row.attempt, queued, now, row.node, why) for row in rows])
