"""Tasks as they are stored: submitted once, then read, listed and cancelled."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, and_, exists, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar.errors import Conflict, NotFound
from polar.models.session import Progress, SessionStatus
from polar.models.task import TaskSpec, TaskStatus
from polar.models.views import TaskPage, TaskView
from polar.store.database import Database
from polar.store.sessions import cancel_rows, page_start, session_id
from polar.store.tables import results, sessions, tasks

_ENDED = [status.value for status in SessionStatus if status.ended]


def digest(spec: TaskSpec) -> str:
    """Equal for two ways of writing the same task: key order, defaults, a bare component name.

    Defaults are left out, so that a field added later does not change the digest of older tasks.
    """
    document = spec.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


class Tasks:
    """All tasks that were ever acknowledged."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def submit(self, spec: TaskSpec) -> tuple[TaskView, bool]:
        """Store a task with its sessions, all or nothing; False: the same task was there already."""
        async with self._database.write() as connection:
            query = select(tasks.c.spec_digest).where(tasks.c.id == spec.id)
            stored = (await connection.execute(query)).scalar_one_or_none()
            if stored is None:
                return await self._insert(connection, spec), True
            if stored != digest(spec):
                raise Conflict(f"task {spec.id!r} exists with other content", hint="choose another id")
            return await self._get(connection, spec.id), False

    async def get(self, id: str) -> TaskView:
        async with self._database.read() as connection:
            return await self._get(connection, id)

    async def page(
        self, *, status: TaskStatus | None = None, limit: int = 100, after: str | None = None
    ) -> TaskPage:
        """Tasks in the order in which they were submitted."""
        query = select(tasks).where(tasks.c.seq > page_start(after)).order_by(tasks.c.seq).limit(limit + 1)
        if status is not None:
            query = query.where(_has_status(status))
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
            views = await _views(connection, rows[:limit])
        return TaskPage(tasks=tuple(views), next=str(rows[limit - 1].seq) if len(rows) > limit else None)

    async def cancel(self, id: str) -> TaskView:
        """Cancel every session of the task that has not ended."""
        now = self._database.now()
        async with self._database.write() as connection:
            query = select(sessions).where(sessions.c.task_id == id, sessions.c.status.not_in(_ENDED))
            rows = (await connection.execute(query.with_for_update())).all()
            if await cancel_rows(connection, rows, now):
                await connection.execute(
                    update(tasks)
                    .where(tasks.c.id == id, tasks.c.cancelled_at.is_(None))
                    .values(cancelled_at=now)
                )
            return await self._get(connection, id)

    async def _insert(self, connection: AsyncConnection, spec: TaskSpec) -> TaskView:
        now = self._database.now()
        queue = {"priority": spec.priority, "runtime": spec.runtime.name, "created_at": now}
        await connection.execute(
            insert(tasks).values(id=spec.id, spec=spec.model_dump_json(), spec_digest=digest(spec), **queue)
        )
        blank = {
            "task_id": spec.id,
            "status": SessionStatus.QUEUED.value,
            "attempt": 0,
            "fencing_token": 0,
            "progress": Progress().model_dump_json(),
            "cancel_requested": False,
            "updated_at": now,
        }
        await connection.execute(
            insert(sessions),
            [
                {"id": session_id(spec.id, sample), "sample": sample, **blank, **queue}
                for sample in range(spec.samples)
            ],
        )
        return TaskView(
            spec=spec,
            status=TaskStatus.QUEUED,
            created_at=now,
            sessions={SessionStatus.QUEUED: spec.samples},
        )

    async def _get(self, connection: AsyncConnection, id: str) -> TaskView:
        row = (await connection.execute(select(tasks).where(tasks.c.id == id))).one_or_none()
        if row is None:
            raise NotFound(f"no task {id!r}", hint="`polar tasks` lists them")
        return (await _views(connection, [row]))[0]


async def _views(connection: AsyncConnection, rows: Sequence[Row[Any]]) -> list[TaskView]:
    ids = [row.id for row in rows]
    counts: dict[str, dict[SessionStatus, int]] = defaultdict(dict)
    counted = await connection.execute(
        select(sessions.c.task_id, sessions.c.status, func.count())
        .where(sessions.c.task_id.in_(ids))
        .group_by(sessions.c.task_id, sessions.c.status)
    )
    for task_id, status, count in counted:
        counts[task_id][SessionStatus(status)] = count
    averaged = await connection.execute(
        select(results.c.task_id, func.avg(results.c.reward))
        .where(results.c.task_id.in_(ids))
        .group_by(results.c.task_id)
    )
    rewards: dict[str, float | None] = {row[0]: row[1] for row in averaged}
    return [
        TaskView(
            spec=TaskSpec.model_validate_json(row.spec),
            status=_status(counts[row.id], row.cancelled_at is not None),
            created_at=row.created_at,
            sessions=counts[row.id],
            mean_reward=rewards.get(row.id),
        )
        for row in rows
    ]


def _status(counts: dict[SessionStatus, int], was_cancelled: bool) -> TaskStatus:
    if counts.keys() <= {SessionStatus.QUEUED}:
        return TaskStatus.QUEUED
    if not all(status.ended for status in counts):
        return TaskStatus.RUNNING
    if was_cancelled or counts.keys() == {SessionStatus.CANCELLED}:
        return TaskStatus.CANCELLED
    return TaskStatus.FINISHED


def _has_status(status: TaskStatus) -> ColumnElement[bool]:
    """`_status` as a condition on rows of `tasks`."""

    def some(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
        return exists().where(sessions.c.task_id == tasks.c.id, *conditions)

    begun = some(sessions.c.status != SessionStatus.QUEUED.value)
    is_open = some(sessions.c.status.not_in(_ENDED))
    uncancelled = some(sessions.c.status != SessionStatus.CANCELLED.value)
    cancelled = or_(tasks.c.cancelled_at.is_not(None), ~uncancelled)
    match status:
        case TaskStatus.QUEUED:
            return ~begun
        case TaskStatus.RUNNING:
            return and_(begun, is_open)
        case TaskStatus.CANCELLED:
            return and_(~is_open, cancelled)
        case TaskStatus.FINISHED:
            return and_(~is_open, ~cancelled)
