"""Webhooks as they are stored: each target's place in the feed of results, and how its last attempt went.

A target is a URL that tasks name. Its cursor moves on when everything before it was delivered, so nothing
that ended is passed over, whichever server delivers and whenever it dies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from polar.models.session import SessionResult, SessionStatus
from polar.models.views import Notice, TaskEnd
from polar.models.webhook import WebhookEvent, WebhookView
from polar.store.database import Database
from polar.store.feeds import Feed, horizon
from polar.store.tables import results, sessions, tasks, webhooks

MAX_IDLE_RESULTS = 1_000
"""How many results of others a target's cursor may stay behind: that many are read again after a restart."""

_ENDED = [status.value for status in SessionStatus if status.ended]
_FEED = results.join(tasks, tasks.c.id == results.c.task_id)


@dataclass(frozen=True, slots=True)
class Target:
    """A webhook that this server alone delivers to, until its claim ends."""

    id: int
    url: str
    cursor: int
    failures: int
    claim: float
    """When the claim ends; tells it from a later one."""


@dataclass(frozen=True, slots=True)
class NoticeBatch:
    """What a target gets next."""

    notices: tuple[tuple[int, Notice], ...]
    """Each with its place in the feed."""
    cursor: int
    """Where the target stands once all of them are delivered."""
    is_last: bool
    """Whether the feed holds no more for it now."""


class Webhooks:
    """The targets, and what of the feed each has still to get."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find_new(self, after: int | None) -> tuple[set[int], int]:
        """The targets of results stored after a place in the feed, and up to where it was read.

        None: every target that may be behind.
        """

        def look(connection: Connection) -> tuple[set[int], int]:
            end = _end(connection)
            query = select(webhooks.c.id).where(webhooks.c.cursor < end)
            if after is not None:
                is_new = (results.c.seq > after) & (results.c.seq <= end)
                query = select(tasks.c.webhook_id).distinct().select_from(_FEED)
                query = query.where(is_new, tasks.c.webhook_id.is_not(None))
            return set(connection.execute(query).scalars()) if end != after else set(), end

        return await self._database.read(look)

    async def find_due(self, ids: Collection[int]) -> list[int]:
        """Those of these targets that nobody delivers to and that wait for no retry, longest due first."""
        due = select(webhooks.c.id).where(webhooks.c.id.in_(ids), webhooks.c.due_at <= self._database.now())
        due = due.order_by(webhooks.c.due_at)
        if not ids:
            return []
        return await self._database.read(lambda connection: list(connection.execute(due).scalars()))

    async def claim(self, id: int, *, seconds: float) -> Target | None:
        """Deliver to a target alone; should this server die, another may after these seconds."""

        def change(connection: Connection) -> Target | None:
            now = self._database.now()
            due = select(webhooks).where(webhooks.c.id == id, webhooks.c.due_at <= now)
            row = connection.execute(due.with_for_update(skip_locked=True)).one_or_none()
            if row is None:
                return None
            connection.execute(update(webhooks).where(webhooks.c.id == id).values(due_at=now + seconds))
            return Target(id, row.url, row.cursor, row.failures, now + seconds)

        return await self._database.write(change)

    async def release(self, target: Target) -> None:
        """Give a claim up before anything came of it."""
        mine = (webhooks.c.id == target.id) & (webhooks.c.due_at == target.claim)
        values = {"due_at": self._database.now()}
        await self._database.write(
            lambda connection: connection.execute(update(webhooks).where(mine).values(values))
        )

    async def read(self, target: Target, *, limit: int) -> NoticeBatch:
        """The notices of a target's next results."""

        def look(connection: Connection) -> NoticeBatch:
            end = _end(connection)
            is_new = (results.c.seq > target.cursor) & (results.c.seq <= end)
            is_next = is_new & (tasks.c.webhook_id == target.id)
            columns = results.c.seq, results.c.result, results.c.created_at, tasks.c.webhook_events
            query = select(*columns).select_from(_FEED).where(is_next).order_by(results.c.seq).limit(limit)
            rows = connection.execute(query).all()
            notices = tuple(
                (row.seq, notice) for row in rows for notice in _notices(connection, row, target.url)
            )
            is_last = len(rows) < limit
            return NoticeBatch(notices, end if is_last else rows[-1].seq, is_last)

        return await self._database.read(look)

    async def settle(
        self, target: Target, cursor: int, *, error: str | None = None, retry_seconds: float = 0.0
    ) -> bool:
        """End a claim: what lies before `cursor` was delivered, and with an error what follows failed.

        False if the claim was over: another server has begun, and knows better.
        """
        now = self._database.now()
        values: dict[str, Any] = {"cursor": cursor, "error": error, "due_at": now + retry_seconds}
        has_moved = cursor > target.cursor
        values["failures"] = 0 if error is None else 1 if has_moved else target.failures + 1
        if has_moved:
            values["delivered_at"] = now
        mine = (webhooks.c.id == target.id) & (webhooks.c.due_at == target.claim)
        change = update(webhooks).where(mine).values(values)
        return await self._database.write(lambda connection: connection.execute(change).rowcount > 0)

    async def skip_idle(self, behind: Collection[int], end: int) -> None:
        """Move the cursors of all other targets on: the feed holds nothing for them up to `end`."""
        idle = (webhooks.c.cursor < end - MAX_IDLE_RESULTS) & webhooks.c.id.not_in(behind)

        def look(connection: Connection) -> bool:
            return connection.execute(select(webhooks.c.id).where(idle).limit(1)).first() is not None

        if await self._database.read(look):
            await self._database.write(
                lambda connection: connection.execute(update(webhooks).where(idle).values(cursor=end))
            )

    async def all(self) -> tuple[WebhookView, ...]:
        """Every target, oldest first."""

        def look(connection: Connection) -> tuple[WebhookView, ...]:
            rows = connection.execute(select(webhooks).order_by(webhooks.c.id)).all()
            return tuple(self._view(connection, row) for row in rows)

        return await self._database.read(look)

    def _view(self, connection: Connection, row: Row[Any]) -> WebhookView:
        is_waiting = (results.c.seq > row.cursor) & (tasks.c.webhook_id == row.id)
        query = select(func.count(), func.min(results.c.created_at)).select_from(_FEED).where(is_waiting)
        lag, oldest = connection.execute(query).one()
        return WebhookView(
            url=row.url,
            lag=lag,
            lag_seconds=max(self._database.now() - oldest, 0.0) if lag else 0.0,
            failures=row.failures,
            error=row.error,
            retry_at=row.due_at if row.failures else None,
            delivered_at=row.delivered_at,
        )


