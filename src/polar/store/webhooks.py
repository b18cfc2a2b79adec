"""Webhooks as they are stored: each target's place in the feed of results, and how its last attempt went.

A target is a URL that tasks name. Its cursor moves on when everything before it was delivered, so nothing
that ended is passed over, whichever server delivers and whenever it dies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, exists, func, insert, select, update

from polar.models.component import view
from polar.models.session import SessionResult
from polar.models.task import WebhookEvent
from polar.models.views import Notice, TaskEnd, WebhookView
from polar.store.database import Repository, reads, writes
from polar.store.feeds import Feed, horizon
from polar.store.sessions import IS_OPEN, count_by_status
from polar.store.tables import results, sessions, tasks, webhooks

LONGEST_WAIT_SECONDS = 1_800.0
"""More than a claim (21 minutes) or a pause after a failure (5) may last. A target that would wait for longer
was given its time by a clock that was set back since."""


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


class Webhooks(Repository):
    """The targets, and what of the feed each has still to get."""

    async def claim(self, *, seconds: float) -> Target | None:
        """Deliver alone to a due target for which the feed holds something, the one served longest ago; None:
        there is none.

        Should this server die, another may deliver to it after these seconds.
        """
        id = await self._database.read(lambda connection: _due(connection, self._database.now()))
        return None if id is None else await self._claim(id, seconds)

    @writes
    def _claim(self, connection: Connection, id: int, seconds: float) -> Target | None:
        now = self._database.now()
        due = select(webhooks).where(webhooks.c.id == id, _may_be_tried(now))
        row = connection.execute(due.with_for_update(skip_locked=True)).one_or_none()
        if row is None:
            return None
        connection.execute(update(webhooks).where(webhooks.c.id == id).values(due_at=now + seconds))
        return Target(row.id, row.url, row.cursor, row.failures, now + seconds)

    @reads
    def read(self, connection: Connection, target: Target, *, limit: int) -> NoticeBatch:
        """The notices of a target's next results."""
        end = horizon(connection, Feed.RESULTS)
        is_new = (results.c.seq > target.cursor) & (results.c.seq <= end)
        is_next = is_new & (results.c.webhook_id == target.id)
        columns = results.c.seq, results.c.result, results.c.created_at, tasks.c.webhook_events
        feed = results.join(tasks, tasks.c.id == results.c.task_id)
        query = select(*columns).select_from(feed).where(is_next).order_by(results.c.seq).limit(limit)
        rows = connection.execute(query).all()
        notices = tuple((row.seq, notice) for row in rows for notice in _notices(connection, row, target.url))
        return NoticeBatch(notices, end if len(rows) < limit else rows[-1].seq)

    async def settle(
        self,
        target: Target,
        cursor: int,
        *,
        failures: int = 0,
        error: str | None = None,
        retry_seconds: float = 0.0,
    ) -> None:
        """End a claim: what lies before `cursor` was delivered, and with an error what follows failed.

        Nothing changes if the claim was over: another server has begun, and knows better.
        """
        now = self._database.now()
        due_at = now + retry_seconds if failures else 0.0
        values = {"cursor": cursor, "failures": failures, "error": error, "due_at": due_at}
        if cursor > target.cursor:
            values["delivered_at"] = now
        await self._end_claim(target, values)

    async def release(self, target: Target) -> None:
        """Give a claim up before anything came of it."""
        await self._end_claim(target, {"due_at": 0.0})

    @writes
    def _end_claim(self, connection: Connection, target: Target, values: Mapping[str, Any]) -> None:
        mine = (webhooks.c.id == target.id) & (webhooks.c.due_at == target.claim)
        connection.execute(update(webhooks).where(mine).values(values))

    @reads
    def all(self, connection: Connection) -> tuple[WebhookView, ...]:
        """Every target, oldest first."""
        rows = connection.execute(select(webhooks).order_by(webhooks.c.id)).all()
        return tuple(self._view(connection, row) for row in rows)

    def _view(self, connection: Connection, row: Row[Any]) -> WebhookView:
        is_waiting = (results.c.seq > row.cursor) & (results.c.webhook_id == row.id)
        query = select(func.count(), func.min(results.c.created_at)).where(is_waiting)
        lag, oldest = connection.execute(query).one()
        return view(
            WebhookView,
            row,
            lag=lag,
            lag_seconds=max(self._database.now() - oldest, 0.0) if lag else 0.0,
            retry_at=row.due_at if row.failures else None,
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


def _due(connection: Connection, now: float) -> int | None:
    """The target that was served longest ago, of those that are due and have something to get."""
    end = horizon(connection, Feed.RESULTS)
    is_new = (results.c.seq > webhooks.c.cursor) & (results.c.seq <= end)
    has_new = exists().where(is_new, results.c.webhook_id == webhooks.c.id)
    due = select(webhooks.c.id).where(_may_be_tried(now), has_new)
    return connection.execute(
        due.order_by(func.coalesce(webhooks.c.delivered_at, 0.0)).limit(1)
    ).scalar_one_or_none()


def _may_be_tried(now: float) -> ColumnElement[bool]:
    return (webhooks.c.due_at <= now) | (webhooks.c.due_at > now + LONGEST_WAIT_SECONDS)


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
    is_open = select(sessions.c.seq).where(sessions.c.task_id == task_id, IS_OPEN)
    if connection.execute(is_open.limit(1)).first() is not None:
        return False
    last = select(func.max(results.c.seq)).where(results.c.task_id == task_id)
    return bool(connection.execute(last).scalar_one() == seq)


def _task_end(connection: Connection, task_id: str) -> TaskEnd:
    counts = count_by_status(connection, sessions.c.task_id, sessions.c.task_id == task_id)
    mean = select(func.avg(results.c.reward)).where(results.c.task_id == task_id)
    return TaskEnd(sessions=counts[task_id], mean_reward=connection.execute(mean).scalar_one())
