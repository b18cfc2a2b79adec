"""What it means that a session is leased, for all who must respect it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from polar.errors import Conflict
from polar.models.session import SessionStatus, StageEntry
from polar.store.events import Entry
from polar.store.sessions import HELD
from polar.store.tables import sessions

_STAGES = tuple(SessionStatus)
"""In the order in which a session enters them."""

BATCH = 500
"""Rows handled by one statement: well below every database's limit on parameters."""


def rows_of(connection: Connection, ids: Sequence[str]) -> list[Row[Any]]:
    """The sessions of these ids that there are, locked."""
    rows: list[Row[Any]] = []
    for start in range(0, len(ids), BATCH):
        # Everyone locks in the same order, so that no two wait for each other.
        query = select(sessions).where(sessions.c.id.in_(ids[start : start + BATCH])).order_by(sessions.c.seq)
        rows += connection.execute(query.with_for_update(key_share=True)).all()
    return rows


def is_held(row: Any, fencing_token: int) -> bool:
    """Whether the lease with this token is the session's own."""
    return SessionStatus(row.status) in HELD and bool(row.fencing_token == fencing_token)


def fenced_off(session_id: str) -> Conflict:
    return Conflict(f"session {session_id!r} is no longer leased under this fencing token")


def entries(row: Row[Any], entered: Sequence[StageEntry], now: float) -> list[Entry]:
    """The events of the stages that a node says its session has entered, without those it said before."""
    return [
        Entry(row.id, row.task_id, row.attempt, entry.status, now - entry.seconds_ago, row.node)
        for entry in entered
        if _STAGES.index(entry.status) > _STAGES.index(SessionStatus(row.status))
    ]
