"""What the dashboard lists: sessions and tasks, the newest first, a page at a time, and the last hour."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Case, Cast, ColumnElement, Connection, Integer, Select, case, cast, func, select

from polar.errors import NotFound
from polar.models.dashboard import Minute, Reward, SessionRow, SessionRows, TaskRow, TaskRows
from polar.models.session import Progress, SessionStatus
from polar.models.task import TaskStatus
from polar.store.database import Database
from polar.store.sessions import page_start
from polar.store.tables import results, sessions, tasks
from polar.store.tasks import has_status, status_of

MINUTES = 60


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Which sessions are wanted; None: any."""

    status: SessionStatus | None = None
    task_id: str | None = None
    node: str | None = None
    reward: Reward | None = None
    text: str | None = None
    """A part of the session's id, which begins with its task's."""


class Listing:
    """Pages by key, not by number: the thousandth costs what the first does."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def sessions(self, wanted: SessionFilter, *, limit: int, before: str | None) -> SessionRows:
        query = _matching(select(*_COLUMNS), wanted).order_by(sessions.c.seq.desc()).limit(limit + 1)
        if before is not None:
            query = query.where(sessions.c.seq < page_start(before))
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return SessionRows(sessions=tuple(map(_session, rows[:limit])), older=_older(rows, limit))

    async def tasks(
        self,
        *,
        status: TaskStatus | None,
        harness: str | None,
        text: str | None,
        limit: int,
        before: str | None,
    ) -> TaskRows:
        columns = (tasks.c.seq, tasks.c.id, tasks.c.harness, tasks.c.created_at, tasks.c.cancelled_at)
        query = select(*columns).order_by(tasks.c.seq.desc()).limit(limit + 1)
        if before is not None:
            query = query.where(tasks.c.seq < page_start(before))
        if status is not None:
            query = query.where(has_status(status))
        if harness is not None:
            query = query.where(tasks.c.harness == harness)
        if text:
            query = query.where(tasks.c.id.contains(text, autoescape=True))

        def look(connection: Connection) -> TaskRows:
            rows = connection.execute(query).all()
            return TaskRows(tasks=_tasks(connection, rows[:limit]), older=_older(rows, limit))

        return await self._database.read(look)

    async def group(self, task_id: str) -> tuple[SessionRow, ...]:
        """All sessions of a task, by sample."""
        query = select(*_COLUMNS).where(sessions.c.task_id == task_id).order_by(sessions.c.sample)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        if not rows:
            raise NotFound(f"no task {task_id!r}", hint="`polar tasks` lists them")
        return tuple(map(_session, rows))

    async def minutes(self) -> tuple[Minute, ...]:
        """What ended in each minute of the last hour, oldest first."""
        now = self._database.now()
        # Whole minutes by the clock: bars of a chart then stand still while it moves on.
        start = (now // 60 - MINUTES + 1) * 60
        return await self._database.read(lambda connection: _minutes(connection, start))


_COLUMNS = (
    sessions.c.seq,
    sessions.c.id,
    sessions.c.task_id,
    sessions.c.sample,
    sessions.c.status,
    sessions.c.attempt,
    sessions.c.node,
    sessions.c.reward,
    sessions.c.progress,
    sessions.c.created_at,
    sessions.c.updated_at,
)


def _matching(query: Select[Any], wanted: SessionFilter) -> Select[Any]:
    if wanted.status is not None:
        query = query.where(sessions.c.status == wanted.status.value)
    if wanted.task_id is not None:
        query = query.where(sessions.c.task_id == wanted.task_id)
    if wanted.node is not None:
        query = query.where(sessions.c.node == wanted.node)
    if wanted.text:
        query = query.where(sessions.c.id.contains(wanted.text, autoescape=True))
    match wanted.reward:
        case Reward.POSITIVE:
            query = query.where(sessions.c.reward > 0)
        case Reward.ZERO:
            query = query.where(sessions.c.reward <= 0)
        case Reward.NONE:
            query = query.where(sessions.c.reward.is_(None))
        case None:
            pass
    return query


def _older(rows: Sequence[Any], limit: int) -> str | None:
    return str(rows[limit - 1].seq) if len(rows) > limit else None


def _session(row: Any) -> SessionRow:
    progress = Progress.model_validate_json(row.progress)
    return SessionRow(
        id=row.id,
        task_id=row.task_id,
        sample=row.sample,
        status=SessionStatus(row.status),
        attempt=row.attempt,
        node=row.node,
        reward=row.reward,
        completions=progress.completions,
        sampled_tokens=progress.sampled_tokens,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _tasks(connection: Connection, rows: Sequence[Any]) -> tuple[TaskRow, ...]:
    counts: dict[str, dict[SessionStatus, int]] = defaultdict(dict)
    rewards: dict[str, list[float]] = defaultdict(list)
    of_these = sessions.c.task_id.in_([row.id for row in rows])
    counted = (
        select(sessions.c.task_id, sessions.c.status, func.count())
        .where(of_these)
        .group_by(sessions.c.task_id, sessions.c.status)
    )
    for task_id, status, count in connection.execute(counted):
        counts[task_id][SessionStatus(status)] = count
    scored = (
        select(sessions.c.task_id, sessions.c.reward)
        .where(of_these, sessions.c.reward.is_not(None))
        .order_by(sessions.c.task_id, sessions.c.sample)
    )
    for task_id, reward in connection.execute(scored):
        rewards[task_id].append(reward)
    return tuple(
        TaskRow(
            id=row.id,
            harness=row.harness,
            status=status_of(counts[row.id], row.cancelled_at is not None),
            created_at=row.created_at,
            sessions=counts[row.id],
            rewards=tuple(rewards[row.id]),
        )
        for row in rows
    )


def _minutes(connection: Connection, start: float) -> tuple[Minute, ...]:
    minute = _whole(connection, (results.c.created_at - start) / 60).label("minute")
    query = (
        select(
            minute,
            func.count(),
            func.sum(_one_where(results.c.usable)),
            func.sum(results.c.sampled_tokens),
            func.sum(results.c.trainable_tokens),
            func.avg(results.c.reward),
        )
        .where(results.c.created_at >= start)
        .group_by(minute)
    )
    found = {int(row[0]): row for row in connection.execute(query)}
    return tuple(
        Minute(
            at=start + 60 * place,
            ended=row[1],
            usable=int(row[2]),
            sampled_tokens=int(row[3]),
            trainable_tokens=int(row[4]),
            mean_reward=row[5],
        )
        if (row := found.get(place)) is not None
        else Minute(at=start + 60 * place)
        for place in range(MINUTES)
    )


def _whole(connection: Connection, value: ColumnElement[Any]) -> Cast[int]:
    # PostgreSQL rounds where SQLite cuts off, and not every SQLite has a floor.
    return cast(func.floor(value) if connection.dialect.name == "postgresql" else value, Integer)


def _one_where(condition: ColumnElement[bool]) -> Case[int]:
    return case((condition, 1), else_=0)
