"""Branches as they are stored: sessions added to a task, which begin with another's recorded answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, insert, select

from polar.errors import Conflict, NotFound
from polar.models.session import Origin, SessionResult, SessionStatus
from polar.models.task import Branching
from polar.models.views import SessionView
from polar.store.database import Repository, writes
from polar.store.sessions import MOST_SESSIONS, origin_of, view_of, views
from polar.store.tables import sessions, tasks
from polar.store.tasks import Queue


class Branches(Repository):
    """The sessions that others are the origin of."""

    @writes
    def add(
        self,
        connection: Connection,
        task_id: str,
        origin: Origin,
        samples: int,
        request_id: str | None = None,
    ) -> tuple[tuple[SessionView, ...], bool]:
        """Add sessions with an origin to a task, all or none; False: the same request was here before.

        Conflict where the request asked for something else, or the task has no room for them.
        """
        (task,) = lock_tasks(connection, tasks.c.id == task_id) or (None,)
        if task is None:
            raise NotFound(f"no task {task_id!r}", hint="`polar tasks` lists them")
        if known := _of_request(connection, task_id, request_id):
            if len(known) != samples or any(view.origin != origin for view in known):
                raise Conflict(f"request {request_id!r} asked for other branches", hint="give it another id")
            return known, False
        first = _next_sample(connection, task_id)
        _check_room(task_id, first, samples)
        _insert(connection, task, [origin] * samples, first, self._database.now(), request_id)
        return _views(connection, sessions.c.task_id == task_id, sessions.c.sample >= first), True


def lock_tasks(connection: Connection, which: ColumnElement[bool]) -> Sequence[Row[Any]]:
    """Tasks that may get or lose sessions: everyone locks them in this order, and before their sessions."""
    names = ("id", "run_id", "harness", "runtime", "priority", "early_stop", "branching")
    query = select(*(tasks.c[name] for name in names)).where(which).order_by(tasks.c.seq)
    return connection.execute(query.with_for_update(key_share=True)).all()


def branch_out(
    connection: Connection, task: Row[Any], row: Row[Any], result: SessionResult, now: float
) -> str | None:
    """Add the branches that leave a completed session, if its task has branches; what was left out, if
    anything.

    In the transaction that ends the session: at no moment does the task look as if all of it had ended.
    """
    if task.branching is None or row.cancel_requested or result.status is not SessionStatus.COMPLETED:
        return None
    wanted = _chosen(Branching.model_validate_json(task.branching), row, result)
    if not wanted:
        return None
    first = _next_sample(connection, row.task_id)
    fitting = wanted[: MOST_SESSIONS - first]
    _insert(connection, task, fitting, first, now)
    if len(fitting) == len(wanted):
        return None
    left_out = f"{len(wanted) - len(fitting)} of {len(wanted)} branches were left out"
    return f"{left_out}: a task has at most {MOST_SESSIONS} sessions"


def _chosen(branching: Branching, row: Row[Any], result: SessionResult) -> list[Origin]:
    """Where the branches of a session begin; after its last model call there is nothing left to sample."""
    own = origin_of(row)
    depth = 1 if own is None else own.depth + 1
    if depth > branching.depth or not result.has_recording:
        return []
    points = [at for at in dict.fromkeys(result.branch_at) if 0 <= at < result.stats.completions]
    return [
        Origin(
            session_id=row.id,
            calls=at,
            on_divergence=branching.on_divergence,
            budgets=branching.budgets,
            depth=depth,
        )
        for at in points
        for _ in range(branching.samples)
    ]


def _check_room(task_id: str, present: int, samples: int) -> None:
    if present + samples > MOST_SESSIONS:
        raise Conflict(
            f"task {task_id!r} has {present} of {MOST_SESSIONS} sessions: {samples} more do not fit",
            hint="replay the session, which makes a task of its own",
        )


def _next_sample(connection: Connection, task_id: str) -> int:
    """The number after the highest of a locked task, which is also how many sessions it has."""
    newest = select(func.max(sessions.c.sample)).where(sessions.c.task_id == task_id)
    return int(connection.execute(newest).scalar_one()) + 1


def _insert(
    connection: Connection,
    task: Row[Any],
    origins: Sequence[Origin],
    first_sample: int,
    now: float,
    request_id: str | None = None,
) -> None:
    if not origins:
        return
    queue = Queue(task.runtime, task.priority)
    rows = queue.rows(
        {"task_id": task.id, "run_id": task.run_id, "harness": task.harness},
        origins,
        now,
        first_turn=queue.turn(connection),
        first_sample=first_sample,
        request_id=request_id,
    )
    connection.execute(insert(sessions), rows)


def _of_request(connection: Connection, task_id: str, request_id: str | None) -> tuple[SessionView, ...]:
    if request_id is None:
        return ()
    return _views(connection, sessions.c.task_id == task_id, sessions.c.request_id == request_id)


def _views(connection: Connection, *which: ColumnElement[bool]) -> tuple[SessionView, ...]:
    return tuple(map(view_of, connection.execute(views().where(*which).order_by(sessions.c.sample))))
