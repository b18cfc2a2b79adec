"""What the dashboard lists: sessions and tasks, the newest first, a page at a time, and the last hour."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, Integer, case, cast, func, select

from polar.errors import NotFound
from polar.models.component import view
from polar.models.dashboard import Minute, Reward, SessionRow, SessionRows, TaskRow, TaskRows
from polar.models.session import Progress, SessionResult, SessionStatus
from polar.models.task import TaskStatus
from polar.store.database import Repository, reads
from polar.store.sessions import count_by_status, next_page, origin_of, page_start, views
from polar.store.tables import results, sessions, tasks
from polar.store.tasks import has_status, status_of

MINUTES = 60


class Listing(Repository):
    """Pages by key, not by number: the thousandth costs what the first does."""

    @reads
    def sessions(
        self,
        connection: Connection,
        *,
        status: SessionStatus | None = None,
        task_id: str | None = None,
        node: str | None = None,
        reward: Reward | None = None,
        text: str | None = None,
        limit: int,
        before: str | None = None,
    ) -> SessionRows:
        """Those that match; `text` is a part of the session's id, which begins with its task's."""
        query = select(sessions).order_by(sessions.c.seq.desc()).limit(limit + 1)
        wanted = ((sessions.c.status, status), (sessions.c.task_id, task_id), (sessions.c.node, node))
        query = query.where(*(column == value for column, value in wanted if value is not None))
        if reward is not None:
            query = query.where(_HAS_REWARD[reward])
        if text:
            query = query.where(sessions.c.id.contains(text, autoescape=True))
        if before is not None:
            query = query.where(sessions.c.seq < page_start(before))
        rows = connection.execute(query).all()
        return SessionRows(sessions=tuple(map(_session, rows[:limit])), older=next_page(rows, limit))

    @reads
    def tasks(
        self,
        connection: Connection,
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
        rows = connection.execute(query).all()
        return TaskRows(tasks=_tasks(connection, rows[:limit]), older=next_page(rows, limit))

    @reads
    def group(self, connection: Connection, task_id: str) -> tuple[SessionRow, ...]:
        """All sessions of a task, by sample."""
        query = views().where(sessions.c.task_id == task_id).order_by(sessions.c.sample)
        rows = connection.execute(query).all()
        if not rows:
            raise NotFound(f"no task {task_id!r}", hint="`polar tasks` lists them")
        return tuple(_session(row).model_copy(update={"left_at": _left_at(row)}) for row in rows)

    @reads
    def minutes(self, connection: Connection) -> tuple[Minute, ...]:
        """What ended in each minute of the last hour, oldest first."""
        # Whole minutes by the clock: bars of a chart then stand still while it moves on.
        start = (self._database.now() // 60 - MINUTES + 1) * 60
        # PostgreSQL rounds where SQLite cuts off, and not every SQLite has a floor.
        since: ColumnElement[Any] = (results.c.created_at - start) / 60
        minute = cast(func.floor(since) if connection.dialect.name == "postgresql" else since, Integer)
        query = (
            select(
                minute.label("minute"),
                func.count().label("ended"),
                cast(func.sum(case((results.c.usable, 1), else_=0)), Integer).label("usable"),
                cast(func.sum(results.c.sampled_tokens), BigInteger).label("sampled_tokens"),
                cast(func.sum(results.c.trainable_tokens), BigInteger).label("trainable_tokens"),
                func.avg(results.c.reward).label("mean_reward"),
            )
            .where(results.c.created_at >= start)
            .group_by("minute")
        )
        found = {row.minute: row for row in connection.execute(query)}
        return tuple(view(Minute, found.get(place), at=start + 60 * place) for place in range(MINUTES))


_HAS_REWARD = {
    Reward.POSITIVE: sessions.c.reward > 0,
    Reward.ZERO: sessions.c.reward <= 0,
    Reward.NONE: sessions.c.reward.is_(None),
}


def _session(row: Any) -> SessionRow:
    progress = Progress.model_validate_json(row.progress)
    return view(
        SessionRow,
        row,
        origin=origin_of(row),
        completions=progress.completions,
        sampled_tokens=progress.sampled_tokens,
    )


def _left_at(row: Any) -> int | None:
    origin = origin_of(row)
    replay = SessionResult.model_validate_json(row.result).replay if origin and row.result else None
    if origin is None or replay is None:
        return None
    return replay.calls if origin.calls is None else min(replay.calls, origin.calls)


def _tasks(connection: Connection, rows: Sequence[Any]) -> tuple[TaskRow, ...]:
    of_these = sessions.c.task_id.in_([row.id for row in rows])
    counts = count_by_status(connection, sessions.c.task_id, of_these)
    rewards: dict[str, list[float]] = defaultdict(list)
    scored = (
        select(sessions.c.task_id, sessions.c.reward)
        .where(of_these, sessions.c.reward.is_not(None))
        .order_by(sessions.c.task_id, sessions.c.sample)
    )
    for task_id, reward in connection.execute(scored):
        rewards[task_id].append(reward)
    return tuple(
        view(
            TaskRow,
            row,
            status=status_of(counts[row.id], row.cancelled_at is not None),
            sessions=counts[row.id],
            rewards=tuple(rewards[row.id]),
        )
        for row in rows
    )
