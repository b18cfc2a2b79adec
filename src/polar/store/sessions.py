"""Sessions as they are stored: reading them, cancelling them, and ending them with a result."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Row,
    ScalarSelect,
    Select,
    bindparam,
    cast,
    delete,
    func,
    insert,
    select,
    update,
)

from polar.errors import InvalidInput, NotFound
from polar.models.component import view
from polar.models.session import (
    REPLAYED_TOKENS,
    UNRECORDED,
    FailureReason,
    Origin,
    Progress,
    SessionResult,
    SessionStatus,
    TrajectoryStats,
)
from polar.models.views import Reward, SessionFilter, SessionPage, SessionView
from polar.store.database import Repository, reads, writes
from polar.store.feeds import Feed, announce, event, record
from polar.store.tables import captures, results, runs, sessions, tasks

LEASED = frozenset({SessionStatus.INIT, SessionStatus.READY, SessionStatus.RUNNING, SessionStatus.POSTRUN})
"""The statuses of a session that a node holds a lease on."""

IS_OPEN = sessions.c.status.not_in([status for status in SessionStatus if status.ended])
"""True of a session that has not ended."""

MOST_SESSIONS = 1024
"""How many sessions one task may have, branches included."""
_LONGEST_PLAIN_TASK_ID = 128 - len(f".{MOST_SESSIONS - 1}")


def session_id(task_id: str, sample: int) -> str:
    """`task.sample`; a task id too long for that is cut, and a digest of the whole stands in for the rest.

    The two forms cannot meet: only the short one ends in a dot and digits.
    """
    if len(task_id) <= _LONGEST_PLAIN_TASK_ID:
        return f"{task_id}.{sample}"
    return f"{task_id[:90]}.{sample}-{hashlib.sha256(task_id.encode()).hexdigest()[:32]}"


def page_start(after: str | None) -> int:
    """The row a page begins after, from the text that the page before it gave as `next`."""
    if after is None:
        return 0
    if not (after.isascii() and after.isdigit() and len(after) <= 18):
        raise InvalidInput("after: must be the 'next' of the page before")
    return int(after)


def next_page(rows: Sequence[Any], limit: int) -> str | None:
    """Where the page after this one begins, if there is a row more than the page holds."""
    return str(rows[limit - 1].seq) if len(rows) > limit else None


def count_by_status(
    connection: Connection, of: ColumnElement[Any], *conditions: ColumnElement[bool]
) -> dict[str, dict[SessionStatus, int]]:
    """For each value of a column, how many sessions there are in each status that has one."""
    query = select(of, sessions.c.status, func.count()).where(*conditions).group_by(of, sessions.c.status)
    counts: dict[str, dict[SessionStatus, int]] = defaultdict(dict)
    for value, status, count in connection.execute(query):
        counts[value][SessionStatus(status)] = count
    return counts


def end(
    connection: Connection,
    ended: Sequence[tuple[Row[Any], SessionResult]],
    now: float,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Store results and end their sessions, in the caller's transaction.

    `notes`: what else the event of a session tells, by its id.
    """
    if not ended:
        return
    announce(connection, Feed.RESULTS)
    webhook = select(tasks.c.webhook_id).where(tasks.c.id == bindparam("task")).scalar_subquery()
    connection.execute(
        insert(results).values(webhook_id=webhook),
        [
            {
                "session_id": row.id,
                "task_id": row.task_id,
                "task": row.task_id,
                "run_id": row.run_id,
                "fencing_token": row.fencing_token,
                "reward": _credited(result),
                "usable": result.is_usable,
                "sampled_tokens": result.stats.new_tokens,
                "trainable_tokens": result.stats.trainable_tokens,
                "result": result.model_dump_json(),
                "created_at": now,
            }
            for row, result in ended
        ],
    )
    connection.execute(
        update(sessions).where(sessions.c.id == bindparam("session")),
        [
            {
                "session": row.id,
                "status": result.status,
                "progress": Progress(
                    completions=result.stats.completions, sampled_tokens=result.stats.sampled_tokens
                ).model_dump_json(),
                "reward": _credited(result),
                "model": result.model,
                "version_min": result.policy_version_min,
                "version_max": result.policy_version_max,
                "seconds": sum(result.seconds.model_dump().values()),
                "lease_expires_at": None,
                "updated_at": now,
            }
            for row, result in ended
        ],
    )
    record(
        connection,
        [
            event(
                row,
                result.status,
                now,
                attempt=result.attempt,
                detail=result.error or (notes or {}).get(row.id),
            )
            for row, result in ended
        ],
    )
    drop_captures(connection, [row for row, _ in ended])


def drop_captures(connection: Connection, rows: Sequence[Row[Any]]) -> None:
    """Forget what the attempts at sessions have captured, in the caller's transaction, which has locked
    them: they have ended, or begin anew."""
    if captured := [row.id for row in rows if row.has_capture]:
        connection.execute(delete(captures).where(captures.c.session_id.in_(captured)))
        connection.execute(update(sessions).where(sessions.c.id.in_(captured)).values(has_capture=False))


def _credited(result: SessionResult) -> float | None:
    return result.reward if result.status is SessionStatus.COMPLETED else None


def ended_by_server(row: Row[Any], status: SessionStatus, error: str) -> SessionResult:
    """The result of a session that no node will deliver one for; what it sampled is in no recording."""
    progress = Progress.model_validate_json(row.progress)
    replayed = progress.replayed_tokens
    lost = {UNRECORDED: progress.sampled_tokens - replayed, REPLAYED_TOKENS: replayed}
    return SessionResult(
        session_id=row.id,
        task_id=row.task_id,
        sample=row.sample,
        attempt=row.attempt,
        status=status,
        error=error,
        failure=FailureReason.INFRASTRUCTURE if status is SessionStatus.FAILED else None,
        stats=TrajectoryStats(
            completions=progress.completions,
            sampled_tokens=progress.sampled_tokens,
            excluded={reason: tokens for reason, tokens in lost.items() if tokens},
        ),
    )


