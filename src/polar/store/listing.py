"""What the dashboard lists: sessions and tasks, the newest first, a page at a time, and the last hour."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, Connection, Integer, case, cast, func, select

from polar.errors import NotFound
from polar.models.component import view
from polar.models.dashboard import Minute, SessionRow, SessionRows, TaskRow, TaskRows
from polar.models.session import Progress, SessionResult
from polar.models.task import TaskStatus
from polar.models.views import SessionFilter
from polar.store.database import Repository, reads
from polar.store.sessions import (
    RUN_NAME,
    count_by_status,
    id_of_run,
    matching,
    next_page,
    origin_of,
    page_start,
    views,
    whole,
)
from polar.store.tables import results, runs, sessions, tasks
from polar.store.tasks import has_status, status_of

MINUTES = 60


class Listing(Repository):
    """Pages by key, not by number: the thousandth costs what the first does."""

    @reads
    def sessions(
        self,
        connection: Connection,
        wanted: SessionFilter = SessionFilter(),
        *,
        limit: int,
        before: str | None = None,
    ) -> SessionRows:
        """Those that match."""
        query = select(sessions, RUN_NAME).order_by(sessions.c.seq.desc()).limit(limit + 1)
        query = query.where(*matching(wanted))
        if before is not None:
            query = query.where(sessions.c.seq < page_start(before))
        rows = connection.execute(query).all()
        return SessionRows(sessions=tuple(map(_session, rows[:limit])), older=next_page(rows, limit))

    @reads
    def tasks(
        self,
        connection: Connection,
        *,
        status: TaskStatus | None = None,
        run: str | None = None,
        step: int | None = None,
        harness: str | None = None,
        text: str | None = None,
        limit: int,
        before: str | None = None,
    ) -> TaskRows:
        names = ("seq", "id", "step", "harness", "created_at", "cancelled_at")
        run_name = select(runs.c.name).where(runs.c.id == tasks.c.run_id).scalar_subquery().label("run")
        query = (
            select(*(tasks.c[name] for name in names), run_name).order_by(tasks.c.seq.desc()).limit(limit + 1)
        )
        if before is not None:
            query = query.where(tasks.c.seq < page_start(before))
        if status is not None:
            query = query.where(has_status(status))
        if run is not None:
            query = query.where(tasks.c.run_id == id_of_run(run))
        if step is not None:
            query = query.where(tasks.c.step == step)
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
        minute = whole(connection, (results.c.created_at - start) / 60)
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
