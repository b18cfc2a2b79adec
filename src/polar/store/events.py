"""What happened to each session, in the order it was stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select

from polar.models.session import SessionEvent, SessionStatus
from polar.models.views import EventPage
from polar.store.database import Database
from polar.store.feed import Feed, announce, horizon
from polar.store.tables import events


@dataclass(frozen=True, slots=True)
class Entry:
    """An event about to be stored."""

    session_id: str
    task_id: str
    attempt: int
    status: SessionStatus
    at: float
    node: str | None = None
    detail: str | None = None


_COLUMNS = tuple(field.name for field in fields(Entry))


def record(connection: Connection, entries: Iterable[Entry]) -> None:
    """Store events in the caller's transaction, so that they tell exactly what it did."""
    rows = [{name: getattr(entry, name) for name in _COLUMNS} for entry in entries]
    if rows:
        announce(connection, Feed.EVENTS)
        connection.execute(insert(events), rows)


class Events:
    """Reading what was recorded."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(self, session_id: str) -> tuple[SessionEvent, ...]:
        query = select(events).where(events.c.session_id == session_id).order_by(events.c.seq)
        return await self._database.read(lambda connection: tuple(map(_event, connection.execute(query))))

    async def latest(self, limit: int) -> tuple[SessionEvent, ...]:
        """The newest ones, newest first."""
        query = select(events).order_by(events.c.seq.desc()).limit(limit)
        return await self._database.read(lambda connection: tuple(map(_event, connection.execute(query))))

    async def newest(self) -> int:
        """The cursor after which only what is still to come is found."""

        def look(connection: Connection) -> int:
            end = horizon(connection, Feed.EVENTS)
            if end is not None:
                return end
            return connection.execute(select(func.max(events.c.seq))).scalar_one() or 0

        return await self._database.read(look)

    async def after(self, cursor: int, *, limit: int = 100) -> EventPage:
        query = select(events).where(events.c.seq > cursor).order_by(events.c.seq).limit(limit)

        def look(connection: Connection) -> tuple[SessionEvent, ...]:
            end = horizon(connection, Feed.EVENTS)
            bounded = query if end is None else query.where(events.c.seq <= end)
            return tuple(map(_event, connection.execute(bounded)))

        found = await self._database.read(look)
        return EventPage(events=found, cursor=found[-1].seq if found else cursor)


def _event(row: Row[Any]) -> SessionEvent:
    return SessionEvent.model_validate(dict(row._mapping))