def cancel_rows(
    connection: Connection,
    rows: Sequence[Row[Any]],
    now: float,
    reason: str = "cancelled while it waited",
) -> int:
    """End the waiting sessions among `rows` and ask for the end of the held ones; how many that were."""
    waiting = [row for row in rows if row.status == SessionStatus.QUEUED]
    held = [row for row in rows if row.status in LEASED]
    end(connection, [(row, ended_by_server(row, SessionStatus.CANCELLED, reason)) for row in waiting], now)
    if held:
        connection.execute(
            update(sessions)
            .where(sessions.c.seq.in_([row.seq for row in held]))
            .values(cancel_requested=True, updated_at=now)
        )
    return len(waiting) + len(held)


class Sessions(Repository):
    """The sessions of all tasks."""

    @reads
    def get(self, connection: Connection, id: str) -> SessionView:
        """One session; NotFound if there is none."""
        return _get(connection, id)

    @reads
    def page(
        self,
        connection: Connection,
        wanted: SessionFilter = SessionFilter(),
        *,
        limit: int = 100,
        after: str | None = None,
    ) -> SessionPage:
        """Sessions that are wanted in the order in which they were submitted."""
        query = views().where(sessions.c.seq > page_start(after)).order_by(sessions.c.seq).limit(limit + 1)
        query = query.where(*matching(wanted))
        rows = connection.execute(query).all()
        return SessionPage(sessions=tuple(map(view_of, rows[:limit])), next=next_page(rows, limit))

    @writes
    def cancel(self, connection: Connection, id: str) -> SessionView:
        """A waiting session ends now, a held one when its node hears of it, an ended one stays as it is."""
        found = connection.execute(select(sessions).where(sessions.c.id == id).with_for_update()).all()
        cancel_rows(connection, found, self._database.now())
        return _get(connection, id)

    @reads
    def counts(self, connection: Connection) -> dict[SessionStatus, int]:
        """How many sessions are in each status; statuses without one are absent."""
        counted = connection.execute(select(sessions.c.status, func.count()).group_by(sessions.c.status))
        return {SessionStatus(status): count for status, count in counted}


def _get(connection: Connection, id: str) -> SessionView:
    row = connection.execute(views().where(sessions.c.id == id)).one_or_none()
    if row is None:
        raise NotFound(f"no session {id!r}", hint="`polar sessions` lists them")
    return view_of(row)


def whole(connection: Connection, value: ColumnElement[Any]) -> ColumnElement[int]:
    """The whole part of a number that is not negative."""
    # PostgreSQL rounds where SQLite cuts off, and not every SQLite has a floor.
    return cast(func.floor(value) if connection.dialect.name == "postgresql" else value, Integer)


def views() -> Select[Any]:
    """Sessions with their runs and results."""
    ended = sessions.outerjoin(results, results.c.session_id == sessions.c.id)
    return select(sessions, results.c.result, RUN_NAME).select_from(ended)


RUN_NAME = select(runs.c.name).where(runs.c.id == sessions.c.run_id).scalar_subquery().label("run")
"""The name of a session's run."""


def id_of_run(name: str) -> ScalarSelect[int]:
    """The id of a run of this name; nothing has it if there is none."""
    return select(runs.c.id).where(runs.c.name == name).scalar_subquery()


_FILTERS = frozenset(SessionFilter.model_fields) - {"reward"}


def matching(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    """A filter as conditions on rows of `sessions`."""
    row, given = sessions.c, wanted.model_dump(exclude_none=True, include=set(_FILTERS))
    conditions: dict[str, Callable[[Any], ColumnElement[bool]]] = {
        "run": lambda name: row.run_id == id_of_run(name),
        "step": lambda step: row.task_id.in_(select(tasks.c.id).where(*_of_step(wanted.run, step))),
        "version": lambda version: (row.version_min <= version) & (row.version_max >= version),
        "reward_min": lambda least: row.reward >= least,
        "reward_max": lambda most: row.reward <= most,
        "seconds_min": lambda least: row.seconds >= least,
        "seconds_max": lambda most: row.seconds <= most,
        "text": lambda text: row.id.contains(text, autoescape=True),
    }
    found = [
        conditions[name](value) if name in conditions else row[name] == value for name, value in given.items()
    ]
    return found if wanted.reward is None else [*found, _HAS_REWARD[wanted.reward]]


def _of_step(run: str | None, step: int) -> list[ColumnElement[bool]]:
    return [tasks.c.step == step, *([] if run is None else [tasks.c.run_id == id_of_run(run)])]


_HAS_REWARD = {
    Reward.POSITIVE: sessions.c.reward > 0,
    Reward.ZERO: sessions.c.reward <= 0,
    Reward.NONE: sessions.c.reward.is_(None),
}


def origin_of(row: Any) -> Origin | None:
    """The session whose recorded answers a stored one begins with, if there is one."""
    return None if row.origin is None else Origin.model_validate_json(row.origin)


def view_of(row: Any) -> SessionView:
    """A session with its result, as `views` reads them."""
    return view(
        SessionView,
        row,
        origin=origin_of(row),
        progress=Progress.model_validate_json(row.progress),
        result=SessionResult.model_validate_json(row.result) if row.result is not None else None,
    )
