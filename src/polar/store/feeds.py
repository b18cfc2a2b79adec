"""The feeds of results and events: rows in the order they were stored, read from a cursor on.

A feed is never read past a place that an open transaction may still fill. SQLite has one writer at a time, so
rows become visible in the order of their numbers. PostgreSQL hands numbers out before commit, so a lower one
may become visible after a higher one was read. There each transaction that appends to a feed first takes a
shared advisory lock that names the number the feed had come to, and a reader goes no further than the lowest
number so named. No one waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import Any

from sqlalchemy import Connection, Row, Select, func, insert, select, text

from polar.models.session import SessionEvent, SessionResult, SessionStatus
from polar.models.views import EventPage, ResultPage
from polar.store.database import Repository, reads
from polar.store.tables import events, results


class Feed(Enum):
    """A table that is read from a cursor on; the value tells its locks from all others."""

    RESULTS = 0x50
    EVENTS = 0x51

    @property
    def end(self) -> str:
        """SQL for the number that was handed out last."""
        sequence = f"{self.name.lower()}_seq_seq"
        return f"(SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM {sequence})"

    @property
    def first_key(self) -> int:
        return self.value << 56


_KEY = "((classid::bigint << 32) | objid::bigint)"
_LOWEST_OPEN = text(
    f"SELECT min({_KEY}) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database"
    " WHERE locktype = 'advisory' AND objsubid = 1 AND datname = current_database()"
    f" AND {_KEY} BETWEEN :first AND :last"
)


def announce(connection: Connection, feed: Feed) -> None:
    """Say that this transaction is about to append; before it is given a number."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock_shared({feed.first_key} + {feed.end})"))


def horizon(connection: Connection, feed: Feed) -> int:
    """The number up to which the feed is complete, for a query that comes after.

    The end is read before the locks: who takes a number up to it has its lock by then.
    """
    if connection.dialect.name != "postgresql":
        table = results if feed is Feed.RESULTS else events
        return connection.execute(select(func.max(table.c.seq))).scalar_one() or 0
    end = int(connection.execute(text(f"SELECT {feed.end}")).scalar_one())
    span = {"first": feed.first_key, "last": feed.first_key + (1 << 56) - 1}
    lowest = connection.execute(_LOWEST_OPEN, span).scalar_one()
    return end if lowest is None else min(end, int(lowest) - feed.first_key)


def event(
    row: Row[Any],
    status: SessionStatus,
    at: float,
    *,
    attempt: int | None = None,
    node: str | None = None,
    detail: str | None = None,
) -> dict[str, Any]:
    """What is stored of a session that enters a status."""
    return {
        "session_id": row.id,
        "task_id": row.task_id,
        "attempt": row.attempt if attempt is None else attempt,
        "status": status,
        "at": at,
        "node": node,
        "detail": detail,
    }


def record(connection: Connection, entered: Sequence[dict[str, Any]]) -> None:
    """Store events in the caller's transaction, so that they tell exactly what it did."""
    if entered:
        announce(connection, Feed.EVENTS)
        connection.execute(insert(events), entered)


class Events(Repository):
    """What happened to sessions."""

    @reads
    def of(self, connection: Connection, session_id: str) -> tuple[SessionEvent, ...]:
        """All of one session, in order."""
        return _events(
            connection, select(events).where(events.c.session_id == session_id).order_by(events.c.seq)
        )

    @reads
    def latest(self, connection: Connection, limit: int) -> tuple[SessionEvent, ...]:
        """The newest ones, newest first."""
        return _events(connection, select(events).order_by(events.c.seq.desc()).limit(limit))

    @reads
    def newest(self, connection: Connection) -> int:
        """The cursor after which only what is still to come is found."""
        return horizon(connection, Feed.EVENTS)

    @reads
    def after(self, connection: Connection, cursor: int, *, limit: int = 100) -> EventPage:
        """Those stored after `cursor`."""
        is_next = (events.c.seq > cursor) & (events.c.seq <= horizon(connection, Feed.EVENTS))
        found = _events(connection, select(events).where(is_next).order_by(events.c.seq).limit(limit))
        return EventPage(events=found, cursor=found[-1].seq if found else cursor)


def _events(connection: Connection, query: Select[Any]) -> tuple[SessionEvent, ...]:
    return tuple(SessionEvent(**row) for row in connection.execute(query).mappings())


class Results(Repository):
    """What came of every ended session."""

    @reads
    def after(
        self,
        connection: Connection,
        cursor: int,
        *,
        limit: int = 100,
        task_ids: Collection[str] | None = None,
    ) -> ResultPage:
        """The results stored after `cursor`; None: of all tasks."""
        end = horizon(connection, Feed.RESULTS)
        query = _after(cursor, task_ids).where(results.c.seq <= end).order_by(results.c.seq).limit(limit)
        rows = connection.execute(query).all()
        return ResultPage(
            results=tuple(SessionResult.model_validate_json(row.result) for row in rows),
            cursor=rows[-1].seq if rows else cursor,
            end=end,
        )

    @reads
    def is_end(self, connection: Connection, cursor: int, *, task_ids: Collection[str] | None = None) -> bool:
        """Whether nothing is stored after `cursor`, not even what `after` may not show yet."""
        return connection.execute(_after(cursor, task_ids).limit(1)).first() is None

    @reads
    def fencing_token(self, connection: Connection, session_id: str) -> int | None:
        """The token under which a session's result was stored, None while there is none."""
        query = select(results.c.fencing_token).where(results.c.session_id == session_id)
        return connection.execute(query).scalar_one_or_none()


def _after(cursor: int, task_ids: Collection[str] | None) -> Select[Any]:
    query = select(results.c.seq, results.c.result).where(results.c.seq > cursor)
    return query if task_ids is None else query.where(results.c.task_id.in_(task_ids))
