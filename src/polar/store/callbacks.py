"""Callbacks as they are stored: made by following the feed of results, claimed by one server at a time.

A cursor says how far the feed has been looked through. What is found and the cursor are stored together,
so nothing that ended is passed over or told twice, whichever server looks and whenever it dies.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, insert, literal, select, update

from polar.errors import NotFound
from polar.models.callback import Callback, CallbackEvent, CallbackPage, CallbackStatus, CallbackView
from polar.models.notice import Notice, TaskEnd
from polar.models.session import SessionResult, SessionStatus
from polar.store.database import BATCH, Database
from polar.store.feed import Feed, horizon
from polar.store.sessions import page_start
from polar.store.tables import callback_cursor, callbacks, results, sessions, tasks

KEEP_CURSOR_EVERY = 1_000
"""Results without a callback after which the cursor is stored all the same."""

_ENDED = [status.value for status in SessionStatus if status.ended]

# A bound parameter would keep the planner from seeing that the partial index applies.
_IS_WAITING = callbacks.c.status == literal(CallbackStatus.WAITING.value, literal_execute=True)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A callback that this server tries now."""

    id: str
    url: str
    attempt: int
    notice: Notice


class Callbacks:
    """What is to be told, what was, and what was given up."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen = 0
        """Up to here the feed was looked through by this process, with or without anything found."""

    async def follow(self) -> bool:
        """Make callbacks of a piece of the feed; whether there was any of it."""

        def ahead(connection: Connection) -> bool:
            end = connection.execute(select(func.max(results.c.seq))).scalar_one()
            return end is not None and end > self._seen

        if not await self._database.read(ahead):
            return False
        seen = self._seen
        last = await self._database.write(lambda connection: _follow(connection, seen, self._database.now()))
        self._seen = max(self._seen, last)
        return last > seen

    async def claim(self, limit: int, *, seconds: float) -> list[Claimed]:
        """Take callbacks whose time has come; should this server die, another may in so many seconds."""

        def change(connection: Connection) -> list[Claimed]:
            now = self._database.now()
            due = select(callbacks).where(_IS_WAITING, callbacks.c.due_at <= now)
            due = due.order_by(callbacks.c.due_at).limit(limit).with_for_update(skip_locked=True)
            rows = connection.execute(due).all()
            if not rows:
                return []
            connection.execute(
                update(callbacks)
                .where(callbacks.c.seq.in_([row.seq for row in rows]))
                .values(due_at=now + seconds, attempts=callbacks.c.attempts + 1)
            )
            return [Claimed(row.id, row.url, row.attempts + 1, _notice(connection, row)) for row in rows]

        return await self._database.write(change)

    async def delivered(self, claimed: Claimed) -> None:
        """Its receiver has taken it."""
        await self._settle(claimed, status=CallbackStatus.DELIVERED.value, ended_at=self._database.now())

    async def failed(self, claimed: Claimed, error: str, *, retry_seconds: float | None) -> None:
        """Try again later; None: give it up."""
        now = self._database.now()
        if retry_seconds is not None:
            await self._settle(claimed, error=error, due_at=now + retry_seconds)
        else:
            await self._settle(claimed, error=error, status=CallbackStatus.DEAD.value, ended_at=now)

    async def _settle(self, claimed: Claimed, **values: Any) -> None:
        # Where a later attempt has begun, this one says nothing any more.
        mine = (callbacks.c.id == claimed.id) & (callbacks.c.attempts == claimed.attempt) & _IS_WAITING
        await self._database.write(
            lambda connection: connection.execute(update(callbacks).where(mine).values(values))
        )

    async def page(
        self,
        *,
        status: CallbackStatus | None = None,
        task_id: str | None = None,
        limit: int = 100,
        before: str | None = None,
    ) -> CallbackPage:
        """Callbacks, newest first."""
        query = select(callbacks).order_by(callbacks.c.seq.desc()).limit(limit + 1)
        if before is not None:
            query = query.where(callbacks.c.seq < page_start(before))
        if status is not None:
            query = query.where(callbacks.c.status == status.value)
        if task_id is not None:
            query = query.where(callbacks.c.task_id == task_id)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        shown = rows[:limit]
        return CallbackPage(
            callbacks=tuple(_view(row) for row in shown),
            next=str(shown[-1].seq) if len(rows) > limit else None,
        )

    async def retry(self, id: str) -> CallbackView:
        """Begin anew with one that was given up, and try one that waits at once; else nothing changes."""

        def change(connection: Connection) -> CallbackView:
            one = callbacks.c.id == id
            connection.execute(
                update(callbacks)
                .where(one, callbacks.c.status != CallbackStatus.DELIVERED.value)
                .values(
                    status=CallbackStatus.WAITING.value,
                    attempts=0,
                    due_at=self._database.now(),
                    ended_at=None,
                )
            )
            row = connection.execute(select(callbacks).where(one)).one_or_none()
            if row is None:
                raise NotFound(f"no callback {id!r}", hint="`polar callbacks` lists them")
            return _view(row)

        return await self._database.write(change)

    async def counts(self) -> dict[CallbackStatus, int]:
        """How many wait and how many were given up: the index knows; those delivered are not counted."""
        open_ended = (CallbackStatus.WAITING, CallbackStatus.DEAD)
        query = (
            select(callbacks.c.status, func.count())
            .where(callbacks.c.status.in_([status.value for status in open_ended]))
            .group_by(callbacks.c.status)
        )
        found = await self._database.read(lambda connection: connection.execute(query).all())
        return dict.fromkeys(open_ended, 0) | {CallbackStatus(status): count for status, count in found}

    async def next_due(self) -> float | None:
        """In how many seconds one is to be tried; None: none waits."""
        query = select(func.min(callbacks.c.due_at)).where(_IS_WAITING)
        due = await self._database.read(lambda connection: connection.execute(query).scalar_one())
        return None if due is None else max(float(due) - self._database.now(), 0.0)


def _follow(connection: Connection, seen: int, now: float) -> int:
    """Look through a piece of the feed; up to where it is looked through then."""
    stored = connection.execute(select(callback_cursor).with_for_update()).one().results_seq
    start = max(stored, seen)
    end = horizon(connection, Feed.RESULTS)
    query = (
        select(results.c.seq, results.c.session_id, results.c.task_id, tasks.c.callback)
        .join(tasks, tasks.c.id == results.c.task_id)
        .where(results.c.seq > start)
        .order_by(results.c.seq)
        .limit(BATCH)
    )
    rows = connection.execute(query if end is None else query.where(results.c.seq <= end)).all()
    if not rows:
        return int(start)
    made = _made(connection, [row for row in rows if row.callback is not None], now)
    if made:
        connection.execute(insert(callbacks), made)
    last = int(rows[-1].seq)
    if made or last - stored >= KEEP_CURSOR_EVERY:
        connection.execute(update(callback_cursor).values(results_seq=last))
    return last


def _made(connection: Connection, rows: Sequence[Any], now: float) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    told: set[str] = set()
    for row in rows:
        wanted = Callback.model_validate_json(row.callback)
        new = {
            "task_id": row.task_id,
            "url": wanted.url,
            "status": CallbackStatus.WAITING.value,
            "attempts": 0,
            "due_at": now,
            "created_at": now,
        }
        if CallbackEvent.SESSION_ENDED in wanted.events:
            made.append({**new, "session_id": row.session_id, **_kind(CallbackEvent.SESSION_ENDED)})
        is_asked_for = CallbackEvent.TASK_ENDED in wanted.events and row.task_id not in told
        if is_asked_for and _has_just_ended(connection, row.task_id):
            told.add(row.task_id)
            made.append({**new, "session_id": None, **_kind(CallbackEvent.TASK_ENDED)})
    return made


def _kind(event: CallbackEvent) -> dict[str, Any]:
    return {"id": secrets.token_hex(16), "event": event.value}


def _has_just_ended(connection: Connection, task_id: str) -> bool:
    """Whether no session of the task is left, and nobody was told yet."""
    is_open = select(sessions.c.seq).where(sessions.c.task_id == task_id, sessions.c.status.not_in(_ENDED))
    if connection.execute(is_open.limit(1)).first() is not None:
        return False
    told = select(callbacks.c.seq).where(
        callbacks.c.task_id == task_id, callbacks.c.event == CallbackEvent.TASK_ENDED.value
    )
    return connection.execute(told.limit(1)).first() is None


def _notice(connection: Connection, row: Row[Any]) -> Notice:
    about = {"id": row.id, "event": CallbackEvent(row.event), "task_id": row.task_id, "at": row.created_at}
    if row.session_id is not None:
        query = select(results.c.result).where(results.c.session_id == row.session_id)
        text = connection.execute(query).scalar_one()
        result = SessionResult.model_validate_json(text)
        return Notice(**about, session_id=row.session_id, result=result)
    counted = connection.execute(
        select(sessions.c.status, func.count())
        .where(sessions.c.task_id == row.task_id)
        .group_by(sessions.c.status)
    )
    mean = select(func.avg(results.c.reward)).where(results.c.task_id == row.task_id)
    end = TaskEnd(
        sessions={SessionStatus(status): count for status, count in counted},
        mean_reward=connection.execute(mean).scalar_one(),
    )
    return Notice(**about, task=end)


def _view(row: Row[Any]) -> CallbackView:
    values = dict(row._mapping)
    del values["seq"]
    return CallbackView.model_validate(values)