def target_ids(connection: Connection, urls: Collection[str]) -> dict[str, int]:
    """The targets of these URLs, in the caller's transaction; new ones begin where the feed has come to."""
    if not urls:
        return {}
    query = select(webhooks.c.url, webhooks.c.id).where(webhooks.c.url.in_(urls))
    known = {row.url for row in connection.execute(query)}
    if new := [url for url in urls if url not in known]:
        cursor = connection.execute(select(func.max(results.c.seq))).scalar_one() or 0
        connection.execute(insert(webhooks), [{"url": url, "cursor": cursor} for url in new])
    return {row.url: row.id for row in connection.execute(query)}


def _end(connection: Connection) -> int:
    """Up to where the feed of results is complete."""
    end = horizon(connection, Feed.RESULTS)
    return end if end is not None else connection.execute(select(func.max(results.c.seq))).scalar_one() or 0


def _notices(connection: Connection, row: Any, url: str) -> list[Notice]:
    """What is sent on a result: the same whenever and by whichever server it is read."""
    result = SessionResult.model_validate_json(row.result)
    notices = []
    for event in map(WebhookEvent, row.webhook_events.split(",")):
        about = result.session_id if event is WebhookEvent.SESSION_ENDED else result.task_id
        whole = f"{url}\n{event.value}\n{about}\n{row.created_at}"
        head = {
            "id": hashlib.sha256(whole.encode()).hexdigest()[:32],
            "event": event,
            "task_id": result.task_id,
            "at": row.created_at,
        }
        if event is WebhookEvent.SESSION_ENDED:
            notices.append(Notice(**head, session_id=result.session_id, result=result))
        elif _is_end_of_task(connection, result.task_id, row.seq):
            notices.append(Notice(**head, task=_task_end(connection, result.task_id)))
    return notices


def _is_end_of_task(connection: Connection, task_id: str, seq: int) -> bool:
    """Whether this result is the last of a task of which no session is left."""
    is_open = select(sessions.c.seq).where(sessions.c.task_id == task_id, sessions.c.status.not_in(_ENDED))
    if connection.execute(is_open.limit(1)).first() is not None:
        return False
    last = select(func.max(results.c.seq)).where(results.c.task_id == task_id)
    return bool(connection.execute(last).scalar_one() == seq)


def _task_end(connection: Connection, task_id: str) -> TaskEnd:
    counted = select(sessions.c.status, func.count()).where(sessions.c.task_id == task_id)
    mean = select(func.avg(results.c.reward)).where(results.c.task_id == task_id)
    return TaskEnd(
        sessions={
            SessionStatus(status): count
            for status, count in connection.execute(counted.group_by(sessions.c.status))
        },
        mean_reward=connection.execute(mean).scalar_one(),
    )
